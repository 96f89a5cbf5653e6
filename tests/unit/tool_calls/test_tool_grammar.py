"""Grammars of answers with calls: what they allow, on the demo's vocabulary with markers added."""

from __future__ import annotations

import json
import random
from itertools import product
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer

from pagewire.shared.base.errors import InvalidRequestError
from pagewire.shared.model.demo import demo_model_path
from pagewire.shared.text.tokenizer import Tokenizer
from pagewire.shared.tool_calls.definitions import Function
from pagewire.shared.tool_calls.formats import TOOL_FORMATS
from pagewire.shared.tool_calls.grammar import AllowedCalls, any_arguments, tools_grammar
from pagewire.shared.tool_calls.reasoning import REASONING_FORMATS, Begins
from pagewire.tests.support.tool_answers import (
    NAMES,
    TOOLS,
    Call,
    as_grammars_have_it,
    calls_of,
    content_of,
    parsed,
    parser,
    written,
)
from pagewire.tests.support.tool_models import SPECIAL, TEXT, make_model

FORMATS = sorted({*TOOL_FORMATS} - {"harmony"})  # test_harmony.py
FUNCTIONS = tuple(Function(**each["function"]) for each in TOOLS)
CALLS = [("get_weather", {"city": "Oslo", "days": 3}), ("clock", {})]
MARKERS = ["[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]", "<|python_tag|>"]
TOOL_MARKERS = {marker for form in TOOL_FORMATS.values() for marker in form.markers}
REASONING_MARKERS = {marker for form in REASONING_FORMATS.values() for marker in form.markers}
EOS = 1
REASONINGS_IN_TAGS = sorted({*REASONING_FORMATS} - {"harmony"})
REASONINGS: list[tuple[str | None, Begins]] = [
    (None, "outside"),
    *[(name, "outside") for name in REASONINGS_IN_TAGS],
    *[(name, "inside") for name in REASONINGS_IN_TAGS],
]


def vocabulary(markers: list[str], special: bool) -> tuple[LLTokenizer, dict[str, int]]:
    """The demo's, with markers as tokens."""
    content: dict[str, Any] = json.loads((demo_model_path() / "tokenizer.json").read_text())
    ids = {token["content"]: token["id"] for token in content["added_tokens"]}
    missing = [text for text in markers if text not in ids]
    for token_id, text in enumerate(missing, start=2048):
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        token = {"id": token_id, "content": text, "special": special, **flags}
        content["added_tokens"].append(token)
        ids[text] = token_id
    return LLTokenizer(json.dumps(content), eos_token=EOS), ids


# Without markers, as in Llama 3 and Mistral, and as in Qwen.
VOCABULARIES = {
    "text": vocabulary([], False),
    "special": vocabulary(MARKERS, True),
    "added": vocabulary(["<tool_call>", "</tool_call>", "<think>", "</think>"], False),
    "all": vocabulary(sorted(TOOL_MARKERS | REASONING_MARKERS), True),
}


class Allowed:
    """A grammar over a vocabulary."""

    def __init__(
        self,
        form: str,
        must_call: bool = True,
        only_one: bool = False,
        reasoning: tuple[str | None, Begins] = (None, "outside"),
        tokens: str = "text",
        functions: tuple[Function, ...] = FUNCTIONS,
        lenient: bool = False,
    ) -> None:
        self.tokenizer, ids = VOCABULARIES[tokens]
        wanted = AllowedCalls(
            functions=functions, must_call=must_call, only_one=only_one, lenient=lenient
        )
        thinks = REASONING_FORMATS[reasoning[0]] if reasoning[0] else None
        self.text = tools_grammar(TOOL_FORMATS[form], wanted, thinks, reasoning[1], ids)

    def matcher(self) -> LLMatcher:
        matcher = LLMatcher(self.tokenizer, self.text, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        return matcher

    def allows(self, text: str) -> bool:
        """Whether this may be an answer."""
        tokens = self.tokenizer.tokenize_str(text, parse_special=True)
        matcher = self.matcher()
        return matcher.consume_tokens([*tokens, EOS])

    def walk(self, seed: int, most: int = 400) -> str | None:
        """An answer at random; None if it has no end by then."""
        matcher, choose, tokens = self.matcher(), random.Random(seed), list[int]()
        for _ in range(most):
            mask = matcher.compute_bitmask()
            allowed = [8 * at + bit for at, byte in enumerate(mask) if byte
                       for bit in range(8) if byte >> bit & 1]  # fmt: skip
            token = EOS if EOS in allowed else choose.choice(allowed)
            matcher.consume_token(token)
            if token == EOS:
                return self.tokenizer.decode_str(tokens)
            tokens.append(token)
        return None


def calls_in(form: str, calls: list[Call]) -> str:
    return written(TOOL_FORMATS[form], calls, as_grammars_have_it(TOOL_FORMATS[form]))


def with_reasoning(text: str, reasoning: tuple[str | None, Begins]) -> str:
    name, begins = reasoning
    if name is None:
        return text
    form = REASONING_FORMATS[name]
    return (form.open if begins == "outside" else "") + "Hm, so." + form.close + "\n\n" + text


@pytest.mark.parametrize("tokens", VOCABULARIES)
@pytest.mark.parametrize(
    ("form", "reasoning"),
    [
        *product(FORMATS, [REASONINGS[0], ("think", "outside")]),
        *product(("hermes", "pythonic"), REASONINGS[1:]),
    ],
    ids=str,
)
def test_calls_are_allowed_and_text_unless_a_call_is_required(
    form: str, reasoning: tuple[str | None, Begins], tokens: str
) -> None:
    calls = with_reasoning(calls_in(form, CALLS), reasoning)
    one = with_reasoning(calls_in(form, CALLS[1:]), reasoning)
    text = with_reasoning("It is [late] {now}.", reasoning)
    for must_call, only_one in product((True, False), (True, False)):
        allowed = Allowed(form, must_call, only_one, reasoning, tokens)
        assert allowed.allows(one)
        assert allowed.allows(calls) == (not only_one)
        assert allowed.allows(text) == (not must_call)
        if reasoning[1] == "inside":
            assert not allowed.allows("Hm, so.")


@pytest.mark.parametrize("must_call", [True, False])
@pytest.mark.parametrize("form", FORMATS)
def test_arguments_follow_the_schema_once_a_call_has_begun(form: str, must_call: bool) -> None:
    allowed = Allowed(form, must_call)
    wrong: list[dict[str, Any]] = [{}, {"city": "Oslo", "days": 0}, {"city": "x", "more": 1}]
    if TOOL_FORMATS[form].kind != "xml":  # in which 5 is a text as well
        wrong.append({"city": 5})
    for arguments in (*wrong, {"city": "longer than 12"}):
        call = calls_in(form, [("get_weather", arguments)])
        assert not allowed.allows(call), arguments
    for arguments in ({"city": "O"}, {"city": "Oslo", "metric": False}):
        assert allowed.allows(calls_in(form, [("get_weather", arguments)]))


@pytest.mark.parametrize("form", FORMATS)
def test_an_unknown_function_cannot_be_called(form: str) -> None:
    call = calls_in(form, [("other", {})])
    assert not Allowed(form).allows(call)
    # Where calls have no marker it is text, and the parser takes it for that.
    assert Allowed(form, must_call=False).allows(call) == (not TOOL_FORMATS[form].open)


def test_a_model_that_calls_something_to_call_nothing_may_do_so() -> None:
    """Only where no call is required, and it is content."""
    call = calls_in("command_r", [("directly-answer", {})])
    assert Allowed("command_r", must_call=False).allows(f"So.\n{call}")
    assert not Allowed("command_r", must_call=True).allows(call)
    assert content_of(parsed(parser("command_r"), [call])) == call


@pytest.mark.parametrize("tokens", VOCABULARIES)
def test_answers_of_cohere_may_be_between_their_tags(tokens: str) -> None:
    allowed = Allowed("cohere2", False, reasoning=("cohere", "outside"), tokens=tokens)
    plan = "<|START_THINKING|>Hm.<|END_THINKING|>"
    for text in ("Yes.", "<|START_RESPONSE|>Yes.<|END_RESPONSE|>"):
        assert allowed.allows(text) and allowed.allows(plan + text)
    assert allowed.allows(plan + calls_in("cohere2", CALLS))


@pytest.mark.parametrize("form", FORMATS)
def test_all_that_is_allowed_is_read_back(form: str) -> None:
    """One table: what the grammar lets a model write is what the parser finds."""
    ended = 0
    for seed in range(12):
        text = Allowed(form, only_one=bool(seed % 2)).walk(seed)
        if text is None:
            continue
        ended += 1
        events = parsed(parser(form), [text])
        calls = calls_of(events)
        assert calls, text
        assert content_of(events) == "", text
        for name, arguments in calls:
            (function,) = [each for each in FUNCTIONS if each.name == name]
            jsonschema.validate(arguments, function.schema)
    assert ended >= 9


def test_a_function_without_declared_properties_takes_any() -> None:
    functions = any_arguments(FUNCTIONS)
    for form in FORMATS:
        call = calls_in(form, [("clock", {"zone": "UTC", "n": [1, 2]})])
        assert Allowed(form, functions=functions).allows(call)
        assert not Allowed(form).allows(call)


def test_what_no_grammar_can_express_may_be_left_out() -> None:
    schema = {
        "type": "object",
        "properties": {
            "ids": {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True},
            "path": {"type": ["string", "null"], "format": "uri-reference"},
            "size": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
        },
        "required": ["ids"],
    }
    functions = (Function("move", parameters=schema),)
    for form in FORMATS:
        kept = Allowed(form, functions=functions, lenient=True)
        assert kept.allows(calls_in(form, [("move", {"ids": [1, 2], "size": 1.5})]))
        assert not kept.allows(calls_in(form, [("move", {"ids": [3]})]))
        assert not kept.allows(calls_in(form, [("move", {"ids": [1], "more": 1})]))
        with pytest.raises((InvalidRequestError, AssertionError), match=r"uniqueItems|format"):
            Allowed(form, functions=functions).matcher()


def test_schemas_are_as_in_forms() -> None:
    schema = {
        "type": "object",
        "properties": {
            "ids": {"type": "array", "items": {"type": "integer"}, "uniqueItems": False},
            "at": {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
            "size": {"type": "number", "minimum": 0, "maximum": 1.7976931348623157e308},
            "of": {"type": "object", "propertyNames": {"type": "string"}},
        },
        "required": ["ids", "at", "size", "of"],
    }
    functions = (Function("move", parameters=schema, strict=True),)
    for form in FORMATS:
        allowed = Allowed(form, functions=functions)
        right: dict[str, Any] = {"ids": [1, 1], "at": -(2**62), "size": 0.5, "of": {"a": 1}}
        assert allowed.allows(calls_in(form, [("move", right)])), form
        wrong = [("at", -(2**63) - 1), ("at", 2**63), ("size", -1), ("ids", ["a"])]
        for name, value in wrong:
            assert not allowed.allows(calls_in(form, [("move", right | {name: value})])), (
                form,
                name,
            )


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"enum": [2**53 + 1]}, r"numbers in const and enum must be between -2\*\*53 and 2\*\*53"),
        ({"type": "integer", "maximum": -(2**70)}, "minimum and maximum must allow numbers"),
    ],
)
def test_numbers_that_no_grammar_can_express(schema: dict[str, Any], reason: str) -> None:
    properties = {"id": schema, "n": {"type": "integer"}}
    declared = {"type": "object", "properties": properties, "required": ["id", "n"]}
    functions = (Function("move", parameters=declared),)
    for form in FORMATS:
        with pytest.raises(InvalidRequestError, match=reason) as caught:
            Allowed(form, functions=functions)
        assert caught.value.param == "tools"
        kept = Allowed(form, functions=functions, lenient=True)
        assert kept.allows(calls_in(form, [("move", {"id": 2**53 + 1, "n": 1})]))
        assert not kept.allows(calls_in(form, [("move", {"id": 2**53 + 1, "n": "a"})]))


@pytest.mark.parametrize("required", [[{}, "n"], ["n", []], "n"], ids=str)
def test_required_may_be_anything(required: Any) -> None:
    """A client's mistake is a wrong schema at most, which llguidance reports."""
    parameters = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": required}
    for form in FORMATS:
        allowed = Allowed(form, functions=(Function("move", parameters=parameters),))
        if TOOL_FORMATS[form].kind in ("python", "xml"):
            assert allowed.allows(calls_in(form, [("move", {"n": 1})]))
            assert allowed.allows(calls_in(form, [("move", {})])) is (required == "n")


def test_text_that_utf8_cannot_encode_is_refused() -> None:
    properties = {"a": {"type": "array", "title": "\ud800"}}
    functions = (Function("move", parameters={"properties": properties}),)
    for form in FORMATS:
        with pytest.raises(InvalidRequestError, match=r"tools: .*surrogates not allowed"):
            Allowed(form, functions=functions)


def test_constants_are_followed() -> None:
    properties = {"on": {"type": "boolean", "const": True}, "off": {"enum": [False, None]}}
    schema = {"type": "object", "properties": properties, "required": [*properties]}
    functions = (Function("switch", parameters=schema),)
    for form in FORMATS:
        allowed = Allowed(form, functions=functions)
        for on, off in product((True, False), (False, None, True)):
            call = written(TOOL_FORMATS[form], [("switch", {"on": on, "off": off})], json.dumps)
            assert allowed.allows(call) == (on is True and off is not True), (form, call)


def test_references_and_nested_objects() -> None:
    schema = {
        "type": "object",
        "properties": {"at": {"$ref": "#/$defs/place"}, "ok": {"type": ["boolean", "null"]}},
        "required": ["at"],
        "$defs": {"place": {"type": "object", "properties": {"x": {"type": "integer"}},
                            "required": ["x"], "additionalProperties": False}},
    }  # fmt: skip
    functions = (Function("move", parameters=schema),)
    for form in FORMATS:
        allowed = Allowed(form, functions=functions)
        assert allowed.allows(calls_in(form, [("move", {"at": {"x": 1}})]))
        assert not allowed.allows(calls_in(form, [("move", {"at": {"x": "1"}})]))


def test_markers_are_tokens_where_they_are_to_grammars(tmp_path: Path) -> None:
    for name in SPECIAL:
        path = make_model(tmp_path, name)
        ours, theirs = Tokenizer.from_dir(path), LLTokenizer((path / "tokenizer.json").read_text())
        for text in [*SPECIAL[name], *TEXT.get(name, []), *MARKERS, "lambda", "<", "a"]:
            (token_id, *more) = theirs.tokenize_str(text, parse_special=True)
            is_token = not more and theirs.is_special_token(token_id)
            assert ours.marker_token_id(text) == (token_id if is_token else None), text


def test_names_of_functions_and_parsers_agree() -> None:
    assert tuple(function.name for function in FUNCTIONS) == NAMES
