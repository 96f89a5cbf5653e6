"""Tokens with their log probabilities, from the sampler to the answer.

They travel as columns, which take 8 bytes for an id and its log probability and are cut and joined
without looking at the numbers. Only code that shows them makes `Token` objects. Requests that do
not ask for log probabilities have plain token ids, and none of this.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

MAX_TOP = 20  # most likely tokens at each position
MAX_POSITIONS = 512  # prompt tokens in one message
_NUMBER = 4  # bytes of an int32 or float32, in the machine's order


class Token(NamedTuple):
    """A token with its log probability, and the likeliest tokens at its position.

    Attributes:
        logprob: its log probability; may be -inf.
        rank: 1 for the most likely token.
        top: ids and log probabilities of the most likely tokens, as many as were asked for.
    """

    id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]


class Logprobs(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The log probabilities of n tokens in a row.

    Attributes:
        width: numbers of each token: its own, and those of the most likely tokens.
        ids: [n, width] int32.
        logprobs: [n, width] float32.
        ranks: [n] int32.

    Raises:
        ValueError: the columns' lengths do not agree.
    """

    width: Annotated[int, Meta(ge=1, le=1 + MAX_TOP)]
    ids: bytes
    logprobs: bytes
    ranks: bytes

    def __post_init__(self) -> None:
        size = len(self.ranks) * self.width
        if len(self.ranks) % _NUMBER or len(self.ids) != size or len(self.logprobs) != size:
            raise ValueError("columns of log probabilities with different lengths")

    def __len__(self) -> int:
        return len(self.ranks) // _NUMBER

    def part(self, start: int, end: int) -> Logprobs:
        """Return tokens `start .. end - 1`, as far as there are any."""
        row = _NUMBER * self.width
        return Logprobs(
            self.width,
            self.ids[start * row : end * row],
            self.logprobs[start * row : end * row],
            self.ranks[start * _NUMBER : end * _NUMBER],
        )

    def __iter__(self) -> Iterator[Token]:
        ids, ranks = memoryview(self.ids).cast("i"), memoryview(self.ranks).cast("i")
        logprobs = memoryview(self.logprobs).cast("f")
        for index, rank in enumerate(ranks):
            start, end = index * self.width, (index + 1) * self.width
            top = list(zip(ids[start + 1 : end], logprobs[start + 1 : end], strict=True))
            yield Token(ids[start], logprobs[start], rank, top)


class PromptLogprobs(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A part of a prompt's log probabilities.

    Attributes:
        start: position of the first token; the prompt's first token, at 0, has none.
    """

    start: Annotated[int, Meta(ge=1, lt=2**40)]
    tokens: Logprobs

    @property
    def end(self) -> int:
        """The position that follows the last of these tokens."""
        return self.start + len(self.tokens)

    def since(self, position: int) -> PromptLogprobs:
        """Return the part from a position on, which may be empty."""
        known = max(0, position - self.start)
        return PromptLogprobs(self.start + known, self.tokens.part(known, len(self.tokens)))

    def parts(self) -> Iterator[PromptLogprobs]:
        """Yield parts that fit into a message."""
        for first in range(0, len(self.tokens), MAX_POSITIONS):
            tokens = self.tokens.part(first, first + MAX_POSITIONS)
            yield PromptLogprobs(self.start + first, tokens)


def join(parts: Sequence[Logprobs]) -> Logprobs | None:
    """Return the tokens of all parts, None if there are no parts; all have the same width."""
    if len(parts) < 2:
        return parts[0] if parts else None
    return Logprobs(
        parts[0].width,
        b"".join([part.ids for part in parts]),
        b"".join([part.logprobs for part in parts]),
        b"".join([part.ranks for part in parts]),
    )
