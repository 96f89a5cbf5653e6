r"""What \d, \w and \s match in the regular expressions of clients: characters of ASCII."""

from __future__ import annotations

import re

import pytest
from llguidance import LLTokenizer

from pagewire.shared.grammar.compiler import check_grammar
from pagewire.shared.grammar.matcher import Matcher
from pagewire.shared.grammar.structures import grammar_text
from pagewire.shared.request.structured_outputs import StructuredOutputs
from pagewire.tests.support.grammars import demo_vocabulary

TEXTS = [
    *"7aZ_- \t\n\v\f\r!é\xa0\x1c\x85٣\uff17日\u2028\u3000",
    "\\d",
    "\\7",
    "12",
    "a1",
    "-1 ",
    "",
]
REGEXES = [
    *(r"\d", r"\D", r"\w", r"\W", r"\s", r"\S"),
    *(r"[\d]", r"[^\d]", r"[\D]", r"[\w-]+", r"[^\w\s]", r"[^\W\d]", r"[-\s\d]+"),
    *(r"\\d", r"\\\d", r"[\\d]", r"\d{2}|a\d", r"(?x: \s )", r"(?x:[\s])"),
]


@pytest.fixture(scope="module")
def vocabulary() -> LLTokenizer:
    return demo_vocabulary()


def matches(vocabulary: LLTokenizer, asked: StructuredOutputs, text: str) -> bool:
    matcher = Matcher(check_grammar(grammar_text(asked) or "", vocabulary))
    matcher.follow(vocabulary.tokenize_str(text))
    return matcher.problem is None and matcher.is_accepting


@pytest.mark.parametrize("regex", REGEXES)
def test_classes_are_pythons_of_ascii(vocabulary: LLTokenizer, regex: str) -> None:
    tag = {"format": {"type": "regex", "pattern": regex}}
    for text in TEXTS:
        expected = re.fullmatch(regex, text, re.ASCII) is not None
        assert matches(vocabulary, StructuredOutputs(regex=regex), text) is expected, text
        assert matches(vocabulary, StructuredOutputs(structural_tag=tag), text) is expected, text


def test_classes_are_those_of_the_patterns_of_schemas(vocabulary: LLTokenizer) -> None:
    for text in ("7", "٣", "é", "a", "_", " "):
        for name in (r"\d", r"\w"):
            schema = StructuredOutputs(json={"type": "string", "pattern": f"^{name}$"})
            in_schema = matches(vocabulary, schema, f'"{text}"')
            assert matches(vocabulary, StructuredOutputs(regex=name), text) is in_schema


def test_white_space_between_the_parts_of_json_is_of_ascii(vocabulary: LLTokenizer) -> None:
    asked = StructuredOutputs(json={"type": "array"}, whitespace_pattern=r"\s*")
    assert matches(vocabulary, asked, "[ \n\t1 ]")
    assert not matches(vocabulary, asked, "[\u30001]")


def test_unicode_classes_have_names_of_their_own(vocabulary: LLTokenizer) -> None:
    assert matches(vocabulary, StructuredOutputs(regex=r"\p{Nd}\p{L}+"), "٣éa")
