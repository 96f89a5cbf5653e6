"""The receiving half of a KV endpoint: receives and checks KV blocks, activates sequences.

    Expect in a plan --> JobReserved
    Segment --> payload in staging --> unpack and check --> Ack --> all there: activate the sequence

Blocks are pinned while they are written. So if their request ends meanwhile, no other sequence gets
them too early. Unpacking runs at the same time as steps. That is safe: nothing reads a reserved
block before its sequence is activated, and unpacking waits for all steps that were launched before
the reservation and may still write to the block. Everything runs in the engine's thread, which
activates the sequence at once.
"""

from __future__ import annotations

import itertools
import logging
import math
import secrets
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import zmq

from pagewire.shared.base.errors import ProtocolError, TransferError
from pagewire.shared.base.logs import Complaints
from pagewire.shared.engine.execution.block_mover import BlockMove, PendingCheck
from pagewire.shared.engine.scheduling.step import Expect, StepPlan, Withdraw
from pagewire.shared.kv.packing import packed_bytes
from pagewire.shared.transfer.endpoint.credits import StagingSlots
from pagewire.shared.transfer.endpoint.events import (
    JobActivated,
    JobReported,
    JobReserved,
    JobSilent,
    JobWithdrawn,
    LinkClosed,
    LinkTested,
)
from pagewire.shared.transfer.endpoint.half import KvHalf
from pagewire.shared.transfer.endpoint.receiver_jobs import ReceiverJob, ReceiverJobs
from pagewire.shared.transfer.endpoint.receiver_link import ReceiverLink
from pagewire.shared.transfer.endpoint.segments import layout_between
from pagewire.shared.transfer.endpoint.sockets import TOKEN_BYTES, ReceiverSocket
from pagewire.shared.transfer.job_messages import JobRequest
from pagewire.shared.transfer.messages import (
    TEST_JOB,
    Ack,
    Open,
    Outcome,
    Return,
    Segment,
    ToSender,
)
from pagewire.shared.transfer.transports.base import Pending, poll_settled

logger = logging.getLogger(__name__)

# How long to poll after a job's last message. A prompt that waits longer may wait for a long time,
# and polling takes most of a core; later messages wake the thread up.
POLLED_S = 1.0
# Meanwhile, this often: after a pause, the same calls take several times as long.
WARM_INTERVAL_S = 0.003
_SILENT = "no message or segment for {:g} s"


@dataclass(frozen=True, slots=True)
class _Receiving:
    link: ReceiverLink
    segment: Segment
    pending: Pending


@dataclass(frozen=True, slots=True)
class _Unpacking:
    link: ReceiverLink
    segment: Segment
    job: ReceiverJob | None  # None: a test of the link
    blocks: list[int]
    check: PendingCheck


@dataclass(slots=True, kw_only=True)
class KvReceiver(KvHalf[ReceiverLink]):
    """The links from other workers, and the jobs that they do for this one.

    Attributes:
        socket: the socket of all links.
        slots: which link may use which staging slot; each such right is a credit. The endpoint's
            own sender has its share.
        jobs: of the reserved sequences, and which of their blocks have arrived.
        job_timeout_s: a job is silent if no message or segment of it has come for this long.
    """

    socket: ReceiverSocket
    job_timeout_s: float = math.inf
    slots: StagingSlots = field(init=False)
    jobs: ReceiverJobs = field(init=False)
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _receiving: list[_Receiving] = field(default_factory=list)
    _unpacking: deque[_Unpacking] = field(default_factory=deque)
    _quarantine: list[tuple[Pending, list[int]]] = field(default_factory=list)
    _next_warming_s: float = math.inf
    _complaints: Complaints = field(default_factory=lambda: Complaints(logger))

    def __post_init__(self) -> None:
        self.slots = StagingSlots(self.staging.num_slots)
        self.jobs = ReceiverJobs(self.sequences, self.layout, self.clock)
        self.watch(self.socket.fd)

    # Verbs

    def offer(
        self, peer: str, epoch: int, without: Mapping[str, str] | None = None
    ) -> ReceiverLink:
        """Open a link for a sender; the sender's `Open` will say which transport it has chosen.

        Args:
            peer: name of the sender.
            epoch: number of its run.
            without: transports that are not offered, and why.

        Raises:
            TransferError: as many links are open as fit the staging slots, or there is no transport
                to offer; says why of each.
        """
        self._end_quarantine()
        self.slots.check_room(len(self.links))
        token = secrets.token_bytes(TOKEN_BYTES)
        link = ReceiverLink(next(self._numbers), peer, epoch, token, self.layout)
        problems = {name: f"{name}: {why}" for name, why in (without or {}).items()}
        for name, transport in self.transports.items():
            if name in problems:
                continue
            try:
                link.offers[name] = transport.offer(link.number)
            except TransferError as exc:
                problems[name] = f"{name}: {exc}"
            except Exception as exc:  # whatever a library raises: the others are offered
                problems[name] = f"{name}: {exc!r}"
                text = f"{name} cannot be offered to {peer}: {exc!r}"
                self._complaints.say(f"{peer} by {name}", epoch, text)
                logger.debug("%s", text, exc_info=True)
        if not link.offers:
            reasons = "; ".join(problems.values()) or "none is open"
            raise TransferError(f"there is no transport for {peer} ({reasons})")
        self.links.append(link)
        return link

    def close(self, link: ReceiverLink) -> None:
        """End a link with all its credits, if it is open."""
        if link not in self.links:
            return
        self.links.remove(link)
        slots, messages = self.slots.close(link.number)
        self._receiving = [entry for entry in self._receiving if entry.link is not link]
        if link.inbound is None:
            for transport in self.transports.values():
                transport.withdraw(link.number)
        else:
            self._quarantine.append((link.inbound.close(), slots))
        self.send_all(messages)
        self.events.append(LinkClosed(link))

    def post(self, link: ReceiverLink, message: JobRequest) -> bool:
        """Send a message about a job; return whether the link is open afterwards."""
        self.send_all([(link.number, message)])
        return link in self.links

    def close_all(self) -> None:
        """End all links and close the socket; the engine's thread has ended."""
        KvHalf.close_all(self)
        self.unwatch(self.socket.fd)
        self.socket.close()

    def fault_counts(self) -> dict[str, int]:
        """Return the number of faults so far, by kind."""
        stats, socket = self.stats, self.socket
        counts = {"lost": stats.lost_links, "malformed": socket.num_malformed}
        return counts | {"stray": stats.strays, "denied": socket.shared.denied}

    # Between two steps

    def before_launch(self, plan: StepPlan) -> None:
        """Handle a plan's reservations: their jobs may begin while the plan is launched."""
        for work in plan.kv:
            if isinstance(work, Withdraw):
                if (job := self.jobs.remove(work.request_id)) is not None:
                    self.events.append(JobWithdrawn(job))
            elif isinstance(work, Expect):
                self.events.append(JobReserved(self.jobs.add(work, after=plan.number - 1)))

    def poll(self) -> bool:
        """Go on with what is under way; return whether `after_launch` has something to do."""
        has_unpacked = bool(self._unpacking) and self._unpacking[0].check.poll()
        if has_unpacked or self.socket.poll():
            return True
        has_arrived = any(poll_settled(entry.pending) for entry in self._receiving)
        return has_arrived or self.clock() >= self._next_warming_s

    def after_launch(self, plan: StepPlan | None) -> bool:
        """Take messages and payloads, and activate sequences; return whether more is to come."""
        for token, message, body in self.socket.receive():
            link = next((link for link in self.links if link.token == token), None)
            if link is None:
                self.stats.strays += 1  # mostly of a link that has just ended
                continue
            try:
                if isinstance(message, ProtocolError):
                    self.lose(link, str(message))
                elif isinstance(message, Segment):
                    self._receive(link, message, body)
                elif isinstance(message, Open):
                    self._on_open(link, message)
                elif isinstance(message, Return):
                    self.send_all(self.slots.accept_return(link.number, message.credit))
                elif (job := self.jobs.record_activity(message.job_id)) and job.link is link:
                    self.events.append(JobReported(link, job, message))
            except (ProtocolError, TransferError) as exc:
                self.lose(link, str(exc))
            except Exception as exc:  # whatever a device or a library raises: this link alone
                logger.exception("cannot handle a message from %s", link.peer)
                self.lose(link, str(exc))
            self._unpack_received()
        self._unpack_received()
        while self._unpacking and self._unpacking[0].check.poll():
            self._on_unpacked(self._unpacking.popleft())
        self._end_quarantine()
        # A thread that has slept activates a sequence later. Without a GPU, polling would only take
        # time from workers that compute.
        is_gpu, now = self.staging.memory.is_cuda, self.clock()
        awaits_job = is_gpu and self.jobs.any_active_since(now - POLLED_S)
        if not awaits_job or self._unpacking or self.sequences.in_flight:
            self._next_warming_s = math.inf
        elif self._next_warming_s == math.inf:
            self._next_warming_s = now + WARM_INTERVAL_S
        elif now >= self._next_warming_s:
            self._next_warming_s = now + WARM_INTERVAL_S
            self.moves.warm_launch_path()
        return bool(self._receiving or self._unpacking) or awaits_job

    def check_deadlines(self) -> None:
        """Note which jobs are silent. A payload that does not arrive is noticed by its sender."""
        latest, reason = self.clock() - self.job_timeout_s, _SILENT.format(self.job_timeout_s)
        for job in self.jobs:
            if job.link is not None and job.last_active_s < latest:
                self.events.append(JobSilent(job, reason))

    # A segment comes

    def _receive(self, link: ReceiverLink, segment: Segment, body: zmq.Frame | None) -> None:
        self.slots.fill(link.number, segment.credit, segment.use)
        size = self.staging.slot_bytes
        if segment.nbytes > size or link.inbound is None:
            raise ProtocolError(f"a segment of {segment.nbytes} bytes in a staging slot of {size}")
        self._receiving.append(_Receiving(link, segment, link.inbound.receive(segment, body)))

    def _unpack_received(self) -> None:
        """Launch the unpacking of the payloads that have arrived in their staging slots."""
        for entry in list(self._receiving):
            if entry not in self._receiving:  # its link has just ended
                continue
            try:
                if entry.pending.poll():
                    self._receiving.remove(entry)
                    self._unpack(entry.link, entry.segment)
            except TransferError as exc:
                self.lose(entry.link, str(exc))

    def _unpack(self, link: ReceiverLink, segment: Segment) -> None:
        """Launch the unpacking of a payload whose sequence still waits; a test is only checked."""
        self.stats.bytes[link.peer, link.transport] += segment.nbytes
        job = self.jobs.record_activity(segment.job)
        numbers, groups = segment.blocks, segment.groups
        is_wanted = segment.nbytes == packed_bytes(link.layout, segment.num_blocks, len(groups))
        if job is None:
            is_wanted &= segment.job == TEST_JOB and groups == self.layout.layer_groups
        else:
            is_wanted &= job.coverage.allows(numbers, groups)
        if not is_wanted:
            self._acknowledge(link, segment, "dropped")
            return
        blocks, after = [-1] * segment.num_blocks, 0
        if job is not None:
            blocks, after = job.block_ids[numbers.start : numbers.stop], job.after
        payload = self.staging.buffers[segment.credit]
        try:
            move = BlockMove(blocks, groups, payload, segment.seed, link.layout.ranks)
            unpacked = self.moves.unpack(move, after)
        except Exception:  # whatever a device raises: the sender packs the segment again
            logger.exception("cannot unpack a KV segment from %s", link.peer)
            self._acknowledge(link, segment, "corrupt")
            return
        if job is not None:
            job.coverage.add(numbers, groups)
            job.record_segment(segment.nbytes)
            job.num_unpacking += 1
            self.sequences.table.blocks.pin(blocks)
        self._unpacking.append(_Unpacking(link, segment, job, blocks, unpacked))

    def _on_unpacked(self, done: _Unpacking) -> None:
        intact = done.check.verify()
        job, segment = done.job, done.segment
        if job is not None:
            self.sequences.unpin(done.blocks)
            job.num_unpacking -= 1
            if not intact:
                logger.error("a KV segment from %s arrived corrupt", done.link.peer)
                job.coverage.remove(segment.blocks, segment.groups)
            self._activate_if_complete(job)
        elif intact and not done.link.is_tested:
            done.link.is_tested = True
            self.events.append(LinkTested(done.link))
        self._acknowledge(done.link, segment, "ok" if intact else "corrupt")

    def complete(self, job: ReceiverJob, first_token: int) -> None:
        """Set a reserved sequence's first token; activate it as soon as its blocks have arrived."""
        job.first_token = first_token
        self._activate_if_complete(job)

    def _activate_if_complete(self, job: ReceiverJob) -> None:
        if self.jobs.activate_if_complete(job):
            self.events.append(JobActivated(job))

    def _acknowledge(self, link: ReceiverLink, segment: Segment, outcome: Outcome) -> None:
        if segment.job != TEST_JOB:
            self.stats.outcomes[outcome] += 1
        if link not in self.links:
            return
        messages = self.slots.empty(link.number, segment.credit)
        self.send_all([(link.number, Ack(segment.credit, segment.use, outcome)), *messages])

    # Links

    def _on_open(self, link: ReceiverLink, message: Open) -> None:
        """Open a link's inbound half with the transport that the sender has chosen.

        Raises:
            ProtocolError: the link was opened already, this transport was not offered, or the heads
                cannot be divided so that they fit the sender's ranks.
            TransferError: the transport's reply makes no sense.
        """
        if link.inbound is not None:
            raise ProtocolError("the link was opened twice")
        if message.transport not in link.offers:
            raise ProtocolError(f"transport {message.transport!r} was not offered")
        if (layout := layout_between(self.layout, message.ranks)) is None:
            raise ProtocolError(f"{message.ranks} ranks cannot share the KV heads of these blocks")
        link.layout = layout
        link.transport = message.transport  # first: if it fails, it is not offered again
        link.inbound = self.transports[message.transport].inbound(link.number, message.reply)
        for name, other in self.transports.items():
            if name != link.transport:
                other.withdraw(link.number)
        self.send_all(self.slots.open(link.number))

    def send_all(self, messages: Sequence[tuple[int, ToSender]]) -> None:
        """Send messages to links by their numbers, and end those that cannot be reached."""
        lost: list[tuple[ReceiverLink, str]] = []
        for number, message in messages:
            link = next((link for link in self.links if link.number == number), None)
            if link is None:
                continue
            try:
                self.socket.send(link.token, message)
                link.is_granted = True  # the first message of a link is a `Grant`
            except TransferError as exc:
                lost.append((link, str(exc)))
        for link, reason in lost:  # not before: this sends messages that come after those above
            self.lose(link, reason)

    def _end_quarantine(self) -> None:
        """Release staging slots of ended links once nothing writes to them or reads them."""
        read = {entry.segment.credit for entry in self._unpacking}
        for entry in list(self._quarantine):
            pending, slots = entry
            if pending.poll() and read.isdisjoint(slots):
                self._quarantine.remove(entry)
                self.send_all(self.slots.release(slots))
