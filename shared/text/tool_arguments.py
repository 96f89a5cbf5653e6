"""Decodes the arguments of a tool call, which a model has written as JSON."""

from __future__ import annotations

import sys
from typing import Any

import msgspec

_LARGEST = sys.float_info.max


def _number(text: str) -> float:
    """Return the nearest float64: a model may write any exponent, and an infinity is not JSON."""
    return max(-_LARGEST, min(_LARGEST, float(text)))


_decoder = msgspec.json.Decoder(dict[str, Any], float_hook=_number)


def decode_arguments(text: str) -> dict[str, Any]:
    """Return the arguments of a call.

    Raises:
        msgspec.DecodeError: this is not a JSON object.
    """
    return _decoder.decode(text)
