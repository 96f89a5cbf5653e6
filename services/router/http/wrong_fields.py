"""Says what is wrong with a request's body: which field, what is right, and what it has."""

from __future__ import annotations

import logging
import re
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from pagewire.services.router.http.unsupported import refuse_unsupported
from pagewire.shared.base.errors import UNDECODABLE, InvalidRequestError
from pagewire.shared.base.field_rules import rule_at
from pagewire.shared.base.surrogates import lone_surrogate
from pagewire.shared.text.chat_messages import MEDIA, media_problem
from pagewire.shared.tool_calls.definitions import check_tools_size

logger = logging.getLogger(__name__)

BodyT = TypeVar("BodyT", bound=msgspec.Struct)

MAX_SHOWN_BYTES = 200  # a longer value is shown as it is encoded, without its end

_PATH = re.compile(r"`\$([^`]*)`$")
_PART = re.compile(r"\.([^.\[]+)|\[(\d+)\]")
_MISSING = re.compile(r"Object missing required field `([^`]+)`")
_WRONG_TYPE = re.compile(r"^Expected `[^`]+`, got ")
# Lists of messages' parts in the APIs.
_LISTS_OF_PARTS = ("content", "input", "output", "system")
_CONVERSATIONS = ("messages", "input", "system")
_DATA = re.compile(rb"base64|image|audio|video|document|file")
_UNKNOWN = re.compile(r"Object contains unknown field `([^`]+)`")


def decode_body(
    kind: type[BodyT],
    raw: bytes | bytearray,
    refused: Mapping[str, tuple[Any, ...]] | None = None,
    names: Mapping[str, str] | None = None,
) -> tuple[BodyT, dict[str, msgspec.Raw], int]:
    """Return the checked body of a request, its fields as they came, and how many are unknown.

    Args:
        kind: what the body is to be.
        raw: the body.
        refused: unsupported fields, see `refuse_unsupported`.
        names: the fields to use instead, see `refuse_unsupported`.

    Raises:
        InvalidRequestError: it is not JSON, a field has a wrong type or value, or asks for what
            is not supported; names the field.
        RecursionError: it is nested too deeply.
    """
    try:
        fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        refuse_unsupported(fields, refused or {}, names)
        body = msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as exc:
        raise describe_wrong_field(kind, raw, exc) from exc
    except msgspec.DecodeError as exc:
        raise _not_json("", raw, exc) from exc
    except UnicodeDecodeError as exc:
        at = _first_not_utf8(raw)
        raise InvalidRequestError(f"the body is not valid JSON: not UTF-8 (byte {at})") from exc
    if "tools" in fields and "tools" in kind.__struct_fields__:
        check_tools_size(memoryview(fields["tools"]).nbytes)
    unknown = fields.keys() - {*kind.__struct_fields__, *(refused or ())}
    if unknown:
        logger.debug("ignoring unknown request fields: %s", reprlib.repr(sorted(unknown)))
    return body, fields, len(unknown)


def _not_json(
    field: str, raw: bytes | bytearray | memoryview, error: Exception
) -> InvalidRequestError:
    """Return what is wrong with the JSON of a field, or of the body, whose name is empty."""
    if (surrogate := lone_surrogate(bytes(raw))) is None:
        return InvalidRequestError(
            f"{field or 'the body'} is not valid JSON: {error}", field or None
        )
    path, reason = surrogate
    field = _joined((field, *path) if field else path)
    return InvalidRequestError(f"{field or 'the body'}: {reason}", field or None, "invalid_value")


def _first_not_utf8(raw: bytes | bytearray) -> int:
    """Return the position of the first byte that is not UTF-8; msgspec counts in its text."""
    try:
        raw.decode()
    except UnicodeDecodeError as exc:
        return exc.start
    return len(raw)


def describe_wrong_field(
    kind: type[msgspec.Struct], raw: bytes | bytearray, error: msgspec.ValidationError
) -> InvalidRequestError:
    """Return what is wrong with the first wrong field.

    Args:
        kind: what the body was to be.
        raw: the body.
        error: of msgspec, which names the path.
    """
    match = _PATH.search(str(error))
    path = [name or int(index) for name, index in _PART.findall(match[1])] if match else []
    if missing := _MISSING.match(str(error)):
        path.append(missing[1])
    if not path:
        return InvalidRequestError("the body must be a JSON object")
    if unknown := _UNKNOWN.match(str(error)):
        field = _joined(path)
        problem = f"{field}: the field {unknown[1][:100]!r} is unknown"
        return InvalidRequestError(problem, field, "unknown_parameter")
    if (media := _media_at(raw, path)) is not None:
        return media
    depth, rule = rule_at(inspect.type_info(kind), path)
    field = _joined(path[:depth])
    if missing and depth == len(path):
        return InvalidRequestError(f"{field} is required", field, "missing_required_parameter")
    try:
        actual = f", not {_excerpt(raw, path[:depth])}"
    except (*UNDECODABLE, LookupError):  # or nested too deeply, or the field is there twice
        actual = ""
    code = "invalid_type" if _WRONG_TYPE.search(str(error)) else "invalid_value"
    return InvalidRequestError(f"{field} must be {rule}{actual}", field, code)


def _media_at(raw: bytes | bytearray, path: list[str | int]) -> InvalidRequestError | None:
    """Return what is wrong if a path leads to the type of a part that is an image or such."""
    if len(path) < 3 or path[-3] not in _LISTS_OF_PARTS or path[-1] != "type":
        return None
    try:
        kind = msgspec.json.decode(_value_at(raw, path))
    except (*UNDECODABLE, LookupError):
        return None
    if not isinstance(kind, str) or kind not in MEDIA:
        return None
    return InvalidRequestError(media_problem(_joined(path[:-1]), kind), _joined(path[:-2]))


def read_in_full(encoded: msgspec.Raw, field: str) -> tuple[Any, msgspec.Raw]:
    """Return a field's value, and the same as JSON on one line.

    A type's decoder skips what the type does not declare, without a look at its strings and
    numbers; where that is used as well, the field is read by this function.

    Args:
        encoded: as the client wrote it.
        field: its name.

    Raises:
        InvalidRequestError: a part of it is not valid JSON, or a number that no float can hold.
    """
    try:
        value = msgspec.json.decode(encoded)
        return value, msgspec.Raw(msgspec.json.format(encoded, indent=-1))
    except UNDECODABLE as exc:
        raise _not_json(field, memoryview(encoded), exc) from exc


def _joined(path: Sequence[str | int]) -> str:
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in path]
    return "".join(parts).removeprefix(".")


def _value_at(raw: bytes | bytearray, path: Sequence[str | int]) -> msgspec.Raw:
    value = msgspec.Raw(raw)
    for part in path:
        if isinstance(part, int):
            value = msgspec.json.decode(value, type=list[msgspec.Raw])[part]
        else:
            value = msgspec.json.decode(value, type=dict[str, msgspec.Raw])[part]
    return value


def _excerpt(raw: bytes | bytearray, path: Sequence[str | int]) -> str:
    """Return the value at a path, shortened.

    Raises:
        one of UNDECODABLE, LookupError: the body cannot be read up to there, or the value may have
            the data of an image.
    """
    view = memoryview(_value_at(raw, path))
    if path[:1] and path[0] in _CONVERSATIONS and _DATA.search(view):
        raise LookupError("it may have the data of an image, of which nothing is shown")
    if len(view) > MAX_SHOWN_BYTES:
        return bytes(view[:50]).decode(errors="replace") + "..."
    try:
        return reprlib.repr(msgspec.json.decode(view))
    except UNDECODABLE:  # a number that no float can hold
        return bytes(view[:50]).decode(errors="replace")
