"""What a step gave its sequences, for whoever asked for them."""

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

    Most sequences get a token and nothing else. They are in the columns, an entry a token in each,
    and cost no object each. First and last tokens and errors are in `others`; a sequence is in one
    of both. The columns belong to the engine, too: read them and do not change them. Iterating
    gives everything as `StepOutput`, which is simple and slow.

    Attributes:
        request_ids: whose token it is.
        token_ids: the token.
        others: of which there is more to say.
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
