"""Answers with tool calls as models write them, and what parsers find in them."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hypothesis import strategies as st

from pagewire.shared.tool_calls.definitions import Function
from pagewire.shared.tool_calls.events import AnswerEvent, CallArguments, ContentText, ReasoningText
from pagewire.shared.tool_calls.formats import TOOL_FORMATS, ToolFormat
from pagewire.shared.tool_calls.parser import ToolParser
from pagewire.shared.tool_calls.written_values import ParameterForms, ValueForm, parameter_forms

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city <|end|>",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 12},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
                "metric": {"type": "boolean"},
            },
            "required": ["city"],
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
TOOLS: list[dict[str, Any]] = [WEATHER, CLOCK]
NAMES = ("get_weather", "clock")
FORMS = {each["function"]["name"]: parameter_forms(Function(**each["function"])) for each in TOOLS}
TEXT = ValueForm(others=())
JSON = ValueForm(any_text=False)

Call = tuple[str, dict[str, Any]]
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=5,
)


def written(form: ToolFormat, calls: Sequence[Call], show: Callable[[Any], str] = repr) -> str:
    """Return calls as a model writes them; `show` writes values of Python."""
    each = [
        form.before + _one(form, name, arguments, show) + form.after for name, arguments in calls
    ]
    if form.is_list:
        return form.open + form.begin + form.separator.join(each) + form.end + form.close
    return form.separator.join(form.open + call + form.close for call in each)


def as_grammars_have_it(form: ToolFormat) -> Callable[[Any], str]:
    """Return a function that writes constants in the format's way, and other values as JSON."""

    def show(value: Any) -> str:
        is_constant = isinstance(value, bool | None) and form.python_constants
        return repr(value) if is_constant else json.dumps(value)

    return show


def _one(form: ToolFormat, name: str, arguments: dict[str, Any], show: Callable[[Any], str]) -> str:
    if form.kind == "xml":
        elements = [
            f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n"
            "</parameter>\n"
            for key, value in arguments.items()
        ]
        return f"<function={name}>\n{''.join(elements)}</function>"
    if form.kind == "python":
        return f"{name}({', '.join(f'{key}={show(value)}' for key, value in arguments.items())})"
    if form.kind in ("headed", "harmony"):
        return name + form.mark + json.dumps(arguments)
    return (
        form.head(name).replace("<id>", "0") + json.dumps(arguments, ensure_ascii=False) + form.tail
    )


def parser(form: str | ToolFormat, names: Sequence[str] = NAMES, **options: Any) -> ToolParser:
    """Return a parser whose calls have their numbers as ids."""
    if isinstance(form, str):
        form = TOOL_FORMATS[form]
    ids = iter(range(1 << 20))
    options.setdefault("forms", FORMS)
    return ToolParser(form, names, new_id=lambda: f"id-{next(ids)}", **options)


def parsed(reader: Any, parts: Iterable[str], is_cut: bool = False) -> list[AnswerEvent]:
    """Return the events of a text that comes in parts; successive texts are joined."""
    return joined([event for part in parts for event in reader.push(part)] + reader.flush(is_cut))


def joined(events: Iterable[AnswerEvent]) -> list[AnswerEvent]:
    """Return events with successive texts of one kind as one."""
    found: list[AnswerEvent] = []
    for kind, group in itertools.groupby(events, key=lambda event: (type(event), call_of(event))):
        same: list[Any] = list(group)
        if kind[0] in (ContentText, ReasoningText, CallArguments):
            assert all(event.text for event in same)
            same = [dataclasses.replace(same[0], text="".join(event.text for event in same))]
        found += same
    return found


def call_of(event: AnswerEvent) -> int | None:
    return event.index if isinstance(event, CallArguments) else None


def calls_of(events: Iterable[AnswerEvent]) -> list[Call]:
    """Return the calls among events, with their arguments read."""
    found: list[list[str]] = []
    for event in events:
        if isinstance(event, CallArguments):
            found[-1][1] += event.text
        elif hasattr(event, "name"):
            found.append([event.name, ""])
    return [(name, json.loads(arguments)) for name, arguments in found]


def content_of(events: Iterable[AnswerEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, ContentText))


@st.composite
def splits(draw: st.DrawFn, text: str) -> list[str]:
    """Draw a division of a text into parts."""
    cuts = sorted(draw(st.sets(st.integers(0, len(text)), max_size=len(text))))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def forms_of(calls: Sequence[Call]) -> dict[str, ParameterForms] | None:
    """Return how the arguments of calls are written; None if a name has more than one way."""
    found: dict[str, dict[str, ValueForm]] = {}
    for name, arguments in calls:
        for key, value in arguments.items():
            form = TEXT if isinstance(value, str) else JSON
            if found.setdefault(name, {}).setdefault(key, form) != form:
                return None
    return {name: ParameterForms.by_name(each) for name, each in found.items()}
