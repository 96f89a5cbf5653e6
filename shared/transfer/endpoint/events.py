"""What happens at a KV endpoint, as values for the owner of its jobs and links."""

from __future__ import annotations

from dataclasses import dataclass

from pagewire.shared.transfer.endpoint.receiver_jobs import ReceiverJob
from pagewire.shared.transfer.endpoint.receiver_link import ReceiverLink
from pagewire.shared.transfer.endpoint.sender_link import SenderLink
from pagewire.shared.transfer.job_messages import JobReport, JobRequest


@dataclass(frozen=True, slots=True)
class JobReserved:
    """Blocks are reserved for a job, which may begin while the plan is launched."""

    job: ReceiverJob


@dataclass(frozen=True, slots=True)
class JobWithdrawn:
    """A job's sequence has lost its blocks, which may belong to other sequences from now on."""

    job: ReceiverJob


@dataclass(frozen=True, slots=True)
class JobReported:
    """The prefill worker that has a job reports about it."""

    link: ReceiverLink
    job: ReceiverJob
    message: JobReport


@dataclass(frozen=True, slots=True)
class JobSilent:
    """No message or segment of a job has come for a while."""

    job: ReceiverJob
    reason: str


@dataclass(frozen=True, slots=True)
class JobActivated:
    """All blocks of a job and its first token are here, and its sequence runs."""

    job: ReceiverJob


@dataclass(frozen=True, slots=True)
class JobRequested:
    """The receiver of a link wants a prompt computed, or cancels that."""

    link: SenderLink
    message: JobRequest


@dataclass(frozen=True, slots=True)
class JobFailed:
    """A job that this worker did for another one has failed; its sequence has been freed."""

    name: str
    link: SenderLink
    reason: str


@dataclass(frozen=True, slots=True)
class LinkTested:
    """The first segment of a link has arrived intact."""

    link: ReceiverLink


@dataclass(frozen=True, slots=True)
class LinkLost:
    """A link has ended because of a fault."""

    link: ReceiverLink | SenderLink
    reason: str


@dataclass(frozen=True, slots=True)
class LinkClosed:
    """A link from another worker has ended, for whatever reason; its jobs get nothing more."""

    link: ReceiverLink


KvEvent = (
    JobReserved
    | JobWithdrawn
    | JobReported
    | JobSilent
    | JobActivated
    | JobRequested
    | JobFailed
    | LinkTested
    | LinkLost
    | LinkClosed
)
