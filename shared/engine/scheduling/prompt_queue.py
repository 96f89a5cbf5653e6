"""The sequences that wait, and the sum of what computing their prompts takes."""

from __future__ import annotations

from collections.abc import Iterator

from pagewire.shared.base.fair_queue import FairQueue
from pagewire.shared.costs.step_work import NOTHING, StepWork
from pagewire.shared.engine.scheduling.sequence import Sequence


class PromptQueue(FairQueue[str | None, Sequence]):
    """Sequences in the lines of their owners, and running totals: nobody walks over all of them.

    Attributes:
        num_tokens: of all sequences, as of the time at which each began to wait.
        work: to compute the prompts of those that await no KV from another worker, as if nothing
            were cached.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_tokens = 0
        self.work = NOTHING
        self._counted: dict[Sequence, tuple[int, StepWork]] = {}
        self._num_remote = 0

    def remote(self) -> Iterator[Sequence]:
        """Yield those whose prompts another worker computes, in the order of the queue.

        Suspects are left out: only one is admitted at a time, and none may pass another one.
        """
        if self._num_remote:
            yield from (each for each in self if each.remote_prefill and not each.strikes)

    def push(self, owner: str | None, item: Sequence) -> None:
        """Put a sequence at the end of its owner's line, unless it waits there already."""
        super().push(owner, item)
        self._count(item)

    def push_first(self, owner: str | None, item: Sequence) -> None:
        """Put back a sequence that has had a turn, at the front of its owner's line."""
        super().push_first(owner, item)
        self._count(item)

    def remove(self, owner: str | None, item: Sequence) -> None:
        """Take a sequence out of its owner's line; do nothing if it does not wait there."""
        super().remove(owner, item)
        count, work = self._counted.pop(item, (0, NOTHING))
        self.num_tokens -= count
        self._num_remote -= count > work.tokens  # its prompt is not part of the work
        self.work = self.work.minus(work)

    def _count(self, sequence: Sequence) -> None:
        if sequence in self._counted:
            return
        count = len(sequence.token_ids)
        work = NOTHING if sequence.remote_prefill else NOTHING.with_chunk(0, count)
        self._counted[sequence] = count, work
        self.num_tokens += count
        self._num_remote += count > work.tokens
        self.work = self.work.plus(work)
