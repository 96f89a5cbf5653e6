"""A form begins after the reasoning, which is free; over several vocabularies."""

from __future__ import annotations

import pytest
from llguidance import LLMatcher

from pagewire.shared.grammar.structures import grammar_text
from pagewire.shared.structured_outputs import StructuredOutputs
from pagewire.shared.tools.form_grammar import after_reasoning
from pagewire.shared.tools.reasoning import REASONING_FORMATS, Begins
from pagewire.shared.tools.syntax import ChatSyntax
from pagewire.tests.unit.test_tool_grammar import EOS, REASONINGS_IN_TAGS, VOCABULARIES

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
