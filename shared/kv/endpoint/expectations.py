"""Tracks sequences whose KV comes from a prefill worker, and which of their blocks have arrived."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from pagewire.shared.engine.core import EngineCore
from pagewire.shared.engine.scheduling.sequence import Sequence
from pagewire.shared.engine.scheduling.status import RequestStatus
from pagewire.shared.engine.scheduling.step import Expect
from pagewire.shared.kv.endpoint.receiver_link import Expected
from pagewire.shared.kv.endpoint.segments import Coverage
from pagewire.shared.kv.layer_groups import LayerGroups


@dataclass(slots=True)
class Expectations:
    """All reserved sequences of an engine, by request and by the job that computes them.

    Attributes:
        core: the engine, whose sequences are looked up and activated.
        groups: layer groups of a block.
        clock: returns a time in seconds.
    """

    core: EngineCore
    groups: LayerGroups
    clock: Callable[[], float]
    _by_request: dict[str, Expected] = field(default_factory=dict)
    _by_job: dict[str, Expected] = field(default_factory=dict)
    # Both make jobs' names unique.
    _name: str = field(default_factory=lambda: secrets.token_hex(8))
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def __iter__(self) -> Iterator[Expected]:
        """Iterate over what is expected now; it may change meanwhile."""
        return iter(list(self._by_request.values()))

    def any_active_since(self, since_s: float) -> bool:
        """Whether since then a message or segment of a job has come, or blocks were reserved."""
        return any(expected.last_active_s >= since_s for expected in self._by_request.values())

    def reserve(self, work: Expect, after: int) -> Expected:
        """Expect a sequence's blocks; only plans up to `after` may still touch them."""
        positions = range(work.first, len(work.block_ids))
        return self._expect(work.request_id, work.block_ids, after, positions)

    def retry(self, old: Expected) -> Expected:
        """Expect the blocks from a new job; blocks that the earlier one delivered do not count."""
        self.forget(old.request_id)
        return self._expect(old.request_id, old.block_ids, old.after, old.coverage.positions)

    def _expect(
        self, request_id: str, block_ids: list[int], after: int, positions: range
    ) -> Expected:
        job = f"{self._name}.{request_id}.{next(self._numbers)}"
        coverage = Coverage(positions, self.groups.whole)
        made = Expected(request_id, block_ids, after, job, coverage, self.clock())
        self._by_request[request_id] = self._by_job[job] = made
        return made

    def forget(self, request_id: str) -> Expected | None:
        """Expect nothing more for a request; return what was expected, if anything."""
        expected = self._by_request.pop(request_id, None)
        if expected is not None:
            del self._by_job[expected.job]
        return expected

    def activate_if_complete(self, expected: Expected) -> bool:
        """Activate a sequence if all of its blocks and its first token have arrived.

        Args:
            expected: of the sequence; ignored if its job was given up.

        Returns:
            Whether the sequence was activated.
        """
        are_here = not expected.num_unpacking and expected.coverage.is_full()
        sequence = self._reserved(expected) if are_here else None
        if sequence is None or expected.first_token is None:
            return False
        self.forget(expected.request_id)
        self.core.activate(sequence, expected.first_token)
        return True

    def _reserved(self, expected: Expected) -> Sequence | None:
        """Return the sequence, if it still waits for this job."""
        sequence = self.core.get(expected.request_id)
        if sequence is None or sequence.status is not RequestStatus.RESERVED:
            return None
        return sequence if self._by_job.get(expected.job) is expected else None

    def note_activity(self, job: str) -> Expected | None:
        """Note that a job was heard of; return its `Expected`, or None if nobody waits for it."""
        expected = self._by_job.get(job)
        if expected is None or self._reserved(expected) is None:
            return None
        expected.last_active_s = self.clock()
        return expected
