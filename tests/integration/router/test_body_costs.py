"""What hostile tools and forms cost the process that reads them: CPU time and memory.

python -P -m pytest -s tests/integration/router/test_body_costs.py    prints the figures
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pagewire.services.router.http.api.responses.inputs import with_history
from pagewire.services.router.http.body_processes.body_messages import BodyKind, BodyRefusal
from pagewire.tests.support.body_meter import BodyMeter, Cost
from pagewire.tests.support.costly_schemas import SCHEMAS, Schema, chat_body, tools
from pagewire.tests.support.tool_models import ToolModels

KIB, MIB = 1 << 10, 1 << 20
SIZES = (8 * KIB, 32 * KIB, 128 * KIB)
LARGE = 960 * KIB  # tools may have 1 MiB
# Of each MiB of a body, and of any body besides.
CPU_S, ADDED_BYTES = 3.0, 150 * 10**6
ANY_CPU_S, ANY_BYTES = 0.05, 12 * 10**6
READS = 3  # of a body that seems to take too long: other programs make a process slower, not faster
# Template of a model, and how it writes calls.
XML, PYTHON = ("qwen3_coder", "auto"), ("hermes", "tool_code")
OTHERS = [("hermes", "pythonic"), ("olmo3", "auto"), ("hermes", "auto"), ("harmony", "auto")]
INDENTED = ("granite", "auto")

Meters = Callable[[tuple[str, str]], BodyMeter]


@pytest.fixture(scope="module")
def meters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Meters]:
    models = ToolModels(tmp_path_factory.mktemp("models"))
    made: dict[tuple[str, str], BodyMeter] = {}

    def meter(syntax: tuple[str, str]) -> BodyMeter:
        if syntax not in made:
            made[syntax] = BodyMeter(models[syntax[0]], syntax[1])
        return made[syntax]

    yield meter
    for each in made.values():
        each.close()


def read(meter: BodyMeter, raw: bytes, kind: BodyKind = "chat") -> Cost:
    """Read a body and check what it costs."""
    share = len(raw) / MIB
    most_s = ANY_CPU_S + CPU_S * share
    cost = meter.read(kind, raw)
    for _ in range(READS - 1):
        if cost.cpu_s > most_s:
            cost = min(cost, meter.read(kind, raw), key=lambda each: each.cpu_s)
    said = cost.result.message if isinstance(cost.result, BodyRefusal) else "read"
    print(f"{len(raw) >> 10} KiB: {cost.cpu_s:.2f} s, {cost.added_bytes >> 20} MiB, {said[:90]}")
    assert cost.cpu_s <= most_s
    assert cost.added_bytes <= ANY_BYTES + ADDED_BYTES * share
    return cost


def check_growth(meter: BodyMeter, make: Callable[[int], bytes]) -> None:
    """Check what bodies of several sizes cost, and that this grows no faster than they do."""
    costs = [read(meter, make(size)) for size in SIZES]
    for smaller, larger in itertools.pairwise(costs):  # sizes grow by 4
        assert larger.cpu_s <= 2.5 * 4 * max(smaller.cpu_s, ANY_CPU_S / 4)
        assert larger.added_bytes <= 2.5 * 4 * smaller.added_bytes + 4 * ANY_BYTES


@pytest.mark.parametrize("kind", SCHEMAS)
def test_tools_cost_in_proportion(meters: Meters, kind: str) -> None:
    check_growth(meters(XML), lambda size: chat_body(tools=tools(kind, size)))


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", SCHEMAS)
def test_large_tools_cost_in_proportion(meters: Meters, kind: str) -> None:
    for size in (256 * KIB, LARGE):
        read(meters(XML), chat_body(tools=tools(kind, size)))


@pytest.mark.parametrize(
    "kind",
    [
        *("described_definition", "differing_uses", "chain_of_references", "nullable_references"),
        *("fans", "deep", "many_properties", "small_objects"),
    ],
)
def test_tools_of_python_cost_in_proportion(meters: Meters, kind: str) -> None:
    check_growth(meters(PYTHON), lambda size: chat_body(tools=tools(kind, size)))


@pytest.mark.parametrize("syntax", [*OTHERS, INDENTED], ids=str)
def test_tools_cost_in_proportion_in_other_formats(meters: Meters, syntax: tuple[str, str]) -> None:
    for kind in ("described_definition", "chain_of_references", "fans", "deep_default"):
        read(meters(syntax), chat_body(tools=tools(kind, SIZES[1])))


@pytest.mark.parametrize(("kind", "count"), [("web_of_definitions", 8), ("differing_uses", 128)])
def test_many_tools_cost_in_proportion(meters: Meters, kind: str, count: int) -> None:
    check_growth(meters(XML), lambda size: chat_body(tools=tools(kind, size, count)))


def test_the_largest_tools(meters: Meters) -> None:
    for kind in ("described_definition", "differing_uses", "web_of_definitions"):
        assert not isinstance(
            read(meters(XML), chat_body(tools=tools(kind, LARGE))).result, BodyRefusal
        )


def test_strict_tools_are_refused_before_they_cost_much(meters: Meters) -> None:
    cost = read(meters(XML), chat_body(tools=tools("differing_uses", LARGE, strict=True)))
    assert isinstance(cost.result, BodyRefusal)
    assert cost.result.param == "tools"
    assert cost.result.message == (
        "tools: arguments_0_f0: the grammar becomes too large: at most 131072 characters are "
        "possible"
    )


def test_other_apis_cost_in_proportion(meters: Meters) -> None:
    schema = SCHEMAS["differing_uses"](SIZES[2])
    function = {"type": "function", "name": "f", "parameters": schema}
    response = {"model": "m", "input": "Hi", "tools": [function]}
    message = {
        "model": "m",
        "max_tokens": 5,
        "messages": [{"role": "user", "content": "Hi"}],
        "tools": [{"name": "f", "input_schema": schema}],
    }
    encoded = json.dumps(response).encode()
    read(meters(XML), with_history(encoded, b""), "response")
    read(meters(XML), json.dumps(message).encode(), "message")


def any_text(count: int) -> list[Schema]:
    return [{"type": "any_text", "max_chars": number} for number in range(count)]


def alternatives(size: int) -> Schema:
    """A long text after alternatives that may not end before it."""
    elements = [{"type": "or", "elements": any_text(200)}]
    return {
        "type": "sequence",
        "elements": [*elements, {"type": "const_string", "value": "x" * size}],
    }


def triggered(size: int) -> Schema:
    """The same after tags."""
    tags = [
        {"begin": f"<{number}>", "content": {"type": "any_text"}, "end": ""}
        for number in range(200)
    ]
    form = {"type": "triggered_tags", "triggers": ["<"], "tags": tags, "stop_after_first": True}
    return {
        "type": "sequence",
        "elements": [form, {"type": "const_string", "value": "x" * size}],
    }


FORMS: dict[str, Callable[[int], dict[str, Any]]] = {
    "schema": lambda size: {"guided_json": SCHEMAS["small_objects"](size)},
    "definitions": lambda size: {"guided_json": SCHEMAS["web_of_definitions"](size)},
    "closed": lambda size: {
        "structured_outputs": {
            "json": SCHEMAS["small_objects"](size), "disable_additional_properties": True,
        }
    },
    "text": lambda size: {"guided_json": json.dumps(SCHEMAS["small_lists"](size))},
    "rule": lambda size: {"guided_grammar": f"start: %json {json.dumps(SCHEMAS['fans'](size))}"},
    "alternatives": lambda size: {
        "response_format": {"type": "structural_tag", "format": alternatives(size)}
    },
    "triggered": lambda size: {
        "response_format": {"type": "structural_tag", "format": triggered(size)}
    },
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_forms_cost_in_proportion(meters: Meters, form: str) -> None:
    check_growth(meters(XML), lambda size: chat_body(**FORMS[form](size)))


def test_texts_deep_within_lists_cost_in_proportion(meters: Meters) -> None:
    def body(size: int) -> bytes:
        texts = json.loads("[" * 300 + ",".join(['"a"'] * (size // 4)) + "]" * 300)
        return chat_body(chat_template_kwargs={"a": texts})

    check_growth(meters(XML), body)
