"""Answers that must be calls and end before a call has begun: nothing of them is content."""

from __future__ import annotations

import pytest

from pagewire.shared.tool_calls.answer import AnswerParsing, answer_parser
from pagewire.shared.tool_calls.events import AnswerEvent, CallBegin, ReasoningText
from pagewire.shared.tool_calls.formats import TOOL_FORMATS
from pagewire.shared.tool_calls.reasoning import REASONING_FORMATS, Begins
from pagewire.shared.tool_calls.syntax import ChatSyntax
from pagewire.tests.support.tool_answers import FORMS, NAMES, content_of, parsed, written

CALLS = [("get_weather", {"city": "Oslo"}), ("clock", {})]
TAGS = sorted({*REASONING_FORMATS} - {"harmony"})


def cut_answers(
    syntax: ChatSyntax, text: str, begins: Begins | None, is_cut: bool
) -> list[list[AnswerEvent]]:
    """Return what is found in each beginning of a text; it does not depend on the parts."""
    reading = AnswerParsing(NAMES, must_call=True, reasoning=begins, forms=dict(FORMS))
    found = []
    for at in range(len(text) + 1):
        whole, parts = (
            parsed(answer_parser(syntax, reading), given, is_cut)
            for given in ([text[:at]], text[:at])
        )
        assert [without_id(each) for each in whole] == [without_id(each) for each in parts]
        found.append(whole)
    return found


def without_id(event: AnswerEvent) -> object:
    return (event.index, event.name) if isinstance(event, CallBegin) else event


@pytest.mark.parametrize("is_cut", [True, False])  # a stop token is not known to cut an answer
@pytest.mark.parametrize("name", sorted(TOOL_FORMATS))
def test_the_beginning_of_a_required_call_is_not_content(name: str, is_cut: bool) -> None:
    form = TOOL_FORMATS[name]
    syntax, text, begins = ChatSyntax(form), written(form, CALLS), None
    if name == "harmony":
        syntax, begins = ChatSyntax(form, REASONING_FORMATS[name]), "outside"
    found = cut_answers(syntax, text.removeprefix("<|start|>assistant"), begins, is_cut)
    assert [content_of(each) for each in found] == [""] * len(found)
    names = [event.name for event in found[-1] if isinstance(event, CallBegin)]
    assert names == ["get_weather", "clock"]


@pytest.mark.parametrize("name", TAGS)
def test_nor_is_the_beginning_of_a_tag_before_it(name: str) -> None:
    form = REASONING_FORMATS[name]
    text = f"{form.open}Hm.{form.close}\n\n{written(TOOL_FORMATS['hermes'], CALLS)}"
    found = cut_answers(ChatSyntax(TOOL_FORMATS["hermes"], form), text, "outside", True)
    assert [content_of(each) for each in found] == [""] * len(found)
    assert ReasoningText("Hm.") in found[-1]


def test_a_remark_of_gpt_oss_before_a_required_call_is_content() -> None:
    syntax = ChatSyntax(TOOL_FORMATS["harmony"], REASONING_FORMATS["harmony"])
    text = "<|channel|>commentary<|message|>I look."
    found = cut_answers(syntax, text, "outside", True)
    assert content_of(found[-1]) == "I look."
    assert [content_of(each) for each in found[:-7]] == [""] * (len(found) - 7)
