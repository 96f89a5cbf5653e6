"""JSON schemas as libraries write them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLTokenizer

from pagewire.shared.base.errors import InvalidRequestError
from pagewire.shared.grammar.compiler import check_grammar
from pagewire.shared.grammar.matcher import Matcher
from pagewire.shared.grammar.schema_fit import fitted
from pagewire.shared.grammar.structures import grammar_text
from pagewire.shared.grammar.vocabulary import load_vocabulary
from pagewire.shared.model.demo import demo_model_path
from pagewire.shared.request.structured_outputs import MAX_GRAMMAR_CHARS, StructuredOutputs
from pagewire.tests.support.growth import grows_in_proportion

VOCAB, EOS = 2048, (1, 5)
RECORD: dict[str, Any] = {
    "type": "object",
    "propertyNames": {"type": "string"},
    "additionalProperties": {"type": "integer"},
}
LIST: dict[str, Any] = {"type": "array", "items": {"type": "integer"}, "uniqueItems": False}
# Names of properties and values that look like keywords.
NAMED: dict[str, Any] = {
    "type": "object",
    "properties": {"uniqueItems": False, "propertyNames": {"type": "string"}},
    "required": ["propertyNames"],
    "additionalProperties": False,
}
CONST: dict[str, Any] = {"const": {"uniqueItems": False}}


@pytest.fixture(scope="module")
def vocabulary() -> LLTokenizer:
    return load_vocabulary(demo_model_path(), VOCAB, EOS)


def tagged(schema: dict[str, Any]) -> StructuredOutputs:
    content = {"type": "json_schema", "json_schema": schema}
    return StructuredOutputs(structural_tag={"format": content})


@pytest.mark.parametrize("asked", [
    lambda schema: StructuredOutputs(json=schema),
    lambda schema: StructuredOutputs(json=json.dumps(schema)),
    tagged,
])  # fmt: skip
@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (RECORD, ['{"a": 1}', "{}"], ['{"a": "b"}']),
        ({"items": RECORD, "$defs": {"x": RECORD}}, ['[{"a": 1}]'], ['[{"a": "b"}]']),
        (LIST, ["[1,1]"], ['["a"]']),
        ({"properties": {"of": LIST}, "type": "object"}, ['{"of": [1, 1]}'], ['{"of": ["a"]}']),
        (NAMED, ['{"propertyNames": "x"}'], ["{}", '{"propertyNames": "x", "uniqueItems": 1}']),
        (CONST, ['{"uniqueItems": false}'], ["{}"]),
        ({"type": "string", "format": "password"}, ['"a"'], ["1"]),
        ({"type": "integer", "format": "int64"}, ["1"], ['"a"']),
        (
            {"properties": {"format": {"const": 1}}, "type": "object"},
            ['{"format": 1}'],
            ['{"format": 2}'],
        ),
        ({"enum": [LIST]}, [json.dumps(LIST)], ["{}"]),
    ],
)
def test_keywords_that_say_nothing_are_left_out(
    asked: Any, schema: dict[str, Any], right: list[str], wrong: list[str], vocabulary: LLTokenizer
) -> None:
    compiled = check_grammar(grammar_text(asked(schema)) or "", vocabulary)
    for texts, expected in ((right, True), (wrong, False)):
        for text in texts:
            matcher = Matcher(compiled)
            matcher.follow(vocabulary.tokenize_str(text))
            assert (matcher.problem is None and matcher.is_accepting) is expected, text


INT64 = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}
FLOAT64 = {"type": "number", "minimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308}
FLOAT32 = {"type": ["number", "null"], "exclusiveMinimum": -3.4028234663852886e38, "maximum": 4e38}


@pytest.mark.parametrize("asked", [lambda schema: StructuredOutputs(json=schema), tagged])
@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (INT64, ["0", "-1", f"{2**63 - 1}", f"{1 - 10**18}"], [f"{2**63}", f"-{2**63 + 1}"]),
        ({"type": "integer", "minimum": -(2**64)}, ["5", f"-{10**18}"], [f"{-(2**64) - 1}"]),
        ({"type": "integer", "minimum": 10**18}, [f"{10**18}", f"{2**62}"], ["1", f"{10**18 - 1}"]),
        ({"type": "integer", "maximum": -(10**18)}, [f"-{10**18}"], ["1", f"{1 - 10**18}"]),
        # Bounds that a float64 does not have.
        ({"type": "integer", "exclusiveMinimum": 2**53}, [f"{2**53 + 2}"], [f"{2**53}"]),
        ({"type": "integer", "minimum": 2**53 + 1}, [f"{2**53 + 2}"], [f"{2**53}"]),
        ({"type": "integer", "maximum": -(2**53) - 1}, [f"-{2**53 + 2}"], [f"-{2**53}"]),
        ({"type": "integer", "minimum": 0.5, "maximum": 1e300}, ["1", f"{10**18}"], ["0"]),
        (FLOAT64, ["1.5", "-2", f"{10**17}"], ["null"]),
        (FLOAT32, ["1.5", "-2", "null"], ["true"]),
        ({"minimum": 3, "maximum": 1e30}, ["3.5", '"a"', "true"], ["2"]),
        ({"type": "string", "maxLength": 2**53 - 1}, ['"abc"'], ["1"]),
        ({"properties": {"minimum": INT64}, "required": ["minimum"], "type": "object"},
         ['{"minimum": -1}'], ['{"minimum": "a"}']),
    ],
)  # fmt: skip
def test_bounds_that_llguidance_cannot_count_to_are_moved(
    asked: Any, schema: dict[str, Any], right: list[str], wrong: list[str], vocabulary: LLTokenizer
) -> None:
    compiled = check_grammar(grammar_text(asked(schema)) or "", vocabulary)
    for texts, expected in ((right, True), (wrong, False)):
        for text in texts:
            matcher = Matcher(compiled)
            matcher.follow(vocabulary.tokenize_str(text))
            assert (matcher.problem is None and matcher.is_accepting) is expected, text


@pytest.mark.parametrize("asked", [lambda schema: StructuredOutputs(json=schema), tagged])
@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"exclusiveMinimum": 0, "maximum": 0.5}, ["0.5", "0.001"], ["0", "0.0", "-0", "0.51"]),
        ({"exclusiveMinimum": 7.0, "exclusiveMaximum": 7.05}, ["7.01"], ["7", "7.0", "7.05"]),
        ({"exclusiveMinimum": 99, "minimum": 5, "maximum": 99.000001}, ["99.000001"], ["99"]),
        ({"minimum": -0.5, "exclusiveMaximum": 0}, ["-0.5", "-0.001"], ["0", "-0", "0.1"]),
        ({"exclusiveMinimum": -1.5, "exclusiveMaximum": -1}, ["-1.01"], ["-1", "-1.0", "-1.5"]),
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 1e-5}, ["0.000001"], ["0", "0.00001"]),
        ({"minimum": -9999.5, "exclusiveMaximum": -9999}, ["-9999.1"], ["-9999"]),
        ({"exclusiveMinimum": 0, "maximum": 1}, ["1", "0.5", "0.0001"], ["0", "1.1"]),
        ({"exclusiveMinimum": 0}, ["1", "0.5", "0.0001"], ["0", "-0"]),
        ({"exclusiveMaximum": 0}, ["-1", "-0.5", "-0.0001"], ["0", "1"]),
        ({"exclusiveMinimum": 0, "minimum": 0.25, "maximum": 0.5}, ["0.25", "0.5"], ["0", "0.2"]),
    ],
)
def test_exclusive_bounds_are_excluded(
    asked: Any, schema: dict[str, Any], right: list[str], wrong: list[str], vocabulary: LLTokenizer
) -> None:
    """Also where the range has no other number without a fraction."""
    text = grammar_text(asked({"type": "number", **schema})) or ""
    compiled = check_grammar(text, vocabulary)
    for texts, expected in ((right, True), (wrong, False)):
        for each in texts:
            matcher = Matcher(compiled)
            matcher.follow(vocabulary.tokenize_str(each))
            assert (matcher.problem is None and matcher.is_accepting) is expected, each


@pytest.mark.parametrize(
    "schema",
    [
        # llguidance 1.9 ends the process with the first two.
        {"type": "integer", "minimum": -(2**63), "maximum": 10 - 2**63},
        {"type": "integer", "minimum": -(2**70), "exclusiveMaximum": -(2**63)},
        {"type": "integer", "minimum": 2**63},
        {"type": "number", "minimum": 1e19},
        {"type": "number", "maximum": -1e19},
    ],
)
def test_ranges_of_larger_numbers_alone_are_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="must allow numbers between -"):
        grammar_text(StructuredOutputs(json=schema))


@pytest.mark.parametrize("keyword", ["default", "examples"])
def test_references_to_annotations_reach_no_number_that_is_too_large(keyword: str) -> None:
    """llguidance 1.9 follows such references, and ends the process with these bounds."""
    bounds = {"minimum": -(2**63), "maximum": 10 - 2**63}
    defaults = {"default": bounds}
    inner = {"type": "integer", **bounds, "properties": defaults}
    kept = {"type": "integer", "properties": {"default": {}}}
    for value, fit in ((inner, kept), ([inner], [kept]), ([1, "a"], [1, "a"]), (2**70, 2**70)):
        schema = {keyword: value, "properties": {"a": {"$ref": f"#/{keyword}"}}}
        assert fitted(schema) == {**schema, keyword: fit}


def test_annotations_are_left_out_unless_a_reference_may_need_them() -> None:
    texts = {"title": "t", "description": "d" * MAX_GRAMMAR_CHARS, "$comment": "c"}
    others = {"default": [1] * MAX_GRAMMAR_CHARS, "examples": [{"type": "string"}]}
    kept = {"type": "object", "properties": {"title": {"type": "string"}, "default": {}}}
    schema = {**kept, "$defs": {"description": {"const": {"title": "t"}}}, "minProperties": 1}
    assert fitted({**texts, **schema, **others}) == schema
    assert grammar_text(StructuredOutputs(json={**texts, **schema, **others})) == grammar_text(
        StructuredOutputs(json=schema)
    )
    for reference in ("#/default/0", "#/%65xamples/0"):
        needed = {**others, "allOf": [{"$ref": reference}]}
        assert fitted({**texts, **needed}) == needed
    assert fitted({"title": {"a": 1}, "description": 5}) == {"title": {"a": 1}, "description": 5}
    with pytest.raises(ValueError, match="surrogates not allowed"):
        fitted({"title": "\ud800"})


@pytest.mark.parametrize("asked", [lambda schema: StructuredOutputs(json=schema), tagged])
@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [
        ('^[^"]*$', ["a", "\n", "\x01\\"], ['"', 'a"']),
        (r"^[^\\/]+$", ["a", "\t", '"'], ["\\", "/"]),
        (r'^[^\d"\\]$', ["a", "\n"], ['"', "\\", "1"]),
        (r'^[^\n"\\]$', ["a", "\t"], ['"', "\\", "\n"]),
        (r'^[^]"\]]$', ["a", "\n"], ['"', "]"]),
        (r'^[^-a"]$', ["b", "\n"], ['"', "-", "a"]),
        (r"^[^a[!-~]]$", ["\n", " "], ['"', "\\", "a"]),
        (r"^[\x00-\x1f]$", ["\n", "\x1f"], ['"', "\\"]),
        (r"^\P{P}$", ["a", "\n"], ['"', "\\", "."]),
        (r"^[^[:punct:]]\[$", ["a[", "\n["], ['"[', "\\["]),
        (r"^\x00[a-z]\[\d]$", ["\x00b[1]"], ["b[1]"]),
        (r"^[!-[\]-~]+$", ['a"[]'], ["\\", " "]),
        (r"^[^#-[\]-~]$", ['"', "\n"], ["a", "["]),
        (r"^[\d-[\n]]$", ["1", "-", "\n"], ["[", '"']),
        (r"^[a&&-[a]b]$", ["a"], ["-", "b"]),
        (r"^[:^alpha:]$", [":", "^", "a"], ["b", '"']),
        (r"^[:-[]$", [":", "[", "A"], ["b", '"']),
    ],
)
def test_classes_with_control_characters_allow_no_others(
    asked: Any, pattern: str, right: list[str], wrong: list[str], vocabulary: LLTokenizer
) -> None:
    named = {"patternProperties": {pattern: {"const": 1}}, "additionalProperties": False}
    for schema, form in (
        ({"type": "string", "pattern": pattern}, "{}"),
        ({"type": "object", **named}, "{{{}: 1}}"),
    ):
        compiled = check_grammar(grammar_text(asked(schema)) or "", vocabulary)
        for texts, expected in ((right, True), (wrong, False)):
            for text in texts:
                matcher = Matcher(compiled)
                matcher.follow(vocabulary.tokenize_str(form.format(json.dumps(text))))
                assert (matcher.problem is None and matcher.is_accepting) is expected, text


def test_error_of_a_class_without_an_end_shows_the_pattern(vocabulary: LLTokenizer) -> None:
    text = grammar_text(StructuredOutputs(json={"type": "string", "pattern": "^[^a]*[["}))
    with pytest.raises(InvalidRequestError, match=r"regex parse error: \^\[\^a\]\*\[\[ "):
        check_grammar(text or "", vocabulary)


UNITS = ["[", "[^", "]", "\\", "\\p{", "[a", "[^]a-", "-", "[\\d", "[^a-\\", "[&", "[:"]


@pytest.mark.parametrize("unit", UNITS)
def test_long_patterns_take_time_in_proportion(unit: str) -> None:
    def read(size: int) -> None:
        fitted({"pattern": unit * (size // len(unit))})

    assert grows_in_proportion(read, 60_000)


def test_objects_may_be_closed(vocabulary: LLTokenizer) -> None:
    inner = {"type": "object", "properties": {"properties": {"type": "integer"}}}
    open_one = {**inner, "additionalProperties": True}
    schema = {"type": "object", "properties": {"a": inner, "b": open_one, "c": {"type": "object"}}}
    for closes in (False, True):
        asked = StructuredOutputs(json=schema, disable_additional_properties=closes)
        compiled = check_grammar(grammar_text(asked) or "", vocabulary)
        for text, is_right in [
            ('{"a": {"properties": 1}, "b": {"x": 1}, "c": {"x": 1}}', True),
            ('{"a": {"x": 1}}', not closes),
            ('{"x": 1}', not closes),
        ]:
            matcher = Matcher(compiled)
            matcher.follow(vocabulary.tokenize_str(text))
            assert (matcher.problem is None and matcher.is_accepting) is is_right, text


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "uniqueItems": True},
        {"type": "object", "propertyNames": {"pattern": "^a"}},
        {"type": "object", "propertyNames": False},
        {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}},
    ],
)
def test_those_that_say_something_are_refused(
    schema: dict[str, Any], vocabulary: LLTokenizer
) -> None:
    with pytest.raises(InvalidRequestError, match="cannot express these keywords"):
        check_grammar(grammar_text(StructuredOutputs(json=schema)) or "", vocabulary)
