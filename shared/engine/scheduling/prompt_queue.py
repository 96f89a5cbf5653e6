"""The sequences that wait, and the sum of what computing their prompts takes."""

from __future__ import annotations

from collections.abc import Iterator

from pagewire.shared.base.fair_queue import FairQueue
from pagewire.shared.costs.step_work import NOTHING, StepWork
from pagewire.shared.engine.scheduling.sequence import Sequence


class PromptQueue(FairQueue[str | None, Sequence]):
    """Sequences in the lines of their owners, and running totals: nobody walks over all of them.

    Once `record_cached` has said how many tokens of a sequence are cached, these do not count.

    Attributes:
        num_tokens: of all sequences, as of the time at which each was counted.
        work: to compute the prompts of those that await no KV from another worker.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_tokens = 0
        self.work = NOTHING
        self._counted: dict[Sequence, tuple[int, StepWork]] = {}
        self._uncounted: dict[Sequence, None] = {}  # it is not known how much is cached of them
        self._num_remote = 0

    @property
    def next_uncounted(self) -> Sequence | None:
        """The next sequence whose cached tokens are not known; None if there is none.

        Those that await KV from another worker are left out.
        """
        return next(iter(self._uncounted), None)

    def record_cached(self, sequence: Sequence, num_cached: int) -> None:
        """Count a waiting sequence without tokens that are cached, which need no computing."""
        del self._uncounted[sequence]
        self._discount(sequence)
        self._add(sequence, num_cached)

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
        self._uncounted.pop(item, None)
        if item in self._counted:
            self._discount(item)

    def _count(self, sequence: Sequence) -> None:
        if sequence not in self._counted:
            self._add(sequence, 0)
            if not sequence.remote_prefill:
                self._uncounted[sequence] = None

    def _add(self, sequence: Sequence, num_cached: int) -> None:
        count = len(sequence.token_ids) - num_cached
        work = NOTHING if sequence.remote_prefill else NOTHING.with_chunk(num_cached, count)
        self._counted[sequence] = count, work
        self.num_tokens += count
        self._num_remote += count > work.tokens  # its prompt is not part of the work
        self.work = self.work.plus(work)

    def _discount(self, sequence: Sequence) -> None:
        count, work = self._counted.pop(sequence)
        self.num_tokens -= count
        self._num_remote -= count > work.tokens
        self.work = self.work.minus(work)
