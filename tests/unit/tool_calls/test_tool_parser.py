"""Tool calls in answers: found whatever the cuts, and nothing lost of what is none."""

from __future__ import annotations

import json

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pagewire.shared.tool_calls.calls import MAX_CALL_ID, MAX_HEAD
from pagewire.shared.tool_calls.events import CallArguments, CallBegin, CallEnd, ContentText
from pagewire.shared.tool_calls.formats import TOOL_FORMATS
from pagewire.shared.tool_calls.scanner import ValueScanner
from pagewire.tests.support.examples import MANY_EXAMPLES
from pagewire.tests.support.growth import grows_in_proportion
from pagewire.tests.support.tool_answers import (
    NAMES,
    VALUES,
    Call,
    calls_of,
    content_of,
    forms_of,
    parsed,
    parser,
    splits,
    written,
)

PUSHES = 64_000  # as many tokens as a long answer has
FORMATS = sorted({*TOOL_FORMATS} - {"harmony"})  # test_harmony.py
KEYWORDS = st.from_regex(r"[a-z_][a-z0-9_]{0,5}", fullmatch=True)
CALLS = st.lists(
    st.tuples(st.sampled_from(NAMES), st.dictionaries(KEYWORDS, VALUES, max_size=3)),
    min_size=1,
    max_size=3,
)
# What models may write, well or badly.
FRAGMENTS = st.sampled_from(
    [
        *"{}[]()\",:= \n'\\",
        "<tool_call>",
        "</tool_call>",
        "<tool_",
        "[TOOL_CALLS]",
        "[ARGS]",
        "[CALL_ID]",
        "<|python_tag|>",
        "<|tool_call|>",
        "<|/tool_call|>",
        "<function=",
        "<function=clock>",
        "</function>",
        "<parameter=",
        "<parameter=days>\n",
        "<parameter=city>",
        "\n</parameter>",
        "<function_calls>",
        "</function_calls>",
        "```",
        "```json\n",
        "tool_code\n",
        "<|START_ACTION|>",
        "<|END_ACTION|>",
        "Action:",
        '"tool_name": "clock"',
        '"tool_call_id": "0"',
        "<code>",
        "</code>",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "function",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
        '{"name": "clock"',
        ', "arguments": ',
        '"function": ',
        '"parameters": {',
        "clock",
        "get_weather",
        "clock(",
        "a=1",
        "x",
        "1.5e",
        "tru",
        "None",
        "\\u00",
        "; ",
    ]
)


@pytest.mark.parametrize("name", FORMATS)
@given(data=st.data(), calls=CALLS)
def test_calls_are_found_whatever_the_cuts(
    name: str, data: st.DataObject, calls: list[Call]
) -> None:
    form, forms = TOOL_FORMATS[name], forms_of(calls)
    assume(forms is not None)
    before = data.draw(st.sampled_from(["", "Let me see.", "a < b"])) if form.open else ""
    text = before + data.draw(st.sampled_from(["", " ", "\n\n"])) + written(form, calls)
    events = parsed(parser(name, forms=forms), data.draw(splits(text)))
    assert calls_of(events) == calls
    assert content_of(events) == before
    begins = [event for event in events if isinstance(event, CallBegin)]
    assert [(each.index, each.id) for each in begins] == [(i, f"id-{i}") for i in range(len(calls))]
    assert [event.index for event in events if isinstance(event, CallEnd)] == [*range(len(calls))]


HARD = [
    ("get_weather", {"city": '"\\ \U0001f44b\n</tool_call>]}', "days": [{"a": {"b": []}}]}),
    ("clock", {}),
]


@pytest.mark.parametrize("name", FORMATS)
def test_each_cut_in_two_gives_the_same(name: str) -> None:
    form, forms = TOOL_FORMATS[name], forms_of(HARD)
    before, after = ("So: ", " \U0001f44b.") if form.open else ("", "")
    text = before + written(form, HARD) + after
    whole = parsed(parser(name, forms=forms), [text])
    if form.kind != "xml":  # in which the text has the mark that ends a call
        assert calls_of(whole) == HARD
        assert content_of(whole).strip() == (before.strip() + after).strip()
    for at in range(len(text) + 1):
        assert parsed(parser(name, forms=forms), [text[:at], text[at:]]) == whole, at
    assert parsed(parser(name, forms=forms), text) == whole


@pytest.mark.parametrize("name", FORMATS)
@MANY_EXAMPLES
@given(data=st.data(), fragments=st.lists(FRAGMENTS, max_size=14))
def test_any_cut_gives_the_same_as_the_whole(
    name: str, data: st.DataObject, fragments: list[str]
) -> None:
    text = "".join(fragments)
    whole = parsed(parser(name), [text])
    assert parsed(parser(name), data.draw(splits(text))) == whole
    if not any(isinstance(event, CallBegin) for event in whole):
        assert content_of(whole) == text
    for event in whole:
        if isinstance(event, CallArguments) and is_balanced(event.text):
            assert isinstance(json.loads(event.text), dict)


@pytest.mark.parametrize("name", FORMATS)
def test_an_answer_that_is_cut_does_not_show_the_beginning_of_a_call(name: str) -> None:
    """Unless it may be a text: where nothing marks calls, or within the first marker."""
    form = TOOL_FORMATS[name]
    text = written(form, [("clock", {}), ("get_weather", {"city": "Oslo"})])
    begun = text.index("clock") + len("clock") + 1 if not form.open else len(form.open.strip())
    for at in range(len(text) + 1):
        events = parsed(parser(name), [text[:at]], is_cut=True)
        assert events == parsed(parser(name), text[:at], is_cut=True)
        is_begun = any(isinstance(event, CallBegin) for event in events)
        shown = "" if is_begun or (form.open and at >= begun) else text[:at]
        assert content_of(events) == shown, text[:at]


@pytest.mark.parametrize("text", ["[1, 2", "<tool_call> is a tag", "a <tool_", "<tool_call>{} "])
def test_an_answer_that_is_cut_keeps_what_is_not_a_call(text: str) -> None:
    for name in ("hermes", "pythonic"):
        assert content_of(parsed(parser(name), [text], is_cut=True)) == text


@pytest.mark.parametrize("text", ["[TOOL_CALLS][CALL_ID]", "[TOOL_CALLS]cl[CALL_ID]a"])
def test_a_name_is_whole_before_an_id(text: str) -> None:
    for parts in ([text], [*text]):
        assert content_of(parsed(parser("mistral_args"), parts, is_cut=True)) == text


def is_balanced(text: str) -> bool:
    scanner = ValueScanner()
    return scanner.push(text)[1] == len(text) and scanner.is_done


@pytest.mark.parametrize(
    ("name", "text", "content"),
    [
        ("hermes", '<tool_call>{"name": "other", "arguments": {}}</tool_call>', None),
        ("hermes", "<tool_call>clock()</tool_call>", None),
        ("hermes", 'a <tool_call>{"name": "clock", "arguments": 5}</tool_call>', None),
        ("hermes", "a <tool_c", None),
        ("hermes", ' <tool_call>\n{"name": "clock", "arguments"', None),
        ("hermes", "1 <2\n ", None),
        ("llama3_json", '{"answer": 42}', None),
        ("llama3_json", 'See {"name": "clock", "parameters": {}}', None),
        ("llama3_json", "<|python_tag|>print(1)", None),
        ("mistral", '[TOOL_CALLS]{"name": "clock"}', None),
        ("mistral_args", '[TOOL_CALLS]clock{"a": 1}', None),
        ("mistral_args", "[TOOL_CALLS]cloc", None),
        ("pythonic", "[1, 2]", None),
        ("pythonic", "[clock(1)]", None),
        ("pythonic", "[other()]", None),
        ("pythonic", "clock()", None),
        ("phi4_mini", '<|tool_call|>{"name": "clock"}<|/tool_call|>', None),
        ("hermes", '<tool_call>{"function": {"name": "clock"}, "name": "clock"}', None),
        ("phi4_mini", '<|tool_call|>[{"function": {"function": {"name": "clock"}}}]', None),
        ("granite", '<|tool_call|>[{"function": 5, "arguments": {}}]', None),
        ("granite", "a <tool_call> b", None),
        ("granite", '<|tool_call|>[{"name": "other", "arguments": {}}]', None),
        ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>clock<｜tool▁sep｜>{}", None),
        ("deepseek_v31", "<｜tool▁calls▁begin｜>clock<｜tool▁sep｜>{}", None),
        ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>clo", None),
        ("olmo3", "<function_calls>print(1)</function_calls>", None),
        ("tool_code", "```tool_code\nprint(clock())\n```", None),
        ("smollm3_python", "Write <code>x = clock()</code>", None),
        ("cohere2", '<|START_ACTION|>[{"tool_name": "other", "parameters": {}}]', None),
        ("cohere2", '<|START_ACTION|>{"tool_name": "clock"}<|END_ACTION|>', None),
        ("command_r", "Action: call the clock.", None),
        ("command_r", 'Action: ```json\n[\n    {"tool_name": "directly-answer"}\n]```', None),
    ],
)
def test_what_is_not_a_call_is_content(name: str, text: str, content: str | None) -> None:
    events = parsed(parser(name), text)
    assert events == [ContentText(content or text)]


@pytest.mark.parametrize(
    ("name", "text", "arguments", "content"),
    [
        (
            "hermes",
            '<tool_call>{"arguments": {"a": 1}, "name": "clock"}</tool_call>',
            '{"a": 1}',
            "",
        ),
        ("hermes", '<tool_call>{"name":"clock"}</tool_call>', "{}", ""),
        ("hermes", '<tool_call>{"name":"clock","arguments":null}</tool_call>', "{}", ""),
        ("hermes", '<tool_call>{"name":"clock","parameters":{"a":2}}</tool_call>', '{"a":2}', ""),
        ("hermes", r'<tool_call>{"name":"clock","arguments":"{\"a\": 1}"}', '{"a": 1}', ""),
        ("hermes", '<tool_call>{"name":"clock","arguments":{"a":1}</tool_call>x', '{"a":1}', "x"),
        ("hermes", '<tool_call>{"name":"clock","arguments":{"a":1}}', '{"a":1}', ""),
        ("hermes", '<tool_call>{"name":"clock","arguments":{"a":"x\ny"}}', '{"a":"x\\ny"}', ""),
        ("hermes", '<tool_call>{"name":"clock","arguments":{"a":1,}}', '{"a":1,', "}}"),
        ("hermes", '<tool_call>{"name":"clock","arguments":{"a":12', '{"a":12', ""),
        ("hermes", '<tool_call>{"name":"clock","arguments":{}}</tool_', "{}", ""),
        ("llama3_json", '{"type":"function","name":"clock","parameters":{}}', "{}", ""),
        ("llama3_json", '<|python_tag|>{"name":"clock","parameters":{}} ', "{}", ""),
        ("mistral", '[TOOL_CALLS] [{"name":"clock","arguments":{},"id":"abcdefghi"}]', "{}", ""),
        ("mistral_args", '[TOOL_CALLS]clock[CALL_ID]abcdefghi[ARGS]{"a": 1}', '{"a": 1}', ""),
        ("pythonic", "[clock()]", "{}", ""),
        ("pythonic", "[clock(a=True, b=[None, 1,],)]", '{"a": true, "b": [null, 1]}', ""),
        ("pythonic", """[clock(a='x"\\'y', b="\\x41")]""", '{"a": "x\\"\'y", "b": "A"}', ""),
        ("pythonic", "[clock(a=f(1))]", '{"a": ', "f(1))]"),
        ("pythonic", "[clock(a=1), other()]", '{"a": 1}', ", other()]"),
        ("phi4_mini", 'a<|tool_call|>[{"name":"clock","arguments":{}}]<|/tool_', "{}", "a"),
        ("phi4_mini", '<|tool_call|>[{"name":"clock","arguments":{}}]b', "{}", "b"),
        (
            "phi4_mini",
            '<|tool_call|>[ {"type": "function", "function": {"name": "clock", "arguments": '
            '{"a": {"b": 1}}}, "id": 5} ]<|/tool_call|>',
            '{"a": {"b": 1}}',
            "",
        ),
        ("granite", '<|tool_call|>[{"function": "clock", "arguments": {}}]', "{}", ""),
        ("hermes", '<tool_call>{"function": {"name": "clock"}}', "{}", ""),
        ("granite", 'a <tool_call>[{"name":"clock","arguments":{}}]', "{}", "a"),
        ("granite", '<|tool_call|> [ {"arguments": {"a":"]"}, "name":"clock"} ]', '{"a":"]"}', ""),
        (
            "deepseek_v3",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>clock\n"
            '```json\n{"a": "```"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>b',
            '{"a": "```"}',
            "b",
        ),
        (
            "deepseek_v31",
            "a<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>clock<｜tool▁sep｜>{}<｜tool▁call▁e",
            "{}",
            "a",
        ),
        (
            "deepseek_v31",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>clock<｜tool▁sep｜>{}<\ufffd",
            "{}",
            "",
        ),
        ("olmo3", "<function_calls>\nclock(a=null, b='x')\n\n", '{"a": null, "b": "x"}', ""),
        ("olmo3", "<function_calls>clock()</function_calls> b", "{}", " b"),
        ("olmo3", "<function_calls>clock()\nother()", "{}", "\nother()"),
        ("tool_code", "a\n```tool_code\nclock(a=[1, 2])\n``` b", '{"a": [1, 2]}', "a b"),
        ("smollm3_python", "a <code>\nclock(a=1)\n</code>", '{"a": 1}', "a"),
        (
            "cohere2",
            '<|START_ACTION|>[{"tool_name":"clock","parameters":{"a":1}}]<|END_ACTION|>',
            '{"a":1}',
            "",
        ),
        (
            "command_r",
            'I look.\nAction: ```json\n[\n  {\n "tool_name": "clock",\n "parameters": {\n'
            ' "a": "]```"\n }\n }\n]\n``` So.',
            '{\n "a": "]```"\n }',
            "I look. So.",
        ),
        ("command_r", 'Action:```json[{"parameters":{},"tool_name":"clock"}]```', "{}", ""),
    ],
)
def test_what_models_write_differently(name: str, text: str, arguments: str, content: str) -> None:
    events = parsed(parser(name), text)
    assert [e.name for e in events if isinstance(e, CallBegin)] == ["clock"]
    assert "".join(e.text for e in events if isinstance(e, CallArguments)) == arguments
    assert content_of(events) == content


def test_arguments_come_as_they_are_written() -> None:
    reader = parser("hermes")
    reader.push('<tool_call>{"name": "clock", "argu')
    assert reader.push('ments": {"ci') == [
        CallBegin(0, "id-0", "clock"),
        CallArguments(0, '{"ci'),
    ]
    assert reader.push('ty": "Kra') == [CallArguments(0, 'ty": "Kra')]
    assert reader.push('kow"}') == [CallArguments(0, 'kow"}')]
    assert reader.push("}") == [CallEnd(0)]
    assert reader.push("</tool_call>") == reader.flush() == []


def test_of_several_calls_only_one_is_wanted() -> None:
    text = written(TOOL_FORMATS["hermes"], [("clock", {}), ("get_weather", {"city": "Oslo"})])
    events = parsed(parser("hermes", most_calls=1), text)
    assert calls_of(events) == [("clock", {})]
    assert content_of(events) == ""


def test_ids_have_the_form_that_templates_want() -> None:
    assert len(TOOL_FORMATS["mistral"].new_call_id()) == 9
    assert TOOL_FORMATS["mistral_args"].new_call_id().isalnum()
    assert TOOL_FORMATS["hermes"].new_call_id().startswith("call_")
    assert TOOL_FORMATS["hermes"].new_call_id() != TOOL_FORMATS["hermes"].new_call_id()


@pytest.mark.parametrize("unit", ["<tool_call>", '<tool_call>{"name": "', "["])
def test_long_answers_take_time_in_proportion(unit: str) -> None:
    def read(size: int) -> None:
        reader, text = parser("hermes"), unit * (size // len(unit))
        for at in range(0, len(text), 4):
            reader.push(text[at : at + 4])
        reader.flush()

    assert grows_in_proportion(read, 200_000)


@pytest.mark.parametrize(
    ("name", "begin", "more"),
    [
        ("hermes", "", "    "),
        ("hermes", '<tool_call>{"name": "clock", "arguments": {}}', " \n \n"),
        ("llama3_json", "", "    "),
        ("llama3_json", '{"name": "clock", "parameters": {}}x', "    "),
        ("llama3_json", '{"arguments": {"a": "', "abcd"),
        ("llama3_json", '{"', "abcd"),
        ("mistral", "[TOOL_CALLS]", "    "),
        ("mistral_args", "[TOOL_CALLS]", "    "),
        ("mistral_args", "[TOOL_CALLS]clock[CALL_ID]", "abcd"),
        ("mistral_args", "[TOOL_CALLS]clock[ARGS]", "    "),
        ("pythonic", "[clock(", "    "),
        ("pythonic", "[clock(", "abcd"),
        ("pythonic", "[clock()", "    "),
        ("olmo3", "<function_calls>clock()", " \n  "),
        ("deepseek_v3", "<｜tool▁calls▁begin｜>", "    "),
        ("cohere2", "<|START_ACTION|>[", " \n  "),
        ("command_r", "Action:", "Act\n"),
    ],
)
def test_text_held_back_is_not_read_again(name: str, begin: str, more: str) -> None:
    def read(pushes: int) -> None:
        reader, text = parser(name), begin + more * pushes
        events = [event for part in (begin, *[more] * pushes) for event in reader.push(part)]
        events += reader.flush()
        if not any(isinstance(event, CallBegin) for event in events):
            assert content_of(events) == text

    assert grows_in_proportion(read, PUSHES)


@pytest.mark.parametrize(
    ("name", "unit"), [("hermes", "<tool_call>"), ("mistral_args", "[TOOL_CALLS]clock[CALL_ID]")]
)
def test_a_long_answer_may_come_as_a_whole(name: str, unit: str) -> None:
    def read(count: int) -> None:
        assert parsed(parser(name), [unit * count]) == [ContentText(unit * count)]

    assert grows_in_proportion(read, 40_000)


@pytest.mark.parametrize("size", [1, 7, 10_000])
@pytest.mark.parametrize(
    ("begin", "is_call"),
    [
        (f"[TOOL_CALLS]clock[CALL_ID]{'a' * MAX_CALL_ID}[ARGS]", True),
        (f"[TOOL_CALLS]clock[CALL_ID]{'a' * (MAX_CALL_ID + 1)}[ARGS]", False),
        (f"[TOOL_CALLS]{' ' * MAX_HEAD}clock[ARGS]", True),
        (f"[TOOL_CALLS]clock[ARGS]{' ' * (MAX_HEAD - len('clock[ARGS]{'))}", True),
        (f"[TOOL_CALLS]clock[ARGS]{' ' * MAX_HEAD}", False),
    ],
)
def test_what_comes_before_arguments_has_a_bound(begin: str, is_call: bool, size: int) -> None:
    text = begin + "{}"
    events = parsed(
        parser("mistral_args"), [text[at : at + size] for at in range(0, len(text), size)]
    )
    assert calls_of(events) == ([("clock", {})] if is_call else [])
    assert content_of(events) == ("" if is_call else text)
