"""The receiver's state of a KV link and its jobs, and the callbacks by which it reports on them."""

from __future__ import annotations

from dataclasses import dataclass, field

from pagewire.shared.kv.carriers.base import Inbound
from pagewire.shared.kv.endpoint.segments import Coverage
from pagewire.shared.kv.job_messages import JobReport


@dataclass(slots=True, eq=False)
class ReceiverLink:
    """A link to one run of a prefill worker.

    Attributes:
        number: counts up; never used again in this process.
        peer: name of the prefill worker.
        token: identifies the link on the socket.
        offers: what a sender needs to know, by carrier.
        carrier: name of the carrier; empty until the sender has chosen one.
        is_granted: the sender was given credits.
        is_tested: the first segment has arrived intact.
    """

    number: int
    peer: str
    token: bytes
    offers: dict[str, bytes] = field(default_factory=dict)
    carrier: str = ""
    inbound: Inbound | None = None
    is_granted: bool = False
    is_tested: bool = False


@dataclass(slots=True, eq=False)
class Expected:
    """A sequence's reserved blocks, and which of them one prefill job has delivered.

    Attributes:
        block_ids: blocks of the whole sequence.
        after: the last plan whose work may touch them.
        job: the job's name, unique in the cluster.
        coverage: blocks that have arrived, including those that are being unpacked.
        last_active_s: time of the job's last message or segment.
        link: the link of the prefill worker that has the job; None if none has it.
        done_s: when the job's first token came.
        num_unpacking: segments that are being unpacked.
        first_token: the token that the prefill worker sampled; None before that.
        first_segment_s: arrival of the job's first segment; None before that.
        num_segments: segments unpacked or being unpacked, including corrupt ones.
        num_bytes: bytes of these segments.
    """

    request_id: str
    block_ids: list[int]
    after: int
    job: str
    coverage: Coverage
    last_active_s: float
    link: ReceiverLink | None = None
    done_s: float = 0.0
    num_unpacking: int = 0
    first_token: int | None = None
    first_segment_s: float | None = None
    num_segments: int = 0
    num_bytes: int = 0

    def note_segment(self, nbytes: int) -> None:
        """Count a segment of the job, whose arrival `last_active_s` already has."""
        self.num_segments += 1
        self.num_bytes += nbytes
        if self.first_segment_s is None:
            self.first_segment_s = self.last_active_s


class JobCallbacks:
    """The owner of the jobs, `RemoteJobs`, overrides these. All are called in the engine's thread.

    An exception in one of them fails all requests of this iteration's step, if there is one.
    """

    def on_reserved(self, expected: Expected) -> None:
        """Send a job for a sequence's blocks to a prefill worker, while a plan is launched."""

    def on_withdrawn(self, expected: Expected) -> None:
        """Cancel a sequence's job: its blocks may belong to other sequences from now on."""

    def on_activated(self, expected: Expected) -> None:
        """Note that a sequence was activated with the blocks of this job."""

    def on_message(self, link: ReceiverLink, message: JobReport) -> None:
        """Handle a prefill worker's report about a job."""

    def on_link_closed(self, link: ReceiverLink) -> None:
        """Send the jobs of an ended link to other workers."""

    def check_deadlines(self) -> None:
        """Send silent jobs to other workers; called several times a second."""
