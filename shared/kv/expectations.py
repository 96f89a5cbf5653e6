"""What a decode worker expects: reserved sequences, and how much of their KV has come."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

from pagewire.shared.engine.core import EngineCore
from pagewire.shared.engine.sequence import Sequence
from pagewire.shared.engine.step import Expect
from pagewire.shared.kv.messages import Segment
from pagewire.shared.kv.segments import Coverage
from pagewire.shared.kv_cache.parts import BlockParts
from pagewire.shared.request import RequestStatus


@dataclass(slots=True, eq=False)
class Attempt:
    """One prefill job for a request."""

    job: str
    coverage: Coverage
    num_unpacking: int = 0


@dataclass(frozen=True, slots=True)
class Completion:
    """What a reserved sequence runs on from.

    Attributes:
        job: whose blocks count.
        first_token: sampled by the prefill worker.
        on_activated: called in the engine's thread.
    """

    job: str
    first_token: int
    on_activated: Callable[[], None]


@dataclass(slots=True, eq=False)
class Expected:
    """A sequence's reserved blocks.

    Attributes:
        block_ids: of the whole sequence.
        after: the last plan whose work may touch them.
        attempt: the job that computes them now.
        heard_s: when something of it came.
    """

    request_id: str
    block_ids: list[int]
    after: int
    attempt: Attempt
    heard_s: float
    completion: Completion | None = None


@dataclass(slots=True)
class Expectations:
    """All reserved sequences of an engine, by request and by the job that computes them.

    Attributes:
        core: its sequences are looked up and activated.
        parts: of a block.
        clock: in seconds.
        on_reserved: called with a request, its job's name, the position of the first block that is
            expected, and the number of its blocks.
    """

    core: EngineCore
    parts: BlockParts
    clock: Callable[[], float]
    on_reserved: Callable[[str, str, int, int], None] = lambda _request, _job, _first, _count: None
    _by_request: dict[str, Expected] = field(default_factory=dict)
    _by_job: dict[str, Expected] = field(default_factory=dict)
    _name: str = field(default_factory=lambda: secrets.token_hex(8))  # makes jobs' names unique

    def retry(self, request_id: str, job: str) -> None:
        """Expect a request's blocks from another job; what the one before brought does not count.

        Args:
            request_id: one that is not reserved any more is fine.
            job: as `new_job` named it.
        """
        expected = self._by_request.get(request_id)
        if expected is not None:
            del self._by_job[expected.attempt.job]
            old = expected.attempt.coverage
            expected.attempt = Attempt(job, Coverage(old.positions, old.parts))
            expected.heard_s = self.clock()
            self._by_job[job] = expected

    def new_job(self, request_id: str, number: int) -> str:
        """Return the name of a request's n-th job; the same nowhere else in the cluster."""
        return f"{self._name}.{request_id}.{number}"

    def complete(self, request_id: str, completion: Completion) -> None:
        """Activate a sequence as soon as its blocks are there; one that has ended needs none."""
        expected = self._by_request.get(request_id)
        if expected is not None:
            expected.completion = completion
            expected.heard_s = self.clock()
            self.activate_if_complete(expected)

    def heard_s(self, request_id: str) -> float:
        """Return when something was last heard of a request's job; 0 if it is not reserved.

        From any thread.
        """
        expected = self._by_request.get(request_id)
        return 0.0 if expected is None else expected.heard_s

    def reserve(self, work: Expect, after: int) -> None:
        """Expect a sequence's blocks; no plan later than `after` touches them but by KV."""
        positions = range(work.first, len(work.block_ids))
        job = self.new_job(work.request_id, 1)
        attempt = Attempt(job, Coverage(positions, self.parts.whole))
        made = Expected(work.request_id, work.block_ids, after, attempt, self.clock())
        self._by_request[work.request_id] = self._by_job[job] = made
        self.on_reserved(work.request_id, job, work.first, len(work.block_ids))

    def forget(self, request_id: str) -> None:
        """Expect nothing more for a request; unknown ones are fine."""
        expected = self._by_request.pop(request_id, None)
        if expected is not None:
            del self._by_job[expected.attempt.job]

    def activate_if_complete(self, expected: Expected) -> None:
        """Let a sequence run on once all of its blocks and its first token are there."""
        completion, attempt = expected.completion, expected.attempt
        if completion is None or completion.job != attempt.job:
            return
        sequence = self._reserved(expected.request_id)
        if sequence is None or attempt.num_unpacking or not attempt.coverage.is_full():
            return
        self.forget(expected.request_id)
        self.core.activate(sequence, completion.first_token)
        completion.on_activated()

    def _reserved(self, request_id: str) -> Sequence | None:
        """Return the sequence, if it still waits for its blocks."""
        sequence = self.core.get(request_id)
        if sequence is None or sequence.status is not RequestStatus.RESERVED:
            return None
        return sequence

    def find(self, segment: Segment) -> Expected | None:
        """Return what a segment is the first to bring its part of; None if nobody wants it."""
        expected = self._by_job.get(segment.job)
        is_wanted = (
            expected is not None
            and self._reserved(expected.request_id) is not None
            and segment.nbytes == self.parts.packed_bytes(segment.count, segment.num_parts)
            and expected.attempt.coverage.allows(segment.positions, segment.parts)
        )
        return expected if is_wanted else None
