"""Answers of gpt-oss: messages with channels become reasoning, calls and content."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher

from pagewire.shared.grammar.structures import grammar_text
from pagewire.shared.request.structured_outputs import StructuredOutputs
from pagewire.shared.tool_calls.answer import AnswerParsing, ParsedMessage, answer_parser
from pagewire.shared.tool_calls.definitions import Tool
from pagewire.shared.tool_calls.events import CallArguments, CallBegin, CallEnd, ContentText
from pagewire.shared.tool_calls.events import ReasoningText as Reasoning
from pagewire.shared.tool_calls.form_grammar import after_reasoning
from pagewire.shared.tool_calls.formats import TOOL_FORMATS
from pagewire.shared.tool_calls.harmony import MAX_HEADER
from pagewire.shared.tool_calls.reasoning import REASONING_FORMATS, Begins
from pagewire.shared.tool_calls.syntax import ChatSyntax
from pagewire.tests.support.examples import MANY_EXAMPLES
from pagewire.tests.support.growth import grows_in_proportion
from pagewire.tests.support.tool_answers import parsed, splits
from pagewire.tests.unit.tool_calls.test_tool_grammar import EOS, FUNCTIONS, Allowed, vocabulary

SYNTAX = ChatSyntax(TOOL_FORMATS["harmony"], REASONING_FORMATS["harmony"])
NAMES = ("get_weather", "clock")
THINKS = "<|channel|>analysis<|message|>So.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
MARKERS = ["start", "end", "message", "channel", "constrain", "call", "return"]
VOCABULARIES = {
    "text": vocabulary([], False),
    "special": vocabulary([f"<|{name}|>" for name in MARKERS], True),
}
FRAGMENTS = st.sampled_from(
    [
        *(f"<|{name}|>" for name in MARKERS),
        *("<|", "analysis", "commentary", "final", "assistant", " ", "json", "5", "é"),
        *(" to=functions.clock", " to=functions.other", "{", "}", '{"a": "', '"}'),
    ]
)


def call(name: str, arguments: str, end: str = "<|call|>") -> str:
    head = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
    return head + arguments + end


def read(
    text: str, begins: Begins = "outside", parts: list[str] | None = None, **more: Any
) -> ParsedMessage:
    reading = AnswerParsing(NAMES, reasoning=begins, **more)
    return ParsedMessage.of(parsed(answer_parser(SYNTAX, reading), parts or [text]))


CASES: list[tuple[str, str | None, str | None, list[tuple[str, str]]]] = [
    (f"{THINKS}{FINAL}Yes.<|return|>", "So.", "Yes.", []),
    (f"{FINAL}Yes.", None, "Yes.", []),
    (f"{THINKS}{FINAL}", "So.", None, []),
    ("<|channel|>analysis<|message|>So", "So", None, []),
    ("<|channel|>analysis<|message|>So<|en", "So<|en", None, []),
    (f"{THINKS}<|channel|>fin", "So.", None, []),
    (f"{THINKS}{THINKS}{FINAL}a\n<b>", "So.\nSo.", "a\n<b>", []),
    (THINKS + call("clock", "{}"), "So.", None, [("clock", "{}")]),
    (THINKS + call("clock", "", ""), "So.", None, []),
    (THINKS + call("clock", ""), "So.", None, [("clock", "{}")]),
    (THINKS + call("clock", '{"a": [1'), "So.", None, [("clock", '{"a": [1')]),
    (THINKS + call("clock", '{"a": 12', ""), "So.", None, [("clock", '{"a": 12')]),
    (THINKS + call("clock", '{"a":"<|end"}'), "So.", None, [("clock", '{"a":"<|end"}')]),
    (call("clock", '\n{"a": 1}\n'), None, None, [("clock", '{"a": 1}')]),
    (call("clock", '{"a": 1,}'), None, "}", [("clock", '{"a": 1,')]),
    (call("clock", "now"), None, "now", []),
    (call("clock", "\nit is now \n"), None, "it is now \n", []),
    (call("clock", "{}\n or  now "), None, "\n or  now ", [("clock", "{}")]),
    (call("other", "{}"), None, "{}", []),
    (
        " to=functions.clock<|channel|>commentary json<|message|>{}<|call|>",
        *(None, None, [("clock", "{}")]),
    ),
    (
        call("clock", "{}") + "<|start|>assistant" + call("get_weather", '{"city": "Łódź"}'),
        *(None, None, [("clock", "{}"), ("get_weather", '{"city": "Łódź"}')]),
    ),
    (
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant" + call("clock", "{}"),
        *(None, "I look.", [("clock", "{}")]),
    ),
    (
        f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{FINAL}It is 5.",
        *(None, "I look.\nIt is 5.", []),
    ),
    ("<|channel|>analysis to=python<|message|>1+1<|call|>", "1+1", None, []),
    ("<|channel|>final <|constrain|>json<|message|>{}<|return|>", None, "{}", []),
    ("<|start|>assistant<|message|>Yes.<|end|>", None, "Yes.", []),
    (f"{THINKS}{FINAL}Yes.<|start|>assistant{FINAL}No.", "So.", "Yes.\nNo.", []),
    (" Yes <|channel|> no.", None, " Yes <|channel|> no.", []),
    ("<|chan", None, "<|chan", []),
    ("", None, "", []),
    ("<|channel|>" + "x" * (MAX_HEADER + 1), None, "<|channel|>" + "x" * (MAX_HEADER + 1), []),
]


@pytest.mark.parametrize(("text", "reasoning", "content", "calls"), CASES)
@given(data=st.data())
def test_parts_of_an_answer(
    data: st.DataObject,
    text: str,
    reasoning: str | None,
    content: str | None,
    calls: list[tuple[str, str]],
) -> None:
    for parts in ([text], data.draw(splits(text))):
        found = read(text, parts=parts)
        assert found.reasoning == reasoning
        assert found.content == ("" if content is None and not (reasoning or calls) else content)
        assert [(each.name, each.arguments) for each in found.tool_calls] == calls


@MANY_EXAMPLES
@given(data=st.data(), fragments=st.lists(FRAGMENTS, max_size=14))
def test_any_cut_gives_the_same_as_the_whole(data: st.DataObject, fragments: list[str]) -> None:
    text = "".join(fragments)
    begins: Begins = data.draw(st.sampled_from(["outside", "inside", "answer"]))

    def run(parts: list[str]) -> tuple[Any, ...]:
        ids = iter(range(99))
        parser: Any = answer_parser(SYNTAX, AnswerParsing(NAMES, reasoning=begins))
        parser._new_id = lambda: f"id-{next(ids)}"
        return parsed(parser, parts), parser.reasoning_end, parser.has_reasoning, parser.has_calls

    whole = run([text])
    assert run(data.draw(splits(text))) == whole
    begun = [event.index for event in whole[0] if isinstance(event, CallBegin)]
    assert begun == [event.index for event in whole[0] if isinstance(event, CallEnd)]


def test_spaces_alone_are_a_part_of_the_text() -> None:
    for text, content in (("it  is\nnow", "it  is\nnow"), ("{}\n or  now", "\n or  now")):
        assert read(call("clock", text), parts=list(call("clock", text))).content == content


def test_parts_come_as_they_are_written() -> None:
    parser = answer_parser(SYNTAX, AnswerParsing(NAMES, reasoning="outside"))
    assert parser.push("<|channel|>analysis<|message|>I") == [Reasoning("I")]
    assert parser.push(" see.<|end|><|start|>assistant<|chan") == [Reasoning(" see.")]
    assert parser.push("nel|>commentary to=functions.clock <|constrain|>json<|mess") == []
    (begin, part) = parser.push('age|>{"zo')
    assert isinstance(begin, CallBegin)
    assert (begin.name, part) == ("clock", CallArguments(0, '{"zo'))
    assert parser.push('ne": "UTC"}<|call|>') == [CallArguments(0, 'ne": "UTC"}'), CallEnd(0)]
    assert parser.flush() == []


def test_an_answer_that_is_cut_shows_no_header_and_keeps_its_text() -> None:
    def cut(text: str, begins: Begins = "outside") -> ParsedMessage:
        parser = answer_parser(SYNTAX, AnswerParsing(NAMES, reasoning=begins))
        return ParsedMessage.of(parsed(parser, [text], is_cut=True))

    for header in ("<|chan", " to=func", "<|channel|>comm", call("clock", "", end="")):
        assert cut(header) == ParsedMessage("")
    assert cut(f"{FINAL}1 <").content == cut("1 <", "answer").content == "1 <"
    assert cut(call("clock", "{}", end="<|ca")).content is None


def test_a_prompt_may_have_opened_a_message() -> None:
    assert SYNTAX.begins("<|start|>assistant") == "outside"
    assert SYNTAX.begins("<|start|>assistant<|channel|>analysis<|message|>") == "inside"
    assert SYNTAX.begins_after("One, ") == SYNTAX.begins_after("") == "answer"
    assert read(f"So.<|end|><|start|>assistant{FINAL}Yes.", "inside").reasoning == "So."
    found = read("two<|return|>", "answer")
    assert (found.reasoning, found.content) == (None, "two")


def test_only_what_is_wanted_is_given() -> None:
    text = THINKS + call("clock", "{}") + "<|start|>assistant" + call("clock", '{"a": 1}')
    found = read(text, only_one=True, include_reasoning=False)
    assert found.reasoning is None
    assert [each.arguments for each in found.tool_calls] == ["{}"]
    events = parsed(answer_parser(SYNTAX, AnswerParsing((), reasoning="outside")), [text])
    assert events == [Reasoning("So."), ContentText('{}\n{"a": 1}')]


def test_where_reasoning_ends() -> None:
    parser = answer_parser(SYNTAX, AnswerParsing(NAMES, reasoning="outside"))
    parser.push(THINKS)
    assert (parser.may_reason, parser.has_reasoning, parser.reasoning_end) == (True, True, None)
    parser.push(f"{FINAL}Yes.")
    assert (parser.may_reason, parser.reasoning_end) == (False, THINKS.index("<|start|>"))
    parser = answer_parser(SYNTAX, AnswerParsing(NAMES, reasoning="outside"))
    parser.push(f"{FINAL}Yes.")
    assert (parser.has_reasoning, parser.reasoning_end) == (False, None)


@pytest.mark.parametrize(
    "unit", ["<|start|>", "<|chan", FINAL, "<|message|><|end|>", " ", call("clock", '{"a":'), "{"]
)
def test_long_answers_take_time_in_proportion(unit: str) -> None:
    def run(size: int) -> None:
        parser, text = answer_parser(SYNTAX, AnswerParsing(NAMES)), unit * (size // len(unit))
        parsed(parser, [text[at : at + 4] for at in range(0, len(text), 4)])

    assert grows_in_proportion(run, 200_000)


@pytest.mark.parametrize(
    ("tools", "reasoning", "names"),
    [
        ("auto", "auto", ("harmony", "harmony")),
        ("harmony", "none", ("harmony", "harmony")),
        ("hermes", "harmony", ("harmony", "harmony")),
        ("none", "harmony", (None, "harmony")),
        ("none", "none", (None, None)),
    ],
)
def test_calls_and_reasoning_are_of_one_format(
    tools: str, reasoning: str, names: tuple[str | None, str | None]
) -> None:
    template = "<|channel|>analysis<|message|> functions. <|channel|>commentary"
    chosen = ChatSyntax.choose(template, tools, reasoning, lambda text: len(text))
    found = (chosen.tools and chosen.tools.name, chosen.reasoning and chosen.reasoning.name)
    assert found == names
    if names == ("harmony", "harmony"):
        assert {*chosen.tokens} == {f"<|{name}|>" for name in MARKERS} - {"<|return|>"}


TOOLS = [Tool("function", each) for each in FUNCTIONS]


class Answers(Allowed):
    """The grammar of an answer with tools, over a vocabulary."""

    def __init__(self, must_call: bool, begins: Begins = "outside", tokens: str = "text") -> None:
        self.tokenizer, ids = VOCABULARIES[tokens]
        syntax = ChatSyntax(SYNTAX.tools, SYNTAX.reasoning, ids)
        wanted = syntax.wanted(TOOLS, "required" if must_call else "auto", None)
        assert wanted is not None
        self.text = syntax.grammar(wanted, begins)


@pytest.mark.parametrize("tokens", VOCABULARIES)
@pytest.mark.parametrize("must_call", [True, False])
def test_what_an_answer_with_tools_may_be(must_call: bool, tokens: str) -> None:
    allowed = Answers(must_call, "outside", tokens)
    right = call("get_weather", '{"city": "Oslo", "days": 3}', "")
    preamble = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
    for before in ("", THINKS, THINKS + preamble, preamble + THINKS * 2):
        assert allowed.allows(before + right)
        assert allowed.allows(f"{before}{FINAL}Yes.") == (not must_call)
    assert allowed.allows(" to=functions.clock<|channel|>commentary json<|message|>{}")
    assert allowed.allows("<|channel|>commentary to=functions.clock<|message|>{}")
    for wrong in (
        call("get_weather", "{}", ""),
        call("clock", '{"a": 1}', ""),
        call("other", "{}", ""),
        right + "<|start|>assistant" + right,
        "<|channel|>other<|message|>Yes.",
        "Yes.",
    ):
        assert not allowed.allows(wrong), wrong


@pytest.mark.parametrize("tokens", VOCABULARIES)
def test_what_may_go_on_with_an_opened_message(tokens: str) -> None:
    right = call("clock", "{}", "")
    for must_call, begins in product((True, False), ("inside", "answer")):
        allowed = Answers(must_call, begins, tokens)
        has_call = must_call or begins == "inside"
        assert allowed.allows(f"So.<|end|><|start|>assistant{right}") or not has_call
        assert not allowed.allows(right) or (not must_call and begins == "answer")
        if begins == "answer" and not must_call:
            assert allowed.allows("two, three.")


@pytest.mark.parametrize("tokens", VOCABULARIES)
def test_all_that_is_allowed_is_read_back(tokens: str) -> None:
    ended = 0
    for seed in range(12):
        text = Answers(True, "outside", tokens).walk(seed, 1200)
        if text is None:
            continue
        ended += 1
        (found,) = read(text).tool_calls
        (function,) = [each for each in FUNCTIONS if each.name == found.name]
        jsonschema.validate(json.loads(found.arguments), function.schema)
    assert ended >= 3


@pytest.mark.parametrize("tokens", VOCABULARIES)
def test_a_form_is_followed_in_the_final_channel(tokens: str) -> None:
    tokenizer, ids = VOCABULARIES[tokens]
    syntax = ChatSyntax(None, SYNTAX.reasoning, ids)
    form = grammar_text(StructuredOutputs(json={"type": "object"})) or ""

    def allows(text: str, begins: Begins | None) -> bool:
        matcher = LLMatcher(tokenizer, after_reasoning(form, syntax, begins), log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        return matcher.consume_tokens([*tokenizer.tokenize_str(text, parse_special=True), EOS])

    for head in (FINAL, "<|channel|>final <|constrain|>json<|message|>"):
        assert allows(f'{THINKS}{head}{{"a": 1}}', "outside")
        assert allows(f'{head}{{"a": 1}}', "outside")
        assert allows(f'So.<|end|><|start|>assistant{head}{{"a": 1}}', "inside")
        assert not allows(f"{THINKS}{head}Yes.", "outside")
    assert allows('{"a": 1}', None)
    assert not allows('{"a": 1}', "outside")
