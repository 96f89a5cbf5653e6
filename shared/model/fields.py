"""Typed reading of a JSON object, with one-line errors that name file and field."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from pagewire.shared.base.errors import ModelLoadError
from pagewire.shared.request.sampling_types import MAX_EOS_TOKEN_IDS

# Bounds above what any model has. With them, products of sizes do not overflow, and reading a file
# and estimating its model takes little memory.
MAX_WIDTH = 1 << 20  # numbers in a vector
MAX_COUNT = 1 << 14  # heads or experts
MAX_TOKENS = 1 << 24  # tokens in a vocabulary or a context

_MOST = 1 << 53  # whole numbers up to here are exact in floating point


@dataclass(frozen=True, slots=True)
class Fields:
    """A JSON object and the file that it came from.

    A field that is null counts as missing, except for special tokens, where it says "none".

    Attributes:
        raw: the object.
        source: the file, for messages.
    """

    raw: dict[str, Any]
    source: str

    def error(self, what: str) -> ModelLoadError:
        """Return the error that says what is wrong with this file."""
        return ModelLoadError(f"{self.source}: {what}")

    def positive_int(self, name: str, default: int | None = None, most: int = _MOST) -> int:
        """Return an integer from 1 to `most`.

        Raises:
            ModelLoadError: it is something else, or missing without a default.
        """
        return self._integer(name, default, 1, most, "a positive integer")

    def whole_number(self, name: str, default: int, most: int = _MOST) -> int:
        """Return an integer from 0 to `most`.

        Raises:
            ModelLoadError: it is something else.
        """
        return self._integer(name, default, 0, most, "an integer from 0 on")

    def _integer(self, name: str, default: int | None, least: int, most: int, rule: str) -> int:
        value = self._given(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < _MOST:
            raise self.error(f"{name} must be {rule}, not {value!r}")
        if value > most:
            raise self.error(f"{name} must be at most {most}, not {value}")
        return value

    def positive_float(self, name: str, default: float | None = None) -> float:
        """Return a finite number above 0.

        Raises:
            ModelLoadError: it is something else, or missing without a default.
        """
        value = self._given(name, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value <= sys.float_info.max:
            raise self.error(f"{name} must be a positive number, not {value!r}")
        return float(value)

    def positive_floats(self, name: str) -> tuple[float, ...]:
        """Return a list of finite numbers above 0.

        Raises:
            ModelLoadError: it is something else, or missing.
        """
        values = self._given(name, None)
        if not isinstance(values, list):
            raise self.error(f"{name} must be a list of positive numbers, not {values!r}")
        return tuple(Fields({name: value}, self.source).positive_float(name) for value in values)

    def flag(self, name: str, default: bool) -> bool:
        """Return a truth value.

        Raises:
            ModelLoadError: it is something else.
        """
        value = self._given(name, default)
        if not isinstance(value, bool):
            raise self.error(f"{name} must be true or false, not {value!r}")
        return value

    def token_id(self, name: str, default: int | None) -> int | None:
        """Return a token id, or None.

        Raises:
            ModelLoadError: it is something else.
        """
        value = self.raw.get(name, default)
        if value is not None and not _is_token_id(value):
            raise self.error(f"{name} must be a token id, not {value!r}")
        return value

    def eos_token_ids(self, vocab_size: int, default: int | None = None) -> tuple[int, ...]:
        """Return the end tokens: the field holds one, a list of them, or null.

        Args:
            vocab_size: number of logits of a row, which end tokens index.
            default: the end token if the field is missing; none if it lies beyond the vocabulary.

        Raises:
            ModelLoadError: it is something else, or has a token that the model cannot produce, or
                more of them than `MAX_EOS_TOKEN_IDS`.
        """
        name = "eos_token_id"
        value = self.raw.get(name, default if default is None or default < vocab_size else None)
        if value is None:
            return ()
        ids = value if isinstance(value, list) else [value]
        if not all(_is_token_id(item) for item in ids):
            raise self.error(f"{name} must be a token id or a list of them, not {value!r}")
        if (count := len(set(ids))) > MAX_EOS_TOKEN_IDS:
            raise self.error(f"{name} must be at most {MAX_EOS_TOKEN_IDS} token ids, not {count}")
        if max(ids, default=0) >= vocab_size:
            raise self.error(
                f"{name} names token {max(ids)}, but vocab_size is {vocab_size}: remove it, since "
                "the model cannot produce it"
            )
        return tuple(ids)

    def _given(self, name: str, default: Any) -> Any:
        value = self.raw.get(name)
        if value is not None:
            return value
        if default is None:
            raise self.error(f"{name} is missing")
        return default


def _is_token_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
