"""The tools of a request and its choice among them: types with bounds, and checks."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from pagewire.shared.base.errors import InvalidRequestError
from pagewire.shared.grammar.own_definitions import with_definitions_moved
from pagewire.shared.grammar.references import DEFINITIONS, References, check_references
from pagewire.shared.grammar.schema_fit import without_nulls

MAX_TOOLS = 128
MAX_TOOLS_BYTES = 1 << 20  # size of all tools of a request, as JSON
MAX_NAME_CHARS = 128
NAME_PATTERN = rf"\A[A-Za-z0-9_.:-]{{1,{MAX_NAME_CHARS}}}\Z"

_MAX_STEPS = 16  # references that are followed from the root
# Keywords next to a reference that say nothing about arguments, or what is known of them.
_ASIDE = {*DEFINITIONS, "$schema", "$id", "$anchor", "$comment", "title", "description", "type"}
_ASIDE |= {"default", "examples"}
# Keywords with which a schema says itself which other properties there may be.
_OPEN = {"additionalProperties", "patternProperties", "unevaluatedProperties"}
_OPEN |= {"$ref", "allOf", "anyOf", "oneOf"}

FunctionName = Annotated[
    str,
    Meta(
        pattern=NAME_PATTERN,
        description=f"1 to {MAX_NAME_CHARS} letters, digits and any of _ . : -",
    ),
]


class Function(msgspec.Struct, frozen=True):
    """A function that a model may call.

    Attributes:
        parameters: JSON schema of the arguments, an object; None if there are no arguments.
        strict: arguments always follow the schema; a request whose schema no grammar can express
            is refused. Otherwise, they follow the part of the schema that grammars can express.
    """

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @property
    def schema(self) -> dict[str, Any]:
        """Schema of the arguments; only declared ones are allowed, unless it says otherwise.

        A name that is required is declared by that.
        """
        given = {"properties": {}} if self.parameters is None else self.parameters
        declared = _root(with_definitions_moved(given))
        if not _is_plain(declared):
            return {**declared, "type": "object"}
        properties, required = dict(declared["properties"]), declared.get("required")
        for name in required if isinstance(required, list) else ():
            if isinstance(name, str):
                properties.setdefault(name, {})
        closed = {"properties": properties, "additionalProperties": False}
        return {**declared, "type": "object", **closed}


class Tool(msgspec.Struct, frozen=True):
    """A tool, as in OpenAI's API."""

    type: Literal["function"]
    function: Function


class NamedFunction(msgspec.Struct, frozen=True):
    """The function that is to be called."""

    name: FunctionName


class NamedTool(msgspec.Struct, frozen=True, tag_field="type", tag="function"):
    """The tool that is to be called."""

    function: NamedFunction


class ToolSubset(msgspec.Struct, frozen=True):
    """The tools that may be called, and whether a call is required."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Meta(min_length=1, max_length=MAX_TOOLS)]


class AllowedTools(msgspec.Struct, frozen=True, tag_field="type", tag="allowed_tools"):
    """A choice among some of the tools. The prompt has all tools, so that cached prefixes match."""

    allowed_tools: ToolSubset


Tools = Annotated[
    list[Tool],
    Meta(
        min_length=1,
        max_length=MAX_TOOLS,
        description=f"a list of 1 to {MAX_TOOLS} tools; leave it out if there are none",
    ),
]
Choice = Literal["none", "auto", "required"] | NamedTool | AllowedTools | None
ToolChoice = Annotated[
    Choice,
    Meta(
        description='"none", "auto", "required", {"type": "function", "function": {"name": NAME}} '
        'or {"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}'
    ),
]


def chosen_names(choice: Choice) -> list[str] | None:
    """Return the names of the functions that may be called; None if all may be."""
    match choice:
        case NamedTool(function=function):
            return [function.name]
        case AllowedTools(allowed_tools=subset):
            return [tool.function.name for tool in subset.tools]
    return None


def check_tools(tools: Sequence[Tool] | None, choice: Choice) -> None:
    """Check rules that types cannot express.

    Raises:
        InvalidRequestError: a schema is not that of an object or has a reference that leads
            nowhere, a name is not unique, or the choice names a tool that the request does not
            have; the error names the field.
    """
    if tools is None:
        if choice not in (None, "none"):
            raise InvalidRequestError("tool_choice is only allowed with tools", "tool_choice")
        return
    names: set[str] = set()
    for index, tool in enumerate(tools):
        field = f"tools[{index}].function"
        _check_parameters(tool.function.parameters, f"{field}.parameters")
        if tool.function.name in names:
            raise InvalidRequestError(
                f"{field}.name must be unique: there is another tool {tool.function.name!r}",
                f"{field}.name",
            )
        names.add(tool.function.name)
    for name in chosen_names(choice) or ():
        if name not in names:
            raise InvalidRequestError(
                f"tool_choice names {name!r}, which is not among tools", "tool_choice"
            )


def check_tools_size(num_bytes: int) -> None:
    """Check the size of all tools of a request, as JSON.

    Raises:
        InvalidRequestError: they are too large.
    """
    if num_bytes > MAX_TOOLS_BYTES:
        raise InvalidRequestError(f"tools must have at most {MAX_TOOLS_BYTES} bytes", "tools")


def _check_parameters(parameters: dict[str, Any] | None, field: str) -> None:
    if parameters is None:
        return
    try:
        moved = with_definitions_moved(parameters)
        check_references(moved)
    except ValueError as exc:
        raise InvalidRequestError(f"{field}: {exc}", field) from None
    if _root(moved).get("type", "object") != "object":
        raise InvalidRequestError(f'{field} must be a JSON schema with "type": "object"', field)


def _root(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema without keywords that are null, and with what its root refers to.

    Libraries write a definition and a `$ref` to it, or an `allOf` with that alone.
    """
    declared = without_nulls(schema)
    for _ in range(_MAX_STEPS):
        keys = declared.keys() - _ASIDE
        parts = declared.get("allOf")
        target: Any = None
        if keys == {"$ref"} and isinstance(declared["$ref"], str):
            with contextlib.suppress(LookupError):
                target = References(declared).find(declared["$ref"])
        elif keys == {"allOf"} and isinstance(parts, list) and len(parts) == 1:
            target = parts[0]
        if not isinstance(target, dict):
            break
        fields = {key: value for key, value in declared.items() if key not in keys}
        root = {key: value for key, value in target.items() if key not in ("$id", "$anchor")}
        declared = without_nulls({**root, **fields})
    return declared


def _is_plain(schema: dict[str, Any]) -> bool:
    """Whether a schema lists all properties itself, and does not say whether there are others."""
    return isinstance(schema.get("properties"), dict) and schema.keys().isdisjoint(_OPEN)
