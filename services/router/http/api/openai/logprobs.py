"""Writes log probabilities as OpenAI's and vLLM's responses have them."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from pagewire.services.router.http.api.openai import objects
from pagewire.shared.request.logprobs import MAX_TOP, Token
from pagewire.shared.text.answer_text import TextDelta
from pagewire.shared.text.token_bytes import TokenBytes

# OpenAI's value for a token that cannot come: JSON has no infinity.
LEAST = -9999.0


def finite(logprob: float) -> float:
    """Return a log probability that JSON can carry; NaN counts as -inf."""
    return max(LEAST, logprob)


def name_by_id(token_id: int) -> str:
    """Return the name that vLLM gives a token with `return_tokens_as_token_ids`."""
    return f"token_id:{token_id}"


def chat_logprobs(
    tokens: Iterable[Token], token_bytes: TokenBytes, by_id: bool = False
) -> objects.ChatLogprobs:
    """Return the `logprobs` of a chat choice, or of a part of it.

    Args:
        tokens: of the choice.
        token_bytes: the vocabulary.
        by_id: tokens are named by their ids.
    """

    def entry(token_id: int, logprob: float) -> tuple[str, float, list[int]]:
        raw = token_bytes.of(token_id)
        text = name_by_id(token_id) if by_id else raw.decode(errors="replace")
        return text, finite(logprob), list(raw)

    return objects.ChatLogprobs(
        [
            objects.ChatToken(
                *entry(token.id, token.logprob),
                [objects.TopToken(*entry(*likely)) for likely in token.top],
            )
            for token in tokens
        ]
    )


def prompt_logprobs(
    tokens: Iterable[Token] | None, token_bytes: TokenBytes
) -> objects.PromptTokens:
    """Return vLLM's `prompt_logprobs`: null for the first token, then by token id.

    Args:
        tokens: all but the prompt's first; None if it has no other.
        token_bytes: the vocabulary.
    """
    entries: objects.PromptTokens = [None]
    for token in tokens or ():
        position: dict[str, objects.PromptToken] = {}
        ranked = [(*likely, rank) for rank, likely in enumerate(token.top, start=1)]
        for token_id, logprob, rank in [(token.id, token.logprob, token.rank), *ranked]:
            entry = objects.PromptToken(finite(logprob), rank, token_bytes.text(token_id))
            position.setdefault(str(token_id), entry)
        entries.append(position)
    return entries


class CompletionLogprobs:
    """The `logprobs` of one completion choice, whose offsets go on from part to part.

    Args:
        token_bytes: the vocabulary.
        echoed: id of the prompt's first token, if the prompt is repeated before the answer; if it
            is not, the prompt's log probabilities are not the choice's.
        by_id: tokens are named by their ids.
        num_top: how many most likely tokens each has at most: a prompt may have been scored with
            more of them.
    """

    def __init__(
        self,
        token_bytes: TokenBytes,
        echoed: int | None,
        by_id: bool = False,
        num_top: int = MAX_TOP,
    ) -> None:
        self._bytes, self._echoed, self._num_top = token_bytes, echoed, num_top
        self._echoes = echoed is not None
        self._name = name_by_id if by_id else token_bytes.name
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def of(self, delta: TextDelta) -> objects.CompletionTokens | None:
        """Return the tokens of a part of the choice; None if there are none."""
        columns = objects.CompletionTokens()
        first, self._echoed = self._echoed, None
        if first is not None:
            self._add(columns, first, None, None)
        for part in (delta.prompt_logprobs if self._echoes else None, delta.logprobs):
            for token in part or ():
                top: dict[str, float] = {}
                for token_id, logprob in [*token.top[: self._num_top], (token.id, token.logprob)]:
                    top.setdefault(self._name(token_id), finite(logprob))
                self._add(columns, token.id, finite(token.logprob), top)
        return columns if columns.tokens else None

    def _add(
        self,
        columns: objects.CompletionTokens,
        token_id: int,
        logprob: float | None,
        top: dict[str, float] | None,
    ) -> None:
        columns.tokens.append(self._name(token_id))
        columns.token_logprobs.append(logprob)
        columns.top_logprobs.append(top)
        columns.text_offset.append(self._offset)
        if not self._bytes.is_special(token_id):
            self._offset += len(self._decoder.decode(self._bytes.of(token_id)))
