"""Rewrites JSON schemas so that llguidance follows them correctly.

llguidance reads all numbers of a schema as float64, and counts integers in 64 bits. It also refuses
some keywords that have no effect. Here such keywords are left out, as are descriptions and other
annotations, which may be long; bounds are moved into range, patterns are made exact, and other
numbers that llguidance would get wrong are refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from urllib.parse import unquote

from pagewire.shared.grammar.schema_patterns import without_nul

MAX_EXACT = 2**53  # float64 represents all integers up to this one
# Bounds beyond these are moved to them. Each answer that is then possible follows the schema.
_LEAST_INTEGER, _MOST_INTEGER = -(2**63 - 1024), 2**63 - 1
_MOST_NUMBER = 10**18
_MOST_CHARS = 2**31  # more than any answer has

_LOW, _HIGH = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_BOUNDS = (*_LOW, *_HIGH)
_TEXTS = {"title", "description", "$comment"}
# Keywords whose value is an object of schemas by name, and keywords whose value is not a schema.
_OF_SCHEMAS = {"properties", "patternProperties", "$defs", "definitions"}
_EXAMPLES = {"default", "examples"}
# Keywords that say nothing about values.
ANNOTATIONS = {*_TEXTS, *_EXAMPLES, "$schema", "deprecated", "readOnly", "writeOnly"}
_OF_VALUES = {"const", "enum", *_EXAMPLES}
# What JSON Schema defines; llguidance refuses those that it cannot follow.
_FORMATS = {
    *("date-time", "date", "time", "duration", "email", "idn-email", "hostname", "idn-hostname"),
    *("ipv4", "ipv6", "uri", "uri-reference", "iri", "iri-reference", "uuid", "uri-template"),
    *("json-pointer", "relative-json-pointer", "regex"),
}
# Keywords that may have no effect, or whose value may change.
_LOOKED_AT = {"propertyNames", "format", "maxLength", "uniqueItems", "pattern", "patternProperties"}
_LOOKED_AT |= _TEXTS | _EXAMPLES
_TOO_DEEP = "it is nested too deeply"

Change = Callable[[dict[str, Any]], dict[str, Any]]


def fitted(schema: Any, lenient: bool = False, then: Change | None = None) -> Any:
    """Return an equivalent schema that llguidance follows correctly.

    Args:
        schema: decoded from JSON.
        lenient: keywords with numbers that no grammar can express are left out.
        then: a change of each schema in it before, which resolves references.

    Raises:
        ValueError: the schema has such numbers (unless lenient), has text in an annotation that
            UTF-8 cannot encode, or is nested too deeply.
    """
    references: list[Any] = []

    def change(each: dict[str, Any]) -> dict[str, Any]:
        if then is not None:
            return _fitted(then(each), lenient)
        if "$ref" in each:
            references.append(each["$ref"])
        return _fitted(each, lenient)

    result = changed(schema, change)
    if any(map(_is_to_annotation, references)):
        return changed(schema, lambda each: _fitted(each, lenient, annotated=True))
    return result


def _is_to_annotation(reference: Any) -> bool:
    """Whether a `$ref` may point into an annotation, which must stay then."""
    path = unquote(reference) if isinstance(reference, str) else ""
    return any(f"/{name}" in path for name in _EXAMPLES)


def changed(schema: Any, change: Change) -> Any:
    """Return a schema after a change of each schema in it, inner ones first.

    Raises:
        ValueError: the schema is nested too deeply.
    """
    try:
        return _changed(schema, change)
    except RecursionError as exc:
        raise ValueError(_TOO_DEEP) from exc


def _changed(schema: Any, change: Change) -> Any:
    match schema:
        case dict():
            inner = partial(_changed, change=change)
            return change({key: changed_in(key, part, inner) for key, part in schema.items()})
        case list():
            return [_changed(part, change) for part in schema]
    return schema


def changed_in(key: str, value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a keyword's value after a change of each schema, or list of them, that it has."""
    if key in _OF_SCHEMAS and isinstance(value, dict):
        return {name: change(each) for name, each in value.items()}
    return value if key in _OF_VALUES else change(value)


def without_nulls(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema without keywords that are null: they count as left out."""
    if None not in schema.values():
        return schema
    return {
        key: value
        for key, value in schema.items()
        if value is not None or key == "const" or key in _EXAMPLES
    }


def with_null(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema that says in JSON Schema's words what OpenAPI's `nullable: true` means."""
    if schema.get("nullable") is not True:
        return schema
    result = {key: value for key, value in schema.items() if key != "nullable"}
    kinds = result.get("type")
    if kinds is None:
        return {"anyOf": [result, {"type": "null"}]}
    result["type"] = list(dict.fromkeys((*(kinds if isinstance(kinds, list) else [kinds]), "null")))
    if isinstance(values := result.get("enum"), list) and None not in values:
        result["enum"] = [*values, None]
    return result


def _fitted(schema: dict[str, Any], lenient: bool, annotated: bool = False) -> dict[str, Any]:
    schema = result = with_null(without_nulls(schema))
    if not _LOOKED_AT.isdisjoint(schema):
        result = {
            key: _exact(key, part)
            for key, part in schema.items()
            if not is_idle(key, part) and (annotated or key not in _EXAMPLES)
        }
    for fit, keys in _FITS:
        if keys.isdisjoint(result):
            continue
        try:
            result = fit(result)
        except ValueError:
            if not lenient:
                raise
            result = {key: value for key, value in result.items() if key not in keys}
    return result


def is_idle(key: str, value: Any) -> bool:
    """Whether a keyword has no effect, so that llguidance need not see it.

    Libraries write `"uniqueItems": false`, `"propertyNames": {"type": "string"}` for dictionaries,
    and their largest integer as `maxLength`.
    """
    if key in _TEXTS and isinstance(value, str):
        value.encode()  # fails as any other text would that UTF-8 cannot encode
        return True
    if key == "propertyNames":
        return value is True or value in ({}, {"type": "string"})
    if key == "format":  # others, such as pydantic's "password" and OpenAPI's "int64", say nothing
        return isinstance(value, str) and value not in _FORMATS
    if key == "maxLength":
        return type(value) is int and value >= _MOST_CHARS
    return key == "uniqueItems" and value is False


def _exact(key: str, value: Any) -> Any:
    """Return a keyword's value, patterns such that llguidance allows only what they match.

    A `$ref` may point into an annotation, so the numbers in it must be in range, too.
    """
    if key in _EXAMPLES:
        return changed(value, lambda each: _fitted(each, lenient=True, annotated=True))
    if key == "pattern" and isinstance(value, str):
        return without_nul(value)
    if key == "patternProperties" and isinstance(value, dict):
        return {without_nul(pattern): each for pattern, each in value.items()}
    return value


def _has_large_number(value: Any) -> bool:
    match value:
        case dict():
            return any(map(_has_large_number, value.values()))
        case list():
            return any(map(_has_large_number, value))
        case int() | float():
            return abs(value) > MAX_EXACT
    return False


def _with_exact_values(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema unchanged.

    Raises:
        ValueError: `const` or `enum` has a number that llguidance would write as another one.
    """
    if any(_has_large_number(schema.get(key)) for key in ("const", "enum")):
        raise ValueError("numbers in const and enum must be between -2**53 and 2**53")
    return schema


def _with_near_bounds(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema whose bounds llguidance can count to and represent as float64.

    Libraries write the bounds of 64-bit integers and of floats.

    Raises:
        ValueError: the schema allows only numbers beyond the range.
    """
    bounds = {key: schema[key] for key in _BOUNDS if _is_number(schema.get(key))}
    if all(abs(value) < MAX_EXACT for value in bounds.values()):
        return schema
    kinds = schema.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    are_integers = "integer" in kinds and "number" not in kinds
    moved = _of_integers(bounds) if are_integers else _of_numbers(bounds)
    return {key: value for key, value in schema.items() if key not in bounds} | moved


def _of_integers(bounds: Mapping[str, float]) -> dict[str, Any]:
    lows = [math.ceil(bounds["minimum"])] if "minimum" in bounds else []
    lows += [math.floor(bounds["exclusiveMinimum"]) + 1] if "exclusiveMinimum" in bounds else []
    highs = [math.floor(bounds["maximum"])] if "maximum" in bounds else []
    highs += [math.ceil(bounds["exclusiveMaximum"]) - 1] if "exclusiveMaximum" in bounds else []
    low = max(lows, default=None)
    high = min(highs, default=None)
    if (low or 0) > -_LEAST_INTEGER or (high or 0) < _LEAST_INTEGER:
        raise ValueError("minimum and maximum must allow numbers between -2**63 and 2**63")
    # llguidance cannot count from a bound of more than 18 digits unless the other bound is given.
    if low is None and high is not None and high < -MAX_EXACT:
        low = _LEAST_INTEGER
    if high is None and low is not None and low > MAX_EXACT:
        high = _MOST_INTEGER
    moved: dict[str, Any] = {}
    if low is not None:
        moved["minimum"] = int(_at_least(max(low, _LEAST_INTEGER)))
    if high is not None:
        is_most = high >= _MOST_INTEGER
        moved["maximum"] = _MOST_INTEGER if is_most else int(-_at_least(-high))
    return moved


def _of_numbers(bounds: Mapping[str, float]) -> dict[str, Any]:
    lows = {key: value for key, value in bounds.items() if key in _LOW}
    highs = {key: value for key, value in bounds.items() if key in _HIGH}
    low, high = max(lows.values(), default=0), min(highs.values(), default=0)
    if low >= _MOST_NUMBER or high <= -_MOST_NUMBER:
        raise ValueError("minimum and maximum must allow numbers between -10**18 and 10**18")
    return {
        **{key: _at_least(max(value, -_MOST_NUMBER)) for key, value in lows.items()},
        **{key: -_at_least(-min(value, _MOST_NUMBER)) for key, value in highs.items()},
    }


def _with_open_bounds(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema whose exclusive bounds llguidance excludes.

    If a number must be above 2 and below 2.5, llguidance 1.9 allows 2 itself: an exclusive bound
    without a fraction is then not excluded. So the bound is moved into the range, by little.
    """
    bounds = {key: schema[key] for key in _BOUNDS if _is_number(schema.get(key))}
    low = max((bounds[key] for key in _LOW if key in bounds), default=-math.inf)
    high = min((bounds[key] for key in _HIGH if key in bounds), default=math.inf)
    if 0 <= low == bounds.get("exclusiveMinimum") and low % 1 == 0 and low < high < low + 1:
        replaced, moved = _LOW, {"minimum": _inside(low, high)}
    elif 0 >= high == bounds.get("exclusiveMaximum") and high % 1 == 0 and high > low > high - 1:
        replaced, moved = _HIGH, {"maximum": -_inside(-high, -low)}
    else:
        return schema
    return {key: value for key, value in schema.items() if key not in replaced} | moved


def _inside(low: float, high: float) -> float:
    """Return a number of few digits that is a little more than the lower of two."""
    return max(low + min(1e-9, (high - low) / 1000), math.nextafter(low, math.inf))


def _is_number(value: Any) -> bool:
    return type(value) is int or (isinstance(value, float) and math.isfinite(value))


def _at_least(value: float) -> float:
    """Return the least float64 that is not less than a number, which may be an integer."""
    nearest = float(value)
    return nearest if nearest >= value else math.nextafter(nearest, math.inf)


_FITS: tuple[tuple[Change, frozenset[str]], ...] = (
    (_with_exact_values, frozenset({"const", "enum"})),
    (_with_near_bounds, frozenset(_BOUNDS)),
    (_with_open_bounds, frozenset(_BOUNDS)),
)
