"""A form begins after the reasoning, which is free; over several vocabularies."""

from __future__ import annotations

import json

import msgspec
import pytest
from llguidance import LLMatcher, LLTokenizer

from pagewire.shared.grammar.structures import grammar_text
from pagewire.shared.request.structured_outputs import StructuredOutputs
from pagewire.shared.tool_calls.answer import AnswerParsing, ParsedMessage, answer_parser
from pagewire.shared.tool_calls.definitions import Function
from pagewire.shared.tool_calls.form_grammar import after_reasoning, form_or_calls, parsing_of_form
from pagewire.shared.tool_calls.formats import TOOL_FORMATS
from pagewire.shared.tool_calls.grammar import AllowedCalls
from pagewire.shared.tool_calls.reasoning import REASONING_FORMATS, Begins
from pagewire.shared.tool_calls.syntax import ChatSyntax
from pagewire.tests.support.tool_answers import FORMS as FORMS_OF_TOOLS
from pagewire.tests.support.tool_answers import TOOLS, Call, as_grammars_have_it, written
from pagewire.tests.unit.tool_calls.test_tool_grammar import EOS, REASONINGS_IN_TAGS, VOCABULARIES

SCHEMA = {
    "type": "object",
    "properties": {"answer": {"type": "integer"}},
    "required": ["answer"],
    "additionalProperties": False,
}
FORMS = {
    "json": (StructuredOutputs(json={"type": "object"}), '{"a": 1}'),
    "object": (StructuredOutputs(json_object=True, disable_any_whitespace=True), '{"a":1}'),
    "regex": (StructuredOutputs(regex="[a-z]{2}"), "ab"),
    "choice": (StructuredOutputs(choice=["yes", "no"]), "no"),
    "grammar": (StructuredOutputs(grammar='start: "a" b\nb: "c"+\n%ignore / /'), "a cc"),
    "gbnf": (StructuredOutputs(grammar='root ::= "x" | "y"'), "y"),
    "tag": (
        StructuredOutputs(
            structural_tag={
                "format": {
                    "type": "sequence",
                    "elements": [
                        {"type": "const_string", "value": "<a>"},
                        {"type": "grammar", "grammar": 'start: "z"'},
                    ],
                }
            }
        ),
        "<a>z",
    ),
}


def allows(name: str, reasoning: str, begins: Begins | None, tokens: str, text: str) -> bool:
    tokenizer, ids = VOCABULARIES[tokens]
    syntax = ChatSyntax(None, REASONING_FORMATS[reasoning], ids)
    grammar = after_reasoning(grammar_text(FORMS[name][0]) or "", syntax, begins)
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher.consume_tokens([*tokenizer.tokenize_str(text, parse_special=True), EOS])


@pytest.mark.parametrize("tokens", VOCABULARIES)
@pytest.mark.parametrize("reasoning", REASONINGS_IN_TAGS)
@pytest.mark.parametrize("name", FORMS)
def test_the_form_begins_after_the_reasoning(name: str, reasoning: str, tokens: str) -> None:
    answer, form = FORMS[name][1], REASONING_FORMATS[reasoning]
    free = 'So {"a" is\n\nit, no'
    for breaks in ("", "\n\n"):
        end = f"{free}{form.close}{breaks}{answer}"
        assert allows(name, reasoning, "inside", tokens, end)
        assert allows(name, reasoning, "outside", tokens, form.open + end)
        assert not allows(name, reasoning, None, tokens, form.open + end)
        assert not allows(name, reasoning, "outside", tokens, end)
    assert allows(name, reasoning, "outside", tokens, answer)
    assert allows(name, reasoning, None, tokens, answer)
    assert not allows(name, reasoning, "inside", tokens, answer)
    assert not allows(name, reasoning, "inside", tokens, f"{free}{form.close}{answer}?{{")


def test_a_grammar_with_the_close_tag_describes_the_whole_answer() -> None:
    text = grammar_text(StructuredOutputs(grammar='start: "<think>" /[a-z]*/ "</think>" "x"')) or ""
    syntax = ChatSyntax(None, REASONING_FORMATS["think"], {})
    assert after_reasoning(text, syntax, "outside") == text


@pytest.mark.parametrize("tokens", VOCABULARIES)
def test_a_form_may_be_between_tags_after_reasoning(tokens: str) -> None:
    for begins, opened in (("outside", "<think>"), ("inside", "")):
        for end in ("<response>no</response>", "\n<response>\nno\n</response>", "no"):
            text = f"{opened}So.</think>{end}"
            assert allows("choice", "granite_tags", begins, tokens, text)
    assert not allows("choice", "granite_tags", "outside", tokens, "<response>no</response>")
    assert not allows("choice", "granite_tags", "inside", tokens, "So.</think><response>no")


CALLS: list[Call] = [("get_weather", {"city": "Oslo", "days": 2}), ("clock", {})]


def functions(strict: bool = False) -> tuple[Function, ...]:
    found = (Function(**tool["function"]) for tool in TOOLS)
    return tuple(msgspec.structs.replace(each, strict=strict) for each in found)


@pytest.mark.parametrize("tokens", VOCABULARIES)
@pytest.mark.parametrize("reasoning", [None, "think"])
@pytest.mark.parametrize("name", sorted(TOOL_FORMATS.keys() - {"harmony", "llama3_json"}))
def test_an_answer_has_the_form_or_is_calls(name: str, reasoning: str | None, tokens: str) -> None:
    form = TOOL_FORMATS[name]
    tokenizer, ids = VOCABULARIES[tokens]
    syntax = ChatSyntax(form, REASONING_FORMATS.get(reasoning or ""), ids)
    begins: Begins | None = None if reasoning is None else "outside"
    wanted = AllowedCalls(functions=functions(), must_call=False, only_one=False)
    text = grammar_text(StructuredOutputs(json=SCHEMA)) or ""
    both, _lenient, alone = form_or_calls(text, syntax, wanted, begins)
    assert alone == after_reasoning(text, syntax, begins)
    calls = written(form, CALLS, as_grammars_have_it(form))
    rights = ['{"answer": 3}', calls]
    wrongs = ["Well, 3.", f"Well. {calls}", '{"answer": "x"}', f'{{"answer": 3}}{calls}']
    if form.no_call:  # it would be content that does not have the form
        wrongs.append(written(form, [(form.no_call, {})], as_grammars_have_it(form)))
    if reasoning is not None:
        rights += [f"<think>Hm {{ .</think>\n\n{each}" for each in rights]
        wrongs.append("<think>Hm.</think>Well")
    for right in rights:
        assert follows(both, tokenizer, right), right
    for wrong in wrongs:
        assert not follows(both, tokenizer, wrong), wrong


def follows(grammar: str, tokenizer: LLTokenizer, text: str) -> bool:
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher.consume_tokens([*tokenizer.tokenize_str(text, parse_special=True), EOS])


def test_strict_functions_are_not_left_out_and_others_may_be() -> None:
    syntax = ChatSyntax(TOOL_FORMATS["hermes"])
    text = grammar_text(StructuredOutputs(json=SCHEMA)) or ""
    strict = AllowedCalls(functions=functions(strict=True), must_call=False, only_one=False)
    assert len(form_or_calls(text, syntax, strict, None)) == 1
    names = {"enum": [f"city {n}" for n in range(15_000)]}
    large = Function("f", parameters={"type": "object", "properties": {"city": names}})
    wanted = AllowedCalls(functions=(large,), must_call=False, only_one=False)
    assert form_or_calls(text, syntax, wanted, None) == (text,)
    assert form_or_calls(text, ChatSyntax(), wanted, None) == (text,)
    bare = ChatSyntax(TOOL_FORMATS["llama3_json"])
    assert form_or_calls(text, bare, strict, None) == (text,)
    channels = ChatSyntax(TOOL_FORMATS["harmony"], REASONING_FORMATS["harmony"])
    assert len(form_or_calls(text, channels, strict, "outside")) == 1


def reading(grammar: str, name: str) -> tuple[ChatSyntax, AnswerParsing]:
    syntax = ChatSyntax(TOOL_FORMATS[name], None, {})
    plain = AnswerParsing(names=tuple(each.name for each in functions()), forms=FORMS_OF_TOOLS)
    return syntax, parsing_of_form(plain, grammar, syntax)


@pytest.mark.parametrize("name", sorted(TOOL_FORMATS.keys() - {"harmony"}))
def test_an_answer_in_json_is_content_unless_it_is_calls(name: str) -> None:
    """Also one that looks like a call, or mentions one."""
    form = TOOL_FORMATS[name]
    syntax, reads = reading(grammar_text(StructuredOutputs(json_object=True)) or "", name)
    call = written(form, CALLS[1:], as_grammars_have_it(form))
    for text in (
        '{"name": "clock"}',
        '{"name": "clock", "parameters": {}}',
        '{"name": "clock", "arguments": {"a": 1}}',
        '[{"name": "clock", "arguments": {}}]',
        '[\n    {"tool_name": "clock", "parameters": {}}]',
        json.dumps({"how": call}),
        json.dumps({"how": call.replace("\n", "")}).replace('\\"', '"'),
        '["clock()"]',
        "{}",
    ):
        for parts in ([text], [*text]):
            found = events_of(syntax, reads, parts)
            assert found.content == text and not found.tool_calls, text
    may_call = name != "llama3_json"
    for text in (call, written(form, CALLS, as_grammars_have_it(form))):
        for parts in ([text], [*text]):
            found = events_of(syntax, reads, parts)
            assert bool(found.tool_calls) == may_call and bool(found.content) != may_call, text
            assert len(found.tool_calls) in ((1, 2) if may_call else (0,))


@pytest.mark.parametrize("name", ["regex", "choice", "grammar", "tag"])
def test_a_form_of_another_kind_may_be_made_to_have_calls(name: str) -> None:
    syntax, reads = reading(grammar_text(FORMS[name][0]) or "", "hermes")
    text = 'Now.<tool_call>{"name": "clock", "arguments": {}}</tool_call>'
    found = events_of(syntax, reads, [text])
    assert found.content == "Now." and len(found.tool_calls) == 1


def events_of(syntax: ChatSyntax, reads: AnswerParsing, parts: list[str]) -> ParsedMessage:
    reader = answer_parser(syntax, reads)
    return ParsedMessage.of([*(e for part in parts for e in reader.push(part)), *reader.flush()])
