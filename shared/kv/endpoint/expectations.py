"""What a decode worker expects: reserved sequences, and how much of their KV has come."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

from pagewire.shared.engine.core import EngineCore
from pagewire.shared.engine.sequence import Sequence
from pagewire.shared.engine.status import RequestStatus
from pagewire.shared.engine.step import Expect
from pagewire.shared.kv.endpoint.segments import Coverage
from pagewire.shared.kv.layer_groups import LayerGroups


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
    """A sequence's reserved blocks, and what one prefill job has brought of them.

    Attributes:
        block_ids: of the whole sequence.
        after: the last plan whose work may touch them.
        job: its name.
        coverage: what has come, or is being unpacked.
        heard_s: when something of the job came.
        num_unpacking: segments.
    """

    request_id: str
    block_ids: list[int]
    after: int
    job: str
    coverage: Coverage
    heard_s: float
    num_unpacking: int = 0
    completion: Completion | None = None


@dataclass(slots=True)
class Expectations:
    """All reserved sequences of an engine, by request and by the job that computes them.

    Attributes:
        core: its sequences are looked up and activated.
        groups: layer groups of a block.
        clock: in seconds.
        on_reserved: called with a request, its job's name, the position of the first block that is
            expected, and the number of its blocks.
    """

    core: EngineCore
    groups: LayerGroups
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
        old = self._by_request.get(request_id)
        if old is not None:
            del self._by_job[old.job]
            self._expect(request_id, old.block_ids, old.after, job, old.coverage.positions)

    def new_job(self, request_id: str, number: int) -> str:
        """Return the name of a request's n-th job; the same nowhere else in the cluster."""
        return f"{self._name}.{request_id}.{number}"

    def complete(self, request_id: str, completion: Completion) -> None:
        """Activate a sequence as soon as its blocks are there; one that has ended needs none."""
        expected = self._by_request.get(request_id)
        if expected is not None and expected.job == completion.job:
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
        job, count = self.new_job(work.request_id, 1), len(work.block_ids)
        self._expect(work.request_id, work.block_ids, after, job, range(work.first, count))
        self.on_reserved(work.request_id, job, work.first, count)

    def _expect(
        self, request_id: str, block_ids: list[int], after: int, job: str, positions: range
    ) -> None:
        coverage = Coverage(positions, self.groups.whole)
        made = Expected(request_id, block_ids, after, job, coverage, self.clock())
        self._by_request[request_id] = self._by_job[job] = made

    def forget(self, request_id: str) -> None:
        """Expect nothing more for a request; unknown ones are fine."""
        expected = self._by_request.pop(request_id, None)
        if expected is not None:
            del self._by_job[expected.job]

    def activate_if_complete(self, expected: Expected) -> None:
        """Let a sequence run on once all of its blocks and its first token are there.

        Args:
            expected: of a job that was given up it is of no use.
        """
        completion = expected.completion
        if completion is None or expected.num_unpacking or not expected.coverage.is_full():
            return
        sequence = self._reserved(expected)
        if sequence is not None:
            self.forget(expected.request_id)
            self.core.activate(sequence, completion.first_token)
            completion.on_activated()

    def _reserved(self, expected: Expected) -> Sequence | None:
        """Return the sequence, if it still waits for what this job brings."""
        sequence = self.core.get(expected.request_id)
        if sequence is None or sequence.status is not RequestStatus.RESERVED:
            return None
        return sequence if self._by_job.get(expected.job) is expected else None

    def find(self, job: str) -> Expected | None:
        """Return what is expected of a job; None if nobody waits for it."""
        expected = self._by_job.get(job)
        return None if expected is None or self._reserved(expected) is None else expected
