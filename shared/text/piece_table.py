"""The texts of the tokens of a SentencePiece-like vocabulary."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import tokenizers

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# A token's text does not depend on those before it, but for characters of several byte tokens, and
# for spaces where a text begins.
_DECODERS = (
    ["Replace", "ByteFallback", "Fuse"],
    ["Replace", "ByteFallback", "Fuse", "Strip"],
    ["Metaspace"],
)


class PieceTable(NamedTuple):
    """The texts of tokens, in the order of their ids.

    Attributes:
        texts: in UTF-8; of a byte token its byte; empty for an id without a token.
        byte_ids: of byte tokens. Those next to each other are a text if all of them together are
            UTF-8, otherwise each is U+FFFD.
        first: returns the text of a token that begins a text.
    """

    texts: list[bytes]
    byte_ids: frozenset[int]
    first: Callable[[int], bytes]

    def without(self, token_ids: Collection[int]) -> PieceTable:
        """Return a table in which some tokens have no text."""
        texts = list(self.texts)
        for token_id in token_ids:
            texts[token_id] = b""
        return self._replace(texts=texts)


def piece_table(backend: tokenizers.Tokenizer) -> PieceTable | None:
    """Return a vocabulary's table; None if its decoder is of another kind, or does not agree."""
    steps = decoder_steps(backend.decoder)
    if [step.get("type") for step in steps] not in _DECODERS:
        return None
    if steps[-1]["type"] == "Strip" and (steps[-1]["start"], steps[-1]["stop"]) != (1, 0):
        return None
    names = {index: name for name, index in backend.get_vocab(with_added_tokens=True).items()}
    names |= {i: token.content for i, token in backend.get_added_tokens_decoder().items()}
    texts, byte_ids = [b""] * (1 + max(names, default=-1)), set()
    space, has_bytes = _space(steps[0]), len(steps) > 1
    for token_id, name in names.items():
        is_byte = has_bytes and name.startswith("<0x")
        byte_match = _BYTE_TOKEN.fullmatch(name) if is_byte else None
        if byte_match is not None:
            texts[token_id] = bytes([int(byte_match[1], 16)])
            byte_ids.add(token_id)
        else:
            texts[token_id] = name.replace(*space).encode()

    def first(token_id: int) -> bytes:
        text: str = backend.decode([token_id], skip_special_tokens=False)
        return texts[token_id] if text and token_id in byte_ids else text.encode()

    others = [token_id for token_id in names if token_id not in byte_ids]
    decoded: str = backend.decode(others, skip_special_tokens=False)
    expected = [first(others[0]), *(texts[token_id] for token_id in others[1:])] if others else []
    if decoded.encode() != b"".join(expected):
        return None
    return PieceTable(texts, frozenset(byte_ids), first)


def _space(step: dict[str, Any]) -> tuple[str, str]:
    """Return how tokens spell a space, or what else is replaced, and by what."""
    if step["type"] == "Metaspace":
        return step["replacement"], " "
    return step["pattern"].get("String", " "), step["content"]


def decoder_steps(decoder: Any) -> list[dict[str, Any]]:
    """Return the steps of a decoder, as in tokenizer.json."""
    settings = settings_of(decoder)
    steps: list[dict[str, Any]] = settings.get("decoders", [settings] if settings else [])
    return steps


def settings_of(part: Any) -> dict[str, Any]:
    """Return the settings of a tokenizer's part as in tokenizer.json; empty if there is none."""
    settings: dict[str, Any] = {} if part is None else json.loads(part.__getstate__())
    return settings
