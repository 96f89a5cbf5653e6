"""The sending half of a KV endpoint: packs the blocks of this worker's jobs and sends them.

    Export in a plan --> range --> staging slot, credit --> pack --> Segment, payload --> Ack

A job owns its sequence's blocks until all are acknowledged and the first token is sampled, the job
is cancelled, or its link ends.
Packing is queued on the device after the plan that makes the blocks final, alongside later plans.
Everything runs in the engine's thread, which wakes up for the links' file descriptors. So segments
never pass from one thread to another.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from pagewire.shared.base.errors import ProtocolError, TransferError
from pagewire.shared.control.protocol import KvHello
from pagewire.shared.engine.scheduling.step import Export, StepPlan, Withdraw
from pagewire.shared.kv.packing import max_blocks, packed_bytes
from pagewire.shared.transfer.endpoint.credits import StagingSlots
from pagewire.shared.transfer.endpoint.events import JobFailed, JobRequested
from pagewire.shared.transfer.endpoint.half import KvHalf
from pagewire.shared.transfer.endpoint.outgoing import Notify, Outgoing
from pagewire.shared.transfer.endpoint.segments import ExportQueue, SegmentRange, layout_between
from pagewire.shared.transfer.endpoint.sender_link import (
    SenderJob,
    SenderLink,
    choose_transport,
)
from pagewire.shared.transfer.endpoint.sockets import KvSockets, SenderSocket
from pagewire.shared.transfer.job_messages import JobReport
from pagewire.shared.transfer.messages import TEST_JOB, Ack, Grant, Open, Reclaim

logger = logging.getLogger(__name__)

MAX_SENDS = 3  # of one segment
MAX_TEST_BYTES = 64 << 20  # enough to measure a link's speed
# A prompt's last blocks are sent by layer group while the step still runs, if they have more bytes
# than this. Fewer bytes are sent more quickly than the additional segments are handled.
DIVIDED_BYTES = 64 << 20


@dataclass(slots=True, kw_only=True)
class KvSender(KvHalf[SenderLink]):
    """The jobs of other workers, and the links to these workers.

    Attributes:
        slots: the staging slots of the whole endpoint; the sender has its share of them.
        notify: sends messages about staging slots that the sender no longer needs.
        sockets: makes the sockets of links.
        timeout_s: a link is lost if its oldest segment is not acknowledged for this long.
        divided_bytes: if a prompt's last step makes more bytes final, they are sent by layer group.
    """

    slots: StagingSlots
    notify: Notify
    sockets: KvSockets
    timeout_s: float
    divided_bytes: int = DIVIDED_BYTES
    _jobs: dict[str, SenderJob] = field(default_factory=dict)
    _outgoing: Outgoing = field(init=False)

    def __post_init__(self) -> None:
        self._outgoing = Outgoing(self.staging, self.slots, self.notify, self.moves, self.clock)

    # Verbs

    def connect(self, hello: KvHello) -> SenderLink:
        """Open a link to a receiver; it is tested as soon as the receiver grants credits.

        Args:
            hello: the receiver's offer; its endpoint has a numeric address.

        Raises:
            TransferError: a block does not fit into the staging slots of both sides, or no
                transport works between them; says why each does not.
        """
        if (layout := layout_between(self.layout, hello.layout.ranks)) is None:
            problem = f"the KV heads cannot be divided for {hello.layout.ranks} ranks"
            raise TransferError(f"{problem} of {hello.worker_id}")
        slot_bytes = min(self.staging.slot_bytes, hello.slot_bytes)
        # Of several ranks' parts, each is aligned, so that a block may take more than at home.
        if slot_bytes < (smallest := packed_bytes(layout, 1)):
            side = hello.worker_id if slot_bytes == hello.slot_bytes else "the prefill worker"
            raise TransferError(
                f"a staging slot of {side} has {slot_bytes} bytes, and a block between the two "
                f"workers takes {smallest}: raise PAGEWIRE_STAGING_SLOT_BYTES there"
            )
        socket = SenderSocket(self.sockets, hello.endpoint, hello.token, hello.worker_id)
        try:
            name, outbound = choose_transport(hello, self.transports, socket)
        except BaseException:  # whatever a transport raises
            socket.close()
            raise
        link = SenderLink(hello.worker_id, name, slot_bytes, layout, socket, outbound)
        link.test = SenderJob(TEST_JOB, link, ExportQueue(layout, slot_bytes, 0), 0)
        count = max(1, max_blocks(layout, min(slot_bytes, MAX_TEST_BYTES)))
        link.test.queue.add([0] * count, 0, by_layer_group=False)  # any block, many times
        self.links.append(link)
        self.watch(socket.fd)
        self.notify(self.slots.start_sending())
        if not self.post(link, Open(name, outbound.reply, self.layout.ranks)):
            raise TransferError("the receiver cannot be reached")
        return link

    def close(self, link: SenderLink) -> None:
        """End a link and drop its jobs, if it is open."""
        if link not in self.links:
            return
        self.links.remove(link)
        self.unwatch(link.socket.fd)
        link.socket.close()
        link.outbound.close()
        self.stats.outcomes["lost"] += len(link.sent)
        link.test.is_over = True
        for job in [job for job in self._jobs.values() if job.link is link]:
            self._fail(job, "the KV link is gone")
        if not self.links:
            self.notify(self.slots.stop_sending())

    def export(self, job: str, link: SenderLink, first_block: int, num_blocks: int) -> None:
        """Send a job's blocks from `first_block` on, as plans make them final.

        Args:
            job: name of the job, of its sequence in the engine, and in segments.
            link: the link to the worker that expects the blocks.
            first_block: position of the first block that is wanted.
            num_blocks: number of the job's blocks, including unwanted ones.

        Raises:
            TransferError: the link has ended.
        """
        if link not in self.links:
            raise TransferError("the KV link is gone")
        block_groups = max(0, num_blocks - first_block) * len(self.layout.layer_groups)
        queue = ExportQueue(link.layout, link.slot_bytes, first_block)
        self._jobs[job] = SenderJob(job, link, queue, block_groups)

    def post(self, link: SenderLink, message: JobReport | Open) -> bool:
        """Send a message; return whether the link is open afterwards."""
        if link in self.links:
            try:
                link.socket.post(message)
            except TransferError as exc:
                self.lose(link, str(exc))
        return link in self.links

    def cancel(self, job: str, link: SenderLink) -> None:
        """End a job of a link and free its blocks; ignore unknown jobs."""
        known = self._jobs.get(job)
        if known is not None and known.link is link:
            self._end(known)

    @property
    def num_jobs(self) -> int:
        """Jobs that have not ended; from any thread."""
        return len(self._jobs)

    # Between two steps

    def before_launch(self, plan: StepPlan) -> None:
        """Forget blocks that sequences have lost; have the plan wait until they are packed."""
        lost = {work.request_id for work in plan.kv if isinstance(work, Withdraw)}
        for name in lost & self._jobs.keys():
            self._jobs[name].queue.lose_blocks()
        if any(segment.job.name in lost for segment in self._outgoing.sending):
            self.moves.fence()

    def poll(self) -> bool:
        """Go on with what is under way; return whether `after_launch` has something to do."""
        return self._outgoing.poll() or any(link.socket.poll() for link in self.links)

    def _queue_exports(self, plan: StepPlan) -> None:
        """Queue the blocks that a plan exports."""
        for work in plan.kv:
            job = self._jobs.get(work.request_id)
            if job is not None and isinstance(work, Export):
                self._outgoing.may_pack = True
                num_blocks = job.queue.num_new(work.block_ids)
                num_bytes = num_blocks * self.layout.block_bytes * self.layout.ranks
                is_large = work.is_last and num_bytes > self.divided_bytes
                by_layer_group = is_large and self.moves.has_group_events(plan.number)
                job.queue.add(work.block_ids, plan.number, by_layer_group=by_layer_group)

    def after_launch(self, plan: StepPlan | None) -> bool:
        """Send what plans export, and take the receivers' answers; return whether it sends."""
        if plan is not None:
            self._queue_exports(plan)
        self._outgoing.advance(self.lose)
        for link in list(self.links):
            try:
                self._take_answers(link)
            except (ProtocolError, TransferError) as exc:
                self.lose(link, str(exc))
        self._end_complete()
        if self._outgoing.may_pack or self.slots.has_more:
            self._outgoing.may_pack = self.slots.has_more = False
            self._pack_all()
        return bool(self._outgoing.sending)

    def _pack_all(self) -> None:
        """Launch as many link tests and segments as there is room for."""
        for job in [*(link.test for link in self.links), *self._jobs.values()]:
            while self._pack(job):
                # What is packed must not wait until everything is launched.
                self._outgoing.advance(self.lose)

    def check_deadlines(self) -> None:
        """End links whose receivers are silent."""
        latest = self.clock() - self.timeout_s
        for link in list(self.links):
            if any(s.is_packed and max(s.since, link.acked_s) < latest for s in link.sent.values()):
                self.lose(link, f"a KV segment was not acknowledged in {self.timeout_s:g} s")

    # A segment leaves

    def _pack(self, job: SenderJob) -> bool:
        """Launch the packing of a job's next segment; return whether there was one, and room."""
        may_pack = not job.is_over and self._outgoing.has_room(job.link, len(self.links))
        ready = job.queue.pop() if may_pack else None
        if ready is None:
            return False
        try:
            sent = self._outgoing.launch(job, *ready)
        except TransferError as exc:
            self.lose(job.link, str(exc))
        except Exception as exc:  # whatever a device raises: this job's blocks alone
            logger.exception("cannot pack the KV blocks of job %s", job.name)
            self._fail(job, f"its blocks cannot be packed: {exc}")
        else:
            job.link.sent[sent.segment.credit] = sent
        return True

    # The receiver answers

    def _take_answers(self, link: SenderLink) -> None:
        """Handle the messages that a link's receiver has sent.

        Raises:
            ProtocolError: one makes no sense.
            TransferError: the link is broken.
        """
        for message in link.socket.receive():
            if isinstance(message, Grant):
                link.credits.grant(message.credits)
                self._outgoing.may_pack = True
            elif isinstance(message, Ack):
                self._on_ack(link, message)
            elif isinstance(message, Reclaim):
                if (answer := link.credits.reclaim(message.credit)) is not None:
                    link.socket.post(answer)
            else:
                self.events.append(JobRequested(link, message))

    def _on_ack(self, link: SenderLink, ack: Ack) -> None:
        is_oldest = next(iter(link.sent), None) == ack.credit
        sent = link.sent.pop(ack.credit, None)
        if sent is None:
            raise ProtocolError(f"credit {ack.credit} was acknowledged and nothing was sent")
        link.credits.acknowledge(ack.credit, ack.use)
        if is_oldest:  # one that never arrives is noticed, whatever overtakes it
            link.acked_s = self.clock()
        self.stats.bytes[link.peer, link.transport] += sent.segment.nbytes
        self._outgoing.may_pack = True
        if ack.outcome == "ok":
            link.speed.observe(sent.segment.nbytes, sent.since, self.clock())
        if sent.job is link.test:
            if ack.outcome != "ok":
                raise TransferError(f"{link.transport} does not bring what is sent")
            return
        self.stats.outcomes[ack.outcome] += 1
        if sent.job.is_over:
            return
        if ack.outcome == "corrupt":
            self._resend(sent.job, sent.segment_range)
        else:
            sent.job.unacknowledged -= sent.segment_range.num_block_groups

    def _resend(self, job: SenderJob, segment_range: SegmentRange) -> None:
        job.resends[segment_range] += 1
        if job.resends[segment_range] >= MAX_SENDS:
            self._fail(job, f"a KV segment arrived corrupt {MAX_SENDS} times")
            return
        logger.warning("job %s: a KV segment arrived corrupt; sending it again", job.name)
        self.stats.resends += 1
        job.queue.requeue(segment_range)

    # Ends

    def _end_complete(self) -> None:
        """Free the sequences whose prompts are computed and whose blocks are acknowledged."""
        for job in [job for job in self._jobs.values() if job.unacknowledged <= 0]:
            if self.sequences.get(job.name) is None:
                self._end(job)

    def _fail(self, job: SenderJob, reason: str) -> None:
        if job is job.link.test:
            self.lose(job.link, f"it cannot be tested: {reason}")
        elif not job.is_over:
            self._end(job)
            self.events.append(JobFailed(job.name, job.link, reason))

    def _end(self, job: SenderJob) -> None:
        job.is_over = True
        self._jobs.pop(job.name, None)
        self.sequences.abort(job.name)
