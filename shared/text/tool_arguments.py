"""Decodes the arguments of a tool call, which a model has written as JSON."""

from __future__ import annotations

import sys
from typing import Any

import msgspec
from pydantic import TypeAdapter

from pagewire.shared.base.errors import InvalidRequestError

_LARGEST = sys.float_info.max


def _number(text: str) -> float:
    """Return the nearest float64: a model may write any exponent, and an infinity is not JSON."""
    return max(-_LARGEST, min(_LARGEST, float(text)))


_decoder = msgspec.json.Decoder(dict[str, Any], float_hook=_number)
_cut = TypeAdapter(dict[str, Any])


def decode_arguments(text: str) -> dict[str, Any]:
    """Return the arguments of a call.

    Raises:
        msgspec.DecodeError: this is not a JSON object.
    """
    return _decoder.decode(text)


def parsed_arguments(text: str | None, field: str) -> dict[str, Any]:
    """Return the arguments of an earlier call, as far as they can be read.

    Models write texts that are not JSON, and an answer may have been cut within a call. OpenAI's
    API takes any text back. Templates need an object.

    Args:
        text: the arguments; null or no text: there are none.
        field: its name, for errors.

    Raises:
        InvalidRequestError: they are nested too deeply.
    """
    try:
        try:
            return decode_arguments(text or "{}")
        except (msgspec.DecodeError, UnicodeDecodeError):
            arguments = _cut.validate_json(
                text or "", experimental_allow_partial="trailing-strings"
            )
        return decode_arguments(msgspec.json.encode(arguments).decode())
    except RecursionError as exc:
        raise InvalidRequestError(f"{field} is nested too deeply", field) from exc
    except (ValueError, msgspec.DecodeError):
        return {}
