"""Grammars that clients write: Lark's syntax or GBNF's, in the ways in which they are written."""

from __future__ import annotations

import contextlib

import pytest
from llguidance import LLTokenizer

from pagewire.shared.base.errors import InvalidRequestError
from pagewire.shared.grammar.compiler import check_grammar
from pagewire.shared.grammar.lark_texts import lark_text
from pagewire.shared.grammar.matcher import Matcher
from pagewire.shared.grammar.structures import grammar_text
from pagewire.shared.grammar.vocabulary import load_vocabulary
from pagewire.shared.model.demo import demo_model_path
from pagewire.shared.request.structured_outputs import StructuredOutputs
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


INT64 = '{"type": "integer", "minimum": -9223372036854775808}'
TEXT = '{"type": "string", "pattern": "^[^\\"]+$"}'


@pytest.mark.parametrize(
    ("grammar", "right", "wrong"),
    [
        (f"start: %json {INT64}", ["-1", f"-{10**18}"], [f"-{2**63 + 1}"]),
        (f'start: a | b\na: %json\n {INT64} ","\nb: %json{TEXT}', ["5,", '"a"'], ['"\\""']),
        ('start: "%json {" /%json [{]"/ // %json {"\n', ['%json {%json {"'], []),
        ('start: %json {"const": "%json {"} | %json true', ['"%json {"', "1"], []),
    ],
)
def test_json_schemas_in_lark_are_made_to_fit(
    grammar: str, right: list[str], wrong: list[str], vocabulary: LLTokenizer
) -> None:
    test_both_syntaxes(grammar, right, wrong, vocabulary)


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        # llguidance 1.9 ends the process with the first one.
        ('{"type": "integer", "minimum": -9223372036854775808, "maximum": -9223372036854775798}',
         "%json: minimum and maximum must allow numbers between"),
        ('{"enum": [18446744073709551617]}', "%json: numbers in const and enum must be between"),
        ('{"type": "integer",}', "%json: .* line 1 column "),
        ("[" * 50_000, "nested too deeply|recursion"),
    ],
)  # fmt: skip
def test_json_schemas_in_lark_that_cannot_fit_are_refused(schema: str, reason: str) -> None:
    for asked in (
        StructuredOutputs(grammar=f"start: %json {schema}"),
        StructuredOutputs(
            structural_tag={"format": {"type": "grammar", "grammar": f"start: %json {schema}"}}
        ),
    ):
        with pytest.raises(InvalidRequestError, match=reason):
            grammar_text(asked)


@pytest.mark.parametrize("begin", ["root ::= ", "start: "])
@pytest.mark.parametrize(
    "unit",
    [
        "\n",
        " ",
        "\n ",
        '"',
        "[",
        "#",
        "\\",
        '"a" ',
        "\n|",
        "start",
        "/",
        "/a",
        '\\"',
        "<",
        "%json{}",
    ],
)
def test_long_texts_take_time_in_proportion(begin: str, unit: str) -> None:
    def read(size: int) -> None:
        with contextlib.suppress(ValueError):
            lark_text(begin + unit * (size // len(unit)))

    assert grows_in_proportion(read, 60_000)


@pytest.mark.parametrize("grammar", ["", "a", 'root = "a"', 'start ::= "a"', 'root ::= "a'])
def test_what_is_neither_is_refused(grammar: str) -> None:
    with pytest.raises(ValueError, match=r"xpected|No 'root' rule"):
        lark_text(grammar)
