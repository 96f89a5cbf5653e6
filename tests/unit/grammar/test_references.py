"""References in JSON schemas: each leads to a part of the schema, or is refused with the reason."""

from __future__ import annotations

from typing import Any

import pytest
from llguidance import LLMatcher

from pagewire.shared.base.errors import InvalidRequestError
from pagewire.shared.grammar.json_schemas import json_grammar
from pagewire.shared.grammar.references import References, check_references
from pagewire.shared.grammar.structures import grammar_text
from pagewire.shared.request.structured_outputs import StructuredOutputs
from pagewire.shared.tool_calls.definitions import Function, Tool, check_tools
from pagewire.tests.support.grammars import EOS, demo_vocabulary

ROOT: dict[str, Any] = {
    "$id": "https://example.com/root",
    "properties": {"a": {"type": "integer"}, "b": {"anyOf": [{"const": 1}, {"const": 2}]}},
    "$defs": {
        "a/b ~c%": {"const": 3},
        "named": {"$anchor": "here", "const": 4},
        "other": {"$id": "https://example.com/other", "const": 5},
        "": {"const": 6},
    },
}


@pytest.mark.parametrize(
    ("reference", "found"),
    [
        ("#/properties/a", {"type": "integer"}),
        ("#/properties/b/anyOf/1", {"const": 2}),
        ("#/$defs/a~1b%20~0c%25", {"const": 3}),
        ("#/$defs/", {"const": 6}),
        ("#", ROOT),
        ("", ROOT),
        ("#here", ROOT["$defs"]["named"]),
        ("https://example.com/root#/properties/a", {"type": "integer"}),
        ("https://example.com/other", ROOT["$defs"]["other"]),
    ],
)
def test_references_lead_to_parts(reference: str, found: Any) -> None:
    assert References(ROOT).find(reference) == found
    check_references({**ROOT, "items": {"items": {"$ref": reference}}})


@pytest.mark.parametrize(
    ("reference", "problem"),
    [
        ("#/$defs/none", "leads nowhere"),
        ("#/properties/b/anyOf/2", "leads nowhere"),
        ("#/properties/a/type/x", "leads nowhere"),
        ("#nobody", "leads nowhere"),
        ("https://example.com/elsewhere.json", "leads out of the schema"),
        ("file:///etc/passwd", "leads out of the schema"),
        ("other.json#/$defs/a", "leads out of the schema"),
        ("#/$defs/c", "leads only to itself"),
    ],
)
def test_others_are_refused_in_tools_and_in_forms(reference: str, problem: str) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"anyOf": []}, "x": {"$ref": reference}},
        "$defs": {"c": {"$ref": "#/$defs/d"}, "d": {"$ref": "#/$defs/c"}},
    }
    if reference != "#/$defs/c":
        del schema["$defs"]
    for strict in (None, True):
        tool = Tool("function", Function("f", parameters=schema, strict=strict))
        with pytest.raises(InvalidRequestError, match=problem) as caught:
            check_tools([tool], "auto")
        assert caught.value.param == "tools[0].function.parameters"
    with pytest.raises(InvalidRequestError, match=rf"response_format: json .*{problem}"):
        grammar_text(StructuredOutputs(json=schema), "response_format")


def test_what_is_not_a_reference_may_look_like_one() -> None:
    check_references({"properties": {"$ref": {"type": "string"}}})
    check_references({"const": {"$ref": "x"}, "default": {"$ref": "x"}, "x-more": {"$ref": "x"}})
    check_references(True)


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "integer", "enum": None, "minimum": None}, ["1"], ['"a"']),
        ({"type": "object", "properties": None, "required": None}, ["{}", '{"a":1}'], ["1"]),
        (
            {"type": "object", "properties": {"a": {"type": "integer"}}, "required": None},
            ["{}", '{"a":1}'],
            ['{"a":"x"}'],
        ),
        ({"type": "array", "items": None, "maxItems": 1, "prefixItems": None}, ["[1]"], ["[1,2]"]),
        ({"anyOf": None, "$ref": None, "type": "integer", "title": None}, ["1"], ["null"]),
        ({"const": None}, ["null"], ["1"]),
        ({"enum": [None, 1]}, ["null", "1"], ["2"]),
        ({"type": "integer", "nullable": True}, ["1", "null"], ['"a"']),
        ({"type": ["integer", "boolean"], "nullable": True}, ["true", "null"], ['"a"']),
        ({"type": "string", "enum": ["a"], "nullable": True}, ['"a"', "null"], ['"b"']),
        ({"allOf": [{"const": 1}], "nullable": True}, ["1", "null"], ["2"]),
        ({"type": "integer", "nullable": False}, ["1"], ["null"]),
    ],
)
def test_keywords_that_are_null_are_left_out_and_nullable_is_openapis(
    schema: dict[str, Any], right: list[str], wrong: list[str]
) -> None:
    text = json_grammar(schema)
    vocabulary = demo_vocabulary()
    for answer in (*right, *wrong):
        matcher = LLMatcher(vocabulary, text, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        tokens = vocabulary.tokenize_str(answer)
        assert matcher.consume_tokens([*tokens, EOS[0]]) == (answer in right), answer
