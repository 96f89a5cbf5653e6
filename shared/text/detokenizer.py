"""Turns a stream of token ids into text, never cutting a character in two."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence
from functools import partial

from pagewire.shared.text.piece_table import PieceTable
from pagewire.shared.text.tokenizer import REPLACEMENT, Tokenizer

_REPLACEMENT_BYTES = REPLACEMENT.encode()

CONTEXT_TOKENS = 8  # left context of a text: decides e.g. whether it begins with a space
MAX_HELD_TOKENS = 64  # this many tokens without the end of a character: it is not UTF-8


class TableDetokenizer:
    """Looks each token's bytes up, and decodes them as they come.

    A prompt may end inside a character. If the first tokens finish it, it is the answer's; if they
    do not, the prompt has shown its U+FFFD.

    Args:
        table: see `TokenBytes.text_table`.
        context: the last tokens of the prompt.
    """

    __slots__ = ("_bytes_of", "_is_prompts", "_rest", "_table")

    def __init__(self, table: list[bytes], context: Sequence[int]) -> None:
        self._table, self._bytes_of = table, table.__getitem__
        self._rest = b""  # the first bytes of an unfinished character
        self._is_prompts = False
        self.push(context)
        self._is_prompts = bool(self._rest)  # the prompt has shown its U+FFFD

    def take_rest(self) -> int:
        """Give the prompt's unfinished character to the answer; return how many U+FFFD that is."""
        is_prompts, self._is_prompts = self._is_prompts, False
        return int(is_prompts)

    def flush(self) -> str:
        """End the stream; returns what was held back, with U+FFFD for an unfinished character."""
        return self.push((), final=True)

    def finish(self, token_ids: Sequence[int]) -> str:
        """Add tokens and end the stream."""
        return self.push(token_ids, final=True)

    def push(self, token_ids: Sequence[int], final: bool = False) -> str:
        """Add tokens; returns the text that they finish, perhaps none; all text if `final`."""
        try:
            if len(token_ids) == 1:
                raw = self._table[token_ids[0]]
            else:
                raw = b"".join(map(self._bytes_of, token_ids))
        except IndexError:  # the model has more tokens than the vocabulary
            raw = b"".join([self._table[i] for i in token_ids if i < len(self._table)])
        if self._rest:
            raw = self._rest + raw
        elif raw.isascii():  # most texts, four times as quickly
            return raw.decode()
        text, read = codecs.utf_8_decode(raw, "replace", final)
        self._rest = raw[read:]
        if self._is_prompts and text:
            self._is_prompts = False
            if text[0] == REPLACEMENT and not raw.startswith(_REPLACEMENT_BYTES):
                return text[1:]
        return text


class PieceDetokenizer:
    """Looks up each token of a SentencePiece-like vocabulary, and decodes bytes as they come.

    Byte tokens next to each other that are not UTF-8 are U+FFFD, each of them, as Hugging Face's
    decoder has it; but what they have finished before stays as it was given out.

    Args:
        table: the vocabulary's.
        prompt_ids: what the text comes after.
    """

    def __init__(self, table: PieceTable, prompt_ids: Sequence[int]) -> None:
        self._texts, self._byte_ids, self._first = table
        self._bytes_of = table.texts.__getitem__
        self._rest = b""  # the first bytes of an unfinished character
        self._is_wrong = False  # the byte tokens before are not UTF-8
        known = len(self._texts)
        before = (self._texts[i] for i in reversed(prompt_ids) if i < known)
        self._is_first = not any(before)  # the text begins with the answer
        self._prompt_rest = 0  # bytes that the prompt has shown as U+FFFD
        if not self._is_first:
            self._push_each(self._known(prompt_ids[-MAX_HELD_TOKENS:]))
        self._prompt_rest = len(self._rest)

    def take_rest(self) -> int:
        """Give the prompt's unfinished character to the answer; return how many U+FFFD that is."""
        count, self._prompt_rest = self._prompt_rest, 0
        return count

    def flush(self) -> str:
        """End the stream; returns what was held back, with U+FFFD for an unfinished character."""
        return self._wrong_rest()

    def finish(self, token_ids: Sequence[int]) -> str:
        """Add tokens and end the stream."""
        return self.push(token_ids) + self.flush()

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens; returns the text that they finish, perhaps none."""
        if self._is_first:
            token_ids = self._begin(self._known(token_ids))
        if self._is_wrong:
            return self._push_each(self._known(token_ids))
        try:
            raw = self._rest + b"".join(map(self._bytes_of, token_ids))
            text, read = codecs.utf_8_decode(raw, "strict", False)
        except IndexError:  # the model has more tokens than the vocabulary
            return self.push(self._known(token_ids))
        except UnicodeDecodeError:
            return self._push_each(token_ids)
        self._rest = raw[read:]
        if read:
            self._prompt_rest = 0
        return text

    def _known(self, token_ids: Sequence[int]) -> list[int]:
        return [token_id for token_id in token_ids if token_id < len(self._texts)]

    def _begin(self, token_ids: list[int]) -> list[int]:
        """Take the token that begins the text; return those after it."""
        for at, token_id in enumerate(token_ids, start=1):
            if self._texts[token_id]:
                self._is_first, text = False, self._first(token_id)
                if token_id in self._byte_ids and text:
                    return token_ids[at - 1 :]
                self._rest = text
                return token_ids[at:]
        return []

    def _push_each(self, token_ids: Sequence[int]) -> str:
        """Add tokens among which are bytes that are not UTF-8."""
        text, read = codecs.utf_8_decode(self._rest, "strict", False)
        self._rest, parts = self._rest[read:], [text]
        for token_id in token_ids:
            raw = self._texts[token_id]
            if token_id not in self._byte_ids:
                if raw:
                    parts += (self._wrong_rest(), raw.decode())
                    self._is_wrong = False
                continue
            try:
                text, read = codecs.utf_8_decode(self._rest + raw, "strict", False)
            except UnicodeDecodeError:
                self._is_wrong = True
            if self._is_wrong:
                parts += (self._wrong_rest(), REPLACEMENT)
                continue
            parts.append(text)
            self._rest = (self._rest + raw)[read:]
            self._prompt_rest = 0 if read else self._prompt_rest
        return "".join(parts)

    def _wrong_rest(self) -> str:
        count = len(self._rest) - self._prompt_rest
        self._rest, self._prompt_rest = b"", 0
        return REPLACEMENT * count


class MarkedDetokenizer:
    """Shows special tokens in the text that another detokenizer gives of the others."""

    def __init__(self, inner: Detokenizer, tokenizer: Tokenizer, visible: Collection[int]) -> None:
        self._inner = inner
        self._visible = {token_id: tokenizer.token_bytes.text(token_id) for token_id in visible}

    def take_rest(self) -> int:
        """Give the prompt's unfinished character to the answer; return how many U+FFFD that is."""
        return self._inner.take_rest()

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens; returns the text that they finish, perhaps none."""
        return "".join([self._push_one(token_id) for token_id in token_ids])

    def flush(self) -> str:
        """End the stream; returns what was held back, with U+FFFD for an unfinished character."""
        return self._inner.flush()

    def finish(self, token_ids: Sequence[int]) -> str:
        """Add tokens and end the stream."""
        return self.push(token_ids) + self.flush()

    def _push_one(self, token_id: int) -> str:
        if (marker := self._visible.get(token_id)) is None:
            return self._inner.push([token_id])
        return self._inner.flush() + marker


class ContextDetokenizer:
    """Decodes each token after those before it, whatever the tokenizer's decoder does.

    Text is held back while it ends in U+FFFD, which is what an unfinished character decodes to,
    and given out with the token that finishes it.

    Args:
        context: the last tokens of the prompt.
        skip_special: whether special tokens have no text.
    """

    def __init__(
        self, tokenizer: Tokenizer, context: Sequence[int], skip_special: bool = True
    ) -> None:
        self._decode = partial(tokenizer.decode, skip_special_tokens=skip_special)
        self._context = list(context)
        self._held: list[int] = []
        # A prompt may end inside a character, which the first generated tokens then finish.
        prompt = self._decode(self._context)
        for _ in range(min(3, len(self._context))):
            if not self._decode(self._context).endswith(REPLACEMENT):
                break
            self._held.insert(0, self._context.pop())
        self._context_chars = len(self._decode(self._context))
        # Of the held tokens' text the finished part is the prompt's, and what stays unfinished.
        rest = prompt[self._context_chars :]
        self._prompt_text = rest.rstrip(REPLACEMENT)
        self._prompt_rest = len(rest) - len(self._prompt_text)

    def take_rest(self) -> int:
        """Give the prompt's unfinished character to the answer; return how many U+FFFD that is."""
        count, self._prompt_rest = self._prompt_rest, 0
        return count

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens; returns the text that they finish, perhaps none."""
        return "".join([self._push_one(token_id) for token_id in token_ids])

    def flush(self) -> str:
        """End the stream; returns what was held back, with U+FFFD for an unfinished character."""
        if not self._held:
            return ""
        return self._release(self._held, self._decode(self._context + self._held))

    def finish(self, token_ids: Sequence[int]) -> str:
        """Add tokens and end the stream."""
        self._held.extend(token_ids)
        return self.flush()

    def _push_one(self, token_id: int) -> str:
        self._held.append(token_id)
        text = self._decode(self._context + self._held)
        if not text.endswith(REPLACEMENT):
            return self._release(self._held, text)
        if len(self._held) >= MAX_HELD_TOKENS:
            head = self._held[: self._boundary()]
            return self._release(head, self._decode(self._context + head))
        return ""

    def _release(self, head: list[int], text: str) -> str:
        """Give out the held tokens `head`, given the text of the context and them."""
        released = text[self._context_chars :].removeprefix(self._prompt_text)
        unfinished = len(released) - len(released.lstrip(REPLACEMENT))
        released = released[min(unfinished, self._prompt_rest) :]
        self._prompt_text, self._prompt_rest = "", 0
        self._held = self._held[len(head) :]
        self._context = (self._context + head)[-CONTEXT_TOKENS:]
        self._context_chars = len(self._decode(self._context))
        return released

    def _boundary(self) -> int:
        """How many held tokens end where a character ends, or all, if that cannot be seen."""
        whole = self._decode(self._held)
        for count in range(len(self._held) - 1, len(self._held) - 5, -1):
            head, tail = self._held[:count], self._held[count:]
            if self._decode(head) + self._decode(tail) == whole:
                return count
        return len(self._held)


# A prompt that ends inside a character has shown U+FFFD for it. If its text is repeated before the
# answer's, `take_rest` lets the answer show these U+FFFD, or the whole character; it returns their
# number, and the prompt's text then leaves them out.
Detokenizer = TableDetokenizer | PieceDetokenizer | MarkedDetokenizer | ContextDetokenizer


def make_detokenizer(
    tokenizer: Tokenizer,
    prompt_ids: Sequence[int],
    skip_special: bool = True,
    visible: Collection[int] = (),
) -> Detokenizer:
    """Return the quickest detokenizer that gives the tokenizer's own text.

    Args:
        tokenizer: of the model.
        prompt_ids: what the text comes after.
        skip_special: whether special tokens, such as one that ends an answer, have no text.
        visible: special tokens that have one nevertheless.
    """
    context = prompt_ids[-CONTEXT_TOKENS:]
    shown = visible if skip_special else tokenizer.token_bytes.special
    if (table := tokenizer.table_with(shown)) is not None:
        return TableDetokenizer(table, context)
    if (pieces := tokenizer.pieces_with(shown)) is not None:
        return PieceDetokenizer(pieces, prompt_ids)
    detokenizer = ContextDetokenizer(tokenizer, context, skip_special)
    hidden = visible if skip_special else ()
    return MarkedDetokenizer(detokenizer, tokenizer, hidden) if hidden else detokenizer
