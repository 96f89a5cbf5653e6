"""Reasoning split from answers, with a tag that may be cut, and with calls after it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewire.shared.model.demo import demo_model_path
from pagewire.shared.text.detokenizer import make_detokenizer
from pagewire.shared.text.tokenizer import Tokenizer
from pagewire.shared.tool_calls.answer import (
    AnswerParsing,
    ParsedMessage,
    answer_parser,
    count_reasoning,
    read_answer,
)
from pagewire.shared.tool_calls.events import ContentText, ReasoningText
from pagewire.shared.tool_calls.formats import TOOL_FORMATS
from pagewire.shared.tool_calls.reasoning import REASONING_FORMATS, Begins, recognise_reasoning
from pagewire.shared.tool_calls.syntax import ChatSyntax
from pagewire.tests.support.growth import grows_in_proportion
from pagewire.tests.support.tool_answers import joined, parsed, splits, written

SYNTAX = ChatSyntax(TOOL_FORMATS["hermes"], REASONING_FORMATS["think"])
TOKENIZER = Tokenizer.from_dir(demo_model_path())
FRAGMENTS = st.sampled_from(
    ["<think>", "</think>", "<th", "</", "ink>", "\n", " ", "a", "so", "<tool_call>"]
)


def message(text: str, begins: Begins = "outside", **reading: object) -> ParsedMessage:
    return read_answer(SYNTAX, AnswerParsing(("clock",), reasoning=begins, **reading), text)


@pytest.mark.parametrize(
    ("begins", "text", "reasoning", "content"),
    [
        ("outside", "<think>\nHm.\n</think>\n\nYes.", "Hm.", "Yes."),
        ("inside", "\nHm.\n</think>\n\nYes.", "Hm.", "Yes."),
        ("inside", "<think>\nHm.\n</think>Yes.", "Hm.", "Yes."),
        ("outside", "\n<think>Hm.</think>  Yes.\n", "Hm.", "  Yes.\n"),
        ("outside", "Yes.</think> No.", None, "Yes.</think> No."),
        ("outside", "Yes. <think>Hm.</think>", None, "Yes. <think>Hm.</think>"),
        ("outside", "<think>\n\n</think>\n\nYes.", None, "Yes."),
        ("inside", "Hm, so", "Hm, so", None),
        ("inside", "Hm.</thi", "Hm.</thi", None),
        ("outside", "<thi", None, "<thi"),
        ("outside", "", None, ""),
        ("inside", "a\n\nb</think>", "a\n\nb", None),
    ],
)
def test_parts_of_an_answer(
    begins: Begins, text: str, reasoning: str | None, content: str | None
) -> None:
    found = message(text, begins)
    assert (found.reasoning, found.content) == (reasoning, content)


@given(data=st.data(), fragments=st.lists(FRAGMENTS, max_size=12))
def test_any_cut_gives_the_same_as_the_whole(data: st.DataObject, fragments: list[str]) -> None:
    text = "".join(fragments)
    begins: Begins = data.draw(st.sampled_from(["outside", "inside"]))
    reading = AnswerParsing(("clock",), reasoning=begins)

    def read(parts: list[str]) -> tuple[Any, int | None]:
        parser = answer_parser(SYNTAX, reading)
        return parsed(parser, parts), parser.reasoning_end

    whole, end = read([text])
    assert read(data.draw(splits(text))) == (whole, end)
    for event in whole:
        if isinstance(event, ReasoningText):
            assert "</think>" not in event.text
    assert end is None or text[:end].endswith("</think>")


@pytest.mark.parametrize(
    ("begins", "more"), [("outside", "\n\n\n\n"), ("inside", "\n\n\n\n"), ("inside", "a\n\n\n")]
)
def test_text_held_back_is_not_read_again(begins: Begins, more: str) -> None:
    def read(pushes: int) -> None:
        parser = answer_parser(SYNTAX, AnswerParsing(reasoning=begins))
        text = "Hm." + more * pushes + "So." if begins == "inside" else more * pushes + "So."
        events = parsed(parser, [text[at : at + 4] for at in range(0, len(text), 4)])
        assert events == [ReasoningText(text) if begins == "inside" else ContentText(text)]

    assert grows_in_proportion(read, 64_000)


def test_calls_come_after_the_reasoning_and_those_in_it_are_none() -> None:
    call = written(TOOL_FORMATS["hermes"], [("clock", {})])
    found = message(f"<think>I could say {call}.</think>\n\n{call}")
    assert found.reasoning == f"I could say {call}."
    assert [each.name for each in found.tool_calls] == ["clock"]
    assert found.content is None


def test_reasoning_may_be_left_out() -> None:
    found = message("<think>Hm.</think>Yes.", include_reasoning=False)
    assert (found.reasoning, found.content) == (None, "Yes.")


def test_without_a_close_tag_yet_nothing_of_it_is_given_out() -> None:
    parser = answer_parser(SYNTAX, AnswerParsing(reasoning="inside"))
    found = [parser.push(part) for part in ("Hm.\n", "</th", "ink", ">\n", "\nYes")]
    assert found == [[ReasoningText("Hm.")], [], [], [], [ContentText("Yes")]]


@pytest.mark.parametrize("size", [1, 2, 100])
def test_tokens_of_the_reasoning_are_counted(size: int) -> None:
    text, rest = "<think>\nThe café is 東京.\n</think>", "\n\nYes."
    ids = TOKENIZER.encode(text, False) + TOKENIZER.encode(rest, False)
    parser = answer_parser(SYNTAX, AnswerParsing(reasoning="outside"))
    events = [event for at in range(0, len(text + rest), size)
              for event in parser.push((text + rest)[at : at + size])]  # fmt: skip
    assert joined(events)[0] == ReasoningText("The café is 東京.")
    counted = count_reasoning(ids, make_detokenizer(TOKENIZER, []), parser.reasoning_end)
    assert counted == len(TOKENIZER.encode(text, False))


@pytest.mark.parametrize(
    ("prompt", "begins"),
    [
        ("<|assistant|>\n<think>\n", "inside"),
        ("<|assistant|>\n<think>\n\n</think>\n\n", "outside"),
        ("<think> is a tag<|end|><|assistant|>", "outside"),
        ("", "outside"),
    ],
)
def test_the_prompt_may_open_the_reasoning(prompt: str, begins: Begins) -> None:
    assert SYNTAX.begins(prompt) == begins
    assert ChatSyntax().begins(prompt) == "outside"
    assert SYNTAX.begins_after("<think>so") == "inside"
    assert SYNTAX.begins_after("<think>so</think> yes") == SYNTAX.begins_after("yes") == "outside"


COHERE = ChatSyntax(TOOL_FORMATS["cohere2"], REASONING_FORMATS["cohere"])


@pytest.mark.parametrize(
    ("begins", "text", "reasoning", "content"),
    [
        ("outside", "<|START_RESPONSE|>Yes.<|END_RESPONSE|>", None, "Yes."),
        ("outside", "Yes.", None, "Yes."),
        ("outside", "<|START_RESP", None, "<|START_RESP"),
        ("outside", "<|START_", None, "<|START_"),
        ("answer", "Yes.<|END_RESPONSE|>", None, "Yes."),
        ("answer", "Yes.<|END_RESP", None, "Yes.<|END_RESP"),
        ("answer", "", None, ""),
        (
            "outside",
            "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Yes.<|END_RESPONSE|>",
            "Hm.",
            "Yes.",
        ),
        ("inside", "Hm.<|END_THINKING|><|START_RESPONSE|>Yes.<|END_RESPONSE|>", "Hm.", "Yes."),
        ("outside", "<|START_THINKING|>Hm.<|END_THINKING|>Yes.", "Hm.", "Yes."),
    ],
)
def test_answers_between_tags_without_reasoning(
    begins: Begins, text: str, reasoning: str | None, content: str | None
) -> None:
    for size in (1, 3, 100):
        parser = answer_parser(COHERE, AnswerParsing(("clock",), reasoning=begins))
        parts = [text[at : at + size] for at in range(0, len(text), size)]
        found = ParsedMessage.of(parsed(parser, parts))
        assert (found.reasoning, found.content) == (reasoning, content)


def test_calls_after_a_plan() -> None:
    call = written(TOOL_FORMATS["cohere2"], [("clock", {"a": 1})])
    text = f"<|START_THINKING|>I look.<|END_THINKING|>{call}"
    found = read_answer(COHERE, AnswerParsing(("clock",), reasoning="outside"), text)
    assert (found.reasoning, found.content) == ("I look.", None)
    assert [(each.name, each.arguments) for each in found.tool_calls] == [("clock", '{"a": 1}')]


def test_a_prompt_may_open_the_answers_tag() -> None:
    assert COHERE.begins("<|CHATBOT_TOKEN|><|START_RESPONSE|>") == "answer"
    assert COHERE.begins("<|CHATBOT_TOKEN|><|START_THINKING|>") == "inside"
    assert COHERE.begins("<|CHATBOT_TOKEN|>") == "outside"
    assert COHERE.begins_after("One, ") == "answer"


RESPONSES = ChatSyntax(TOOL_FORMATS["granite"], REASONING_FORMATS["granite_tags"])


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>Hm.</think>\n<response>\nYes.\n</response>\n", "Hm.", "Yes."),
        ("<think>Hm.</think><response>a\n\nb</response> c", "Hm.", "a\n\nb c"),
        ("<think>Hm.</think>\n\nYes.</response>", "Hm.", "Yes.</response>"),
        ("<think>Hm.</think><response>a < b\n</respon", "Hm.", "a < b\n</respon"),
        ("<think>Hm.</think> <resp", "Hm.", " <resp"),
        ("<response>Yes.</response>", None, "<response>Yes.</response>"),
    ],
)
@given(data=st.data())
def test_an_answer_may_be_between_tags(
    data: st.DataObject, text: str, reasoning: str | None, content: str
) -> None:
    for parts in ([text], data.draw(splits(text))):
        reader = answer_parser(RESPONSES, AnswerParsing(reasoning="outside"))
        found = ParsedMessage.of(parsed(reader, parts))
        assert (found.reasoning, found.content) == (reasoning, content)


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("Write your thoughts between <think></think>, then <response></response>", "granite_tags"),
        ("Write your thoughts after 'Here is my thought process:'", "granite"),
        ("<think>\n</think>", "think"),
        ("<|channel|>analysis<|message|>", "harmony"),
        ("Hm", None),
    ],
)
def test_formats_are_recognised_by_the_template(template: str, name: str | None) -> None:
    found = recognise_reasoning(template)
    assert (None if found is None else found.name) == name


def test_reasoning_between_phrases() -> None:
    syntax = ChatSyntax(TOOL_FORMATS["granite"], REASONING_FORMATS["granite"])
    text = "Here is my thought process: Hm.\n\nHere is my response:\n\nYes."
    found = read_answer(syntax, AnswerParsing(reasoning="outside"), text)
    assert (found.reasoning, found.content) == (" Hm.", "Yes.")
