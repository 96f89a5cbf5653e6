"""Grammars that clients write: Lark's syntax or GBNF's, in the ways in which they are written."""

from __future__ import annotations

import contextlib

import pytest
from llguidance import LLTokenizer

from pagewire.shared.grammar.compiler import check_grammar
from pagewire.shared.grammar.lark_texts import lark_text
from pagewire.shared.grammar.matcher import Matcher
from pagewire.shared.grammar.tokens import load_vocabulary
from pagewire.shared.model.demo import demo_model_path
from pagewire.tests.support.growth import grows_in_proportion

VOCAB, EOS = 2048, (1, 5)


@pytest.fixture(scope="module")
def vocabulary() -> LLTokenizer:
    return load_vocabulary(demo_model_path(), VOCAB, EOS)


@pytest.mark.parametrize(
    ("grammar", "right", "wrong"),
    [
        ('start: "a" | "b"', ["a", "b"], ["c"]),
        ('?start: pair\n?pair: WORD "," WORD\nWORD: /[a-z]+/', ["x,y"], ["x"]),
        ('\n !start : "a" "b"\n', ["ab"], ["a"]),
        ('start[temperature=0.5]: "::="', ["::="], ["a"]),
        ('root ::= "a" | "b"', ["a", "b"], ["c"]),
        ('root ::= begin\nbegin ::= "start: a"', ["start: a"], ["a"]),
        (
            'root ::= "a"\n       | "b"  # the second\n       # and\n\n  | [|#"\\]]\n',
            [*'ab|#"]'],
            ["c"],
        ),
        ('root ::= "\\"" |\n  "x # y"\nother ::= "z"', ['"', "x # y"], ["z"]),
    ],
)
def test_both_syntaxes(
    grammar: str, right: list[str], wrong: list[str], vocabulary: LLTokenizer
) -> None:
    compiled = check_grammar(lark_text(grammar), vocabulary)
    for texts, expected in ((right, True), (wrong, False)):
        for text in texts:
            matcher = Matcher(compiled)
            matcher.follow(vocabulary.tokenize_str(text))
            assert (matcher.problem is None and matcher.is_accepting) is expected, text


@pytest.mark.parametrize("unit", ["\n", " ", "\n ", '"', "[", "#", "\\", '"a" ', "\n|", "start"])
def test_long_texts_take_time_in_proportion(unit: str) -> None:
    def read(size: int) -> None:
        with contextlib.suppress(ValueError):
            lark_text("root ::= " + unit * (size // len(unit)))

    assert grows_in_proportion(read, 60_000)


@pytest.mark.parametrize("grammar", ["", "a", 'root = "a"', 'start ::= "a"', 'root ::= "a'])
def test_what_is_neither_is_refused(grammar: str) -> None:
    with pytest.raises(ValueError, match=r"xpected|No 'root' rule"):
        lark_text(grammar)
