"""The bytes of single tokens: what each adds to a text, even where a character spans several."""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import cached_property

import tokenizers

from pagewire.shared.text.piece_table import decoder_steps

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_WORD_START = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's space


def _byte_of_char() -> dict[str, int]:
    """Return the bytes that the characters of a byte-level vocabulary stand for, as GPT-2 has it.

    Printable characters of Latin-1 stand for themselves, those from U+0100 on for the others.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()


class TokenBytes:
    """The bytes of each token of a vocabulary.

    A byte-level vocabulary and byte tokens such as `<0x0A>` give each token's own bytes, which
    joined are those of the text. SentencePiece's first space is there although decoding drops it.

    Attributes:
        special: tokens that are not part of an answer's text, such as one that ends it.
        largest_id: of all tokens; -1 if there are none.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        self.special = frozenset(i for i, token in added.items() if token.special)
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.largest_id = max(vocabulary.values(), default=-1)
        decoders = [step.get("type") for step in decoder_steps(backend.decoder)]
        self._is_byte_level = "ByteLevel" in decoders
        self._joins_bytes = decoders in (["ByteLevel"], ["ByteLevel", "Fuse"])

    def is_special(self, token_id: int) -> bool:
        """Whether a token is not part of an answer's text, such as one that ends it."""
        return token_id in self.special

    def is_added(self, token_id: int) -> bool:
        """Whether a token was added to the vocabulary, and is found in a text as a whole."""
        return token_id in self._added

    def of(self, token_id: int) -> bytes:
        """Return a token's bytes; none for an id that the vocabulary does not have."""
        if (content := self._added.get(token_id)) is not None:
            return content.encode()
        token: str | None = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._is_byte_level and all(char in _BYTE_OF_CHAR for char in token):
            return bytes([_BYTE_OF_CHAR[char] for char in token])
        if (byte := _BYTE_TOKEN.fullmatch(token)) is not None:
            return bytes([int(byte[1], 16)])
        return token.replace(_WORD_START, " ").encode()

    @cached_property
    def text_table(self) -> list[bytes] | None:
        """By token id, the bytes that joined are a text, with U+FFFD for invalid ones.

        None if a token's text depends on its neighbours: any decoder but a byte-level one, or one
        that gives a single token another text than its bytes.
        """
        if not self._joins_bytes:
            return None
        ids = range(1 + self.largest_id)
        table = [b"" if self.is_special(token_id) else self.of(token_id) for token_id in ids]
        texts = self._backend.decode_batch([[token_id] for token_id in ids])
        return table if texts == [raw.decode(errors="replace") for raw in table] else None

    def with_names(self, table: list[bytes], token_ids: Collection[int]) -> list[bytes]:
        """Return a `text_table` in which some special tokens have the bytes of their names."""
        named = list(table)
        for token_id in token_ids:
            named[token_id] = self.of(token_id)
        return named

    def text(self, token_id: int) -> str:
        """Return a token's text; U+FFFD for a part of a character."""
        return self.of(token_id).decode(errors="replace")

    def name(self, token_id: int) -> str:
        r"""Return a token's text, or `bytes:\xe2\x80` for a part of a character, as OpenAI does."""
        raw = self.of(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + repr(raw)[2:-1]
