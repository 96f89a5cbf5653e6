"""Reads SentencePiece's `tokenizer.model`, a protocol buffer, as far as tokenizing needs it.

The fields are those of sentencepiece_model.proto; others are ignored.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from pagewire.shared.base.errors import ModelLoadError

MAX_BYTES = 64 << 20
_MASK = (1 << 64) - 1
_KINDS: dict[int, Literal["unigram", "bpe"]] = {1: "unigram", 2: "bpe"}

# What a field's bytes hold: a number, or bytes of any length.
_Value: TypeAlias = int | bytes

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


@dataclass(frozen=True, slots=True)
class Piece:
    """A token; its place in the list is its id.

    Attributes:
        kind: one of NORMAL and the others.
    """

    text: str
    score: float
    kind: int


@dataclass(frozen=True, slots=True)
class SentencePieceModel:
    """The content of a file.

    Attributes:
        kind: how a text is cut into tokens.
        byte_fallback: whether characters without a token become tokens of one byte each.
        unk_id: id of the unknown token; here and in the next two fields, below 0 means none.
        charsmap: a compiled table of characters to replace; may be empty.
        add_dummy_prefix: whether a text begins with a space.
        remove_extra_whitespaces: whether spaces at both ends are left out, and others joined.
    """

    pieces: tuple[Piece, ...]
    kind: Literal["unigram", "bpe"]
    byte_fallback: bool
    unk_id: int
    bos_id: int
    eos_id: int
    charsmap: bytes
    add_dummy_prefix: bool
    remove_extra_whitespaces: bool


def read_sentencepiece(file: Path) -> SentencePieceModel:
    """Read a `tokenizer.model`.

    Raises:
        ModelLoadError: it cannot be read, or is of a kind that is not supported; one line.
    """
    try:
        if file.stat().st_size > MAX_BYTES:
            raise ModelLoadError(f"{file} has more than {MAX_BYTES >> 20} MiB; check the file")
        data = file.read_bytes()
    except OSError as exc:
        raise ModelLoadError(f"{file} cannot be read: {exc.strerror}") from exc
    try:
        return _model(data)
    except (ValueError, IndexError, struct.error) as exc:
        raise ModelLoadError(
            f"{file} is not a SentencePiece model that can be converted ({exc}); fetch the model "
            "again, or one with a tokenizer.json"
        ) from exc


def _model(data: bytes) -> SentencePieceModel:
    pieces, trainer, normalizer = [], b"", b""
    for number, value in _fields(data):
        if number == 1:
            pieces.append(_piece(_bytes(value)))
        elif number == 2:
            trainer = _bytes(value)
        elif number == 3:
            normalizer = _bytes(value)
    training, rules = dict(_fields(trainer)), dict(_fields(normalizer))
    kind = _KINDS.get(_number(training, 3, 1))
    if not pieces or kind is None:
        raise ValueError("it has no tokens, or is neither of the kind BPE nor unigram")
    if _number(training, 24, 0) or not _number(rules, 5, 1):
        raise ValueError("it marks spaces in another way than at the start of words")
    return SentencePieceModel(
        tuple(pieces),
        kind,
        byte_fallback=bool(_number(training, 35, 0)),
        unk_id=_number(training, 40, 0),
        bos_id=_number(training, 41, 1),
        eos_id=_number(training, 42, 2),
        charsmap=_bytes(rules.get(2, b"")),
        add_dummy_prefix=bool(_number(rules, 3, 1)),
        remove_extra_whitespaces=bool(_number(rules, 4, 1)),
    )


def _piece(data: bytes) -> Piece:
    fields = dict(_fields(data))
    score: float = struct.unpack("<f", _bytes(fields.get(2, bytes(4))))[0]
    return Piece(_bytes(fields.get(1, b"")).decode(), score, _number(fields, 3, NORMAL))


def _number(fields: dict[int, _Value], number: int, default: int) -> int:
    """Return an int32, which may be negative."""
    value = fields.get(number, default)
    if isinstance(value, int):
        return value - (1 << 64) if value >> 63 else value
    raise ValueError(f"field {number} is not a number")


def _bytes(value: _Value) -> bytes:
    if isinstance(value, bytes):
        return value
    raise ValueError("a number is where bytes belong")


def _fields(data: bytes) -> Iterator[tuple[int, _Value]]:
    """Yield number and value of each field of a message.

    Raises:
        ValueError: the message ends early, or is none; IndexError likewise.
    """
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        wire = key & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        length = {1: 8, 5: 4}.get(wire)
        if wire == 2:
            length, at = _varint(data, at)
        if length is None or at + length > len(data):
            raise ValueError(f"a field ends early, at byte {at}")
        yield key >> 3, data[at : at + length]
        at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a number and where it ends."""
    number = 0
    for shift in range(0, 70, 7):
        number |= (data[at] & 0x7F) << shift
        at += 1
        if data[at - 1] < 0x80:
            return number & _MASK, at
    raise ValueError(f"a number of more than 10 bytes, at byte {at}")
