"""What a step gave its sequences, for those who asked for them."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from pagewire.shared.request import FinishReason


class StepOutput(msgspec.Struct, frozen=True, gc=False):
    """What one step gave one sequence.

    Attributes:
        cached_tokens: prompt tokens found in the prefix cache; with the first output only.
        queue_s, prefill_s: time waited and computed until the first token; likewise.
    """

    request_id: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    cached_tokens: int | None = None
    queue_s: float = 0.0
    prefill_s: float = 0.0
    error: str | None = None


class StepOutputs(msgspec.Struct, frozen=True, gc=False):
    """What one step gave all its sequences.

    Most sequences get one token and nothing else. They are in the columns, which need no object for
    each sequence. First and last tokens and errors are in `others`; no sequence is in both. The
    engine uses the columns, too: do not change them. Iterating gives everything as `StepOutput`,
    which is simple and slow.

    Attributes:
        request_ids: whose token it is.
        token_ids: the token.
        others: outputs that have more than a token.
    """

    request_ids: list[str] = []
    token_ids: list[int] = []
    others: list[StepOutput] = []

    def __len__(self) -> int:
        return len(self.request_ids) + len(self.others)

    def __iter__(self) -> Iterator[StepOutput]:
        for request_id, token in zip(self.request_ids, self.token_ids, strict=True):
            yield StepOutput(request_id, [token])
        yield from self.others
