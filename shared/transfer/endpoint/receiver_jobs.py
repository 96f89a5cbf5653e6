"""The receiver's prefill jobs: which of their blocks have arrived."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from pagewire.shared.engine.live_sequences import LiveSequences
from pagewire.shared.engine.scheduling.sequence import Sequence
from pagewire.shared.engine.scheduling.status import RequestStatus
from pagewire.shared.engine.scheduling.step import Expect
from pagewire.shared.kv.kv_layout import KvLayout
from pagewire.shared.transfer.endpoint.receiver_link import ReceiverLink
from pagewire.shared.transfer.endpoint.segments import Coverage


@dataclass(slots=True, eq=False)
class ReceiverJob:
    """A prefill job for a reserved sequence, and which of its blocks have arrived.

    Attributes:
        name: unique in the cluster.
        block_ids: blocks of the whole sequence.
        after: the last plan whose work may touch them.
        coverage: blocks that have arrived, including those that are being unpacked.
        last_active_s: time of the last message or segment.
        link: the link of the prefill worker that has the job; None if none has it.
        done_s: when the first token came.
        num_unpacking: segments that are being unpacked.
        first_token: the token that the prefill worker sampled; None before that.
        first_segment_s: arrival of the first segment; None before that.
        num_segments: segments unpacked or being unpacked, including corrupt ones.
        num_bytes: bytes of these segments.
    """

    name: str
    request_id: str
    block_ids: list[int]
    after: int
    coverage: Coverage
    last_active_s: float
    link: ReceiverLink | None = None
    done_s: float = 0.0
    num_unpacking: int = 0
    first_token: int | None = None
    first_segment_s: float | None = None
    num_segments: int = 0
    num_bytes: int = 0

    def record_segment(self, nbytes: int) -> None:
        """Count a segment, whose arrival `last_active_s` already has."""
        self.num_segments += 1
        self.num_bytes += nbytes
        if self.first_segment_s is None:
            self.first_segment_s = self.last_active_s


@dataclass(slots=True)
class ReceiverJobs:
    """The jobs for all reserved sequences of an engine.

    Attributes:
        sequences: the engine's live sequences, which jobs look up and activate.
        layout: of the blocks.
        clock: returns a time in seconds.
    """

    sequences: LiveSequences
    layout: KvLayout
    clock: Callable[[], float]
    _by_request: dict[str, ReceiverJob] = field(default_factory=dict)
    _by_name: dict[str, ReceiverJob] = field(default_factory=dict)
    # Both make jobs' names unique.
    _prefix: str = field(default_factory=lambda: secrets.token_hex(8))
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def __iter__(self) -> Iterator[ReceiverJob]:
        """Iterate over the jobs of now; they may change meanwhile."""
        return iter(list(self._by_request.values()))

    def any_active_since(self, since_s: float) -> bool:
        """Whether since then a message or segment of a job has come, or blocks were reserved."""
        return any(job.last_active_s >= since_s for job in self._by_request.values())

    def add(self, work: Expect, after: int) -> ReceiverJob:
        """Expect a sequence's blocks; only plans up to `after` may still touch them."""
        blocks = range(work.first, len(work.block_ids))
        return self._add(work.request_id, work.block_ids, after, blocks)

    def retry(self, old: ReceiverJob) -> ReceiverJob:
        """Replace a job by one that expects the same blocks, none of which has arrived."""
        self.remove(old.request_id)
        return self._add(old.request_id, old.block_ids, old.after, old.coverage.blocks)

    def _add(self, request_id: str, block_ids: list[int], after: int, blocks: range) -> ReceiverJob:
        name = f"{self._prefix}.{request_id}.{next(self._numbers)}"
        coverage = Coverage(blocks, self.layout.layer_groups)
        job = ReceiverJob(name, request_id, block_ids, after, coverage, self.clock())
        self._by_request[request_id] = self._by_name[name] = job
        return job

    def remove(self, request_id: str) -> ReceiverJob | None:
        """Expect nothing more for a request; return its job, if it had one."""
        job = self._by_request.pop(request_id, None)
        if job is not None:
            del self._by_name[job.name]
        return job

    def activate_if_complete(self, job: ReceiverJob) -> bool:
        """Activate a job's sequence if all of its blocks and its first token have arrived.

        Returns:
            Whether the sequence was activated; never if the job was given up.
        """
        are_here = not job.num_unpacking and job.coverage.is_full()
        sequence = self._reserved(job) if are_here else None
        if sequence is None or job.first_token is None:
            return False
        self.remove(job.request_id)
        self.sequences.activate(sequence, job.first_token)
        return True

    def _reserved(self, job: ReceiverJob) -> Sequence | None:
        """Return the sequence, if it still waits for this job."""
        sequence = self.sequences.get(job.request_id)
        if sequence is None or sequence.status is not RequestStatus.RESERVED:
            return None
        return sequence if self._by_name.get(job.name) is job else None

    def record_activity(self, name: str) -> ReceiverJob | None:
        """Note that something of a job has come; return the job, or None if nobody waits for it."""
        job = self._by_name.get(name)
        if job is None or self._reserved(job) is None:
            return None
        job.last_active_s = self.clock()
        return job
