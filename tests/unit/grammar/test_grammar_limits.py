"""What grammars cost with a vocabulary of 128,000 tokens: realistic ones pass, hostile ones end.

python -P -m pytest -s tests/unit/grammar/test_grammar_limits.py    prints the times
"""

from __future__ import annotations

import random
import time
import zlib
from typing import Any, NamedTuple

import pytest

from pagewire.shared.base.errors import InvalidRequestError
from pagewire.shared.grammar.compiler import check_grammar
from pagewire.shared.grammar.limits import MAX_COMPILE_S, MAX_TRIED_MASK_S
from pagewire.shared.grammar.matcher import Matcher
from pagewire.shared.grammar.structures import grammar_text
from pagewire.shared.grammar.threads import STACK_BYTES, start_thread
from pagewire.shared.grammar.vocabulary import mask_words
from pagewire.shared.request.structured_outputs import StructuredOutputs
from pagewire.shared.tool_calls.argument_grammar import json_rule
from pagewire.shared.tool_calls.definitions import Function
from pagewire.shared.tool_calls.formats import TOOL_FORMATS
from pagewire.shared.tool_calls.grammar import AllowedCalls, tools_grammar
from pagewire.tests.support.hostile_grammars import GRAMMARS, REGEXES, hostile_fields
from pagewire.tests.support.json_schemas import SchemaMaker
from pagewire.tests.support.large_vocabulary import EOS, large_vocabulary

NUM_TOKENS = 40
# The other ones end the process that compiles them, or take it seconds; routers try them first.
HOSTILE = [
    "ambiguous", "ambiguous-two", "ambiguous-lists", "rules-500", "rules-empty", "many-rules",
    "negation", "left-recursion", "suffix", "exponential", "counted", "optional-counted",
    "alternatives", "lengths", "enumeration", "objects",
]  # fmt: skip


class Walk(NamedTuple):
    """CPU times in seconds, and why the answer could not go on."""

    compile_s: float
    masks_s: list[float]
    problem: str | None


def walk(text: str, seed: int) -> Walk:
    """Follow tokens that are allowed, chosen at random."""
    vocabulary = large_vocabulary()
    started = time.thread_time()
    matcher = Matcher(check_grammar(text, vocabulary))
    compile_s, masks_s = time.thread_time() - started, list[float]()
    choose, words = random.Random(seed), mask_words(vocabulary.vocab_size)
    for _ in range(NUM_TOKENS):
        started = time.thread_time()
        mask = matcher.fill_mask(words)
        masks_s.append(time.thread_time() - started)
        if mask is None or matcher.has_ended or (token := chosen(mask, choose)) is None:
            break
        matcher.follow([token])
        if sum(masks_s) > 1.0:
            break
    return Walk(compile_s, masks_s, matcher.problem)


def chosen(mask: bytes, choose: random.Random) -> int | None:
    """Return an allowed token other than the end; None if there is none."""
    bits = int.from_bytes(mask, "little") & ~(1 << EOS)
    start = choose.randrange(8 * len(mask))
    rest = (bits >> start << start) or bits
    return (rest & -rest).bit_length() - 1 if bits else None


def as_object(properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    closed = {"additionalProperties": False, "required": required}
    return {"type": "object", "properties": properties, **closed}


def optional(count: int, begin: str = "field") -> dict[str, Any]:
    return as_object({f"{begin}_{i}": {"type": "string"} for i in range(count)}, [])


def one_of(count: int) -> dict[str, Any]:
    kinds = [
        as_object({"type": {"const": f"kind {i}"}, f"name_{i}": {"type": "string"}}, ["type"])
        for i in range(count)
    ]
    return as_object({"parts": {"type": "array", "items": {"anyOf": kinds}}}, ["parts"])


REALISTIC: dict[str, dict[str, Any]] = {
    "20 optional properties": optional(20),
    "100 optional properties": optional(100),
    "one of 100 kinds": one_of(100),
    "free object": {"type": "object"},
    "long string": {"type": "string", "maxLength": 2000},
    "1000 values": {"enum": [f"value number {i}" for i in range(1000)]},
    "letters": {"type": "string", "pattern": r"^[\p{L} ]{1,100}$"},
}


def report(name: str, walks: list[Walk]) -> None:
    masks = sorted(each for walk in walks for each in walk.masks_s)
    compiled, median, last = max(w.compile_s for w in walks), masks[len(masks) // 2], masks[-1]
    print(
        f"\n{name}: compiled in {1e3 * compiled:.1f} ms at most, mask {1e3 * median:.2f} ms, p99 "
        f"{1e3 * masks[int(0.99 * len(masks))]:.2f}, largest {1e3 * last:.2f}"
    )


@pytest.mark.parametrize("name", REALISTIC)
def test_realistic_schemas_are_followed(name: str) -> None:
    text = grammar_text(StructuredOutputs(json=REALISTIC[name])) or ""
    walks = [walk(text, seed) for seed in range(8)]
    report(name, walks)
    for each in walks:
        assert each.problem is None
        assert each.compile_s < MAX_COMPILE_S
        assert max(each.masks_s) < MAX_TRIED_MASK_S


def test_schemas_of_all_kinds_are_followed() -> None:
    maker = SchemaMaker(seed=19)
    texts = [grammar_text(StructuredOutputs(json=maker.make())) or "" for _ in range(60)]
    walks = [walk(text, seed) for seed, text in enumerate(texts)]
    report(f"{len(texts)} schemas", walks)
    assert {each.problem for each in walks} == {None}
    assert max(mask_s for each in walks for mask_s in each.masks_s) < MAX_TRIED_MASK_S


@pytest.mark.parametrize("must_call", [True, False])
@pytest.mark.parametrize("form", ["hermes", "llama3_json", "olmo3", "cohere2"])
def test_many_tools_with_many_optional_parameters(form: str, must_call: bool) -> None:
    functions = tuple(Function(f"f{i}", parameters=optional(30, f"p{i}")) for i in range(64))
    wanted = AllowedCalls(functions=functions, must_call=must_call, only_one=False)
    text = tools_grammar(TOOL_FORMATS[form], wanted, None, "outside", {})
    walks = [walk(text, seed) for seed in range(2)]
    report(f"64 tools of {form}", walks)
    assert {each.problem for each in walks} == {None}
    assert max(mask_s for each in walks for mask_s in each.masks_s) < MAX_TRIED_MASK_S


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_are_bounded(name: str) -> None:
    ((field, value),) = hostile_fields()[name].items()
    text = grammar_text(StructuredOutputs(**{field.removeprefix("guided_"): value})) or ""
    found: list[Walk] = []

    def follow() -> None:
        try:
            found.append(walk(text, zlib.crc32(name.encode())))
        except InvalidRequestError as exc:
            found.append(Walk(0.0, [0.0], exc.message))

    start_thread(STACK_BYTES, "walk", follow).join(timeout=60)
    (each,) = found
    report(f"{name} ({each.problem or 'followed'})"[:100], found)
    assert each.compile_s < MAX_COMPILE_S
    assert max(each.masks_s) < 5 * MAX_TRIED_MASK_S


REFUSED: dict[str, tuple[StructuredOutputs, str]] = {
    "optional properties": (
        StructuredOutputs(json=optional(300)),
        "the grammar cannot be followed: at one place an answer has 1199 ways to go on, of which "
        "500 are possible",
    ),
    "objects to choose from": (
        StructuredOutputs(json={"enum": [{"number": each} for each in range(600)]}),
        "at one place an answer has 600 ways to go on, of which 500 are possible",
    ),
    "a schema in a rule": (
        StructuredOutputs(grammar=f"start: a\na: {json_rule({'type': 'strin'})}\n"),
        "the grammar cannot be followed: a: Invalid type: strin",
    ),
    "ambiguous": (
        StructuredOutputs(grammar=GRAMMARS["rules-500"]),
        "grammar too ambiguous: the parser takes more than 256000 steps",
    ),
    "counts": (
        StructuredOutputs(regex=REGEXES["counted"]),
        "its regular expressions are too large: counts such as {1000} make them so",
    ),
    "keywords": (
        StructuredOutputs(json={"type": "array", "uniqueItems": True, "contains": {}}),
        'grammars cannot express these keywords of its schema: "contains", "uniqueItems"',
    ),
    "one of several": (
        StructuredOutputs(json={"oneOf": [{"type": "integer"}, {"type": "number"}]}),
        "in its schema one value may fit several schemas of oneOf: use anyOf",
    ),
    "deep": (
        StructuredOutputs(json='{"items":' * 200 + "{}" + "}" * 200),
        "structured_outputs: json cannot be read: it is nested too deeply: a schema may have about "
        "120 objects",
    ),
    "deep in a rule": (
        StructuredOutputs(grammar="start: a\na: %json " + '{"items":' * 200 + "{}" + "}" * 200),
        "the grammar cannot be followed: it is nested too deeply",
    ),
    "deep in a grammar": (
        StructuredOutputs(json='{"items":' * 124 + "{}" + "}" * 124),
        "the grammar cannot be followed: it is nested too deeply",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_reason_of_a_refusal_is_in_plain_words(name: str) -> None:
    asked, expected = REFUSED[name]
    try:
        found = {walk(grammar_text(asked) or "", seed).problem for seed in range(4)}
    except InvalidRequestError as exc:
        found = {exc.message}
    [message] = found - {None}  # an answer without properties meets no limit
    assert message is not None
    assert expected in message
    assert " | " not in message  # nothing of the grammar itself
