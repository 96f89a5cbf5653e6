"""The sender's staging slots: segments are packed there, and sent by the transport."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pagewire.shared.base.errors import TransferError
from pagewire.shared.engine.execution.block_mover import BlockMove, PendingMove
from pagewire.shared.engine.execution.executor import BlockMoves
from pagewire.shared.kv.packing import packed_bytes
from pagewire.shared.transfer.endpoint.credits import StagingSlots
from pagewire.shared.transfer.endpoint.segments import SegmentRange
from pagewire.shared.transfer.endpoint.sender_link import OutgoingSegment, SenderJob, SenderLink
from pagewire.shared.transfer.messages import Grant, Reclaim, Segment
from pagewire.shared.transfer.staging import Staging
from pagewire.shared.transfer.transports.base import Pending, Then, poll_settled

Notify = Callable[[Sequence[tuple[int, Grant | Reclaim]]], None]  # by the links' numbers


@dataclass(slots=True)
class Outgoing:
    """The segments in the sender's staging slots.

    Attributes:
        staging: the memory of the staging slots.
        slots: which of them the sender may use.
        notify: sends messages about staging slots that the sender no longer needs.
        moves: packs the engine's blocks.
        clock: returns a time in seconds.
        may_pack: something has changed since nothing more could be packed.
        sending: segments that are being packed or sent, in the order of their launch.
    """

    staging: Staging
    slots: StagingSlots
    notify: Notify
    moves: BlockMoves
    clock: Callable[[], float]
    may_pack: bool = False
    sending: list[OutgoingSegment] = field(default_factory=list)

    def poll(self) -> bool:
        """Send what is packed; return whether something has been sent or has failed; quick."""
        return any(poll_settled(segment.pending) for segment in self.sending)

    def has_room(self, link: SenderLink, num_links: int) -> bool:
        """Whether there is a staging slot and a credit for a link's next segment.

        The last free staging slot is kept for a link that uses none, so that a receiver that has
        stopped does not delay the others.
        """
        if not link.credits.idle or not self.slots.num_idle:
            return False
        if self.slots.num_idle > 1 or num_links == 1:
            return True
        return all(segment.job.link is not link for segment in self.sending)

    def launch(
        self, job: SenderJob, segment_range: SegmentRange, blocks: list[int], plan: int
    ) -> OutgoingSegment:
        """Launch the packing and sending of a segment; `has_room` said that there is room.

        Args:
            job: the job.
            segment_range: the part of the job that it has.
            blocks: of this range.
            plan: that makes them final.

        Raises:
            TransferError: the link is broken.
            Exception: whatever the packing raises.
        """
        slot, seed = self.slots.acquire(), secrets.randbits(64) - 2**63
        link, now = job.link, self.clock()
        try:
            buffer, parts = self.staging.buffers[slot], link.layout.ranks
            numbers, groups = segment_range.blocks, segment_range.groups
            packed = self.moves.pack(BlockMove(blocks, groups, buffer, seed, parts), plan)
            credit, use = link.credits.acquire()  # after the packing, which may fail
            segment = Segment(
                credit=credit,
                use=use,
                job=job.name,
                first_block=numbers.start,
                num_blocks=len(numbers),
                first_group=groups.start,
                num_groups=len(groups),
                seed=seed,
                nbytes=packed_bytes(link.layout, len(numbers), len(groups)),
            )
            try:
                pending = _send(link, segment, slot, packed)
            except Exception as exc:  # of the device or a library: a copy may be queued
                raise TransferError(f"a KV segment cannot be sent: {exc}") from exc
        except BaseException:  # whatever a device raises: the staging slot may not leak
            self.release(slot)
            raise
        self.sending.append(
            OutgoingSegment(job, segment_range, segment, slot, packed, pending, now)
        )
        return self.sending[-1]

    def advance(self, on_failed: Callable[[SenderLink, str], None]) -> None:
        """Send what is packed, and free staging slots.

        Args:
            on_failed: called with a link whose transport has failed, and why.
        """
        for segment in list(self.sending):
            try:
                is_over = segment.pending.poll()
            except TransferError as exc:
                is_over = True
                on_failed(segment.job.link, str(exc))
            if not segment.is_packed and (is_over or segment.packed.poll()):
                segment.is_packed, segment.since = True, self.clock()
            if is_over:
                self.sending.remove(segment)
                self.release(segment.slot)

    def release(self, slot: int) -> None:
        """Give a staging slot back, so that the next segment may use it."""
        self.notify(self.slots.give_back(slot))


def _send(link: SenderLink, segment: Segment, slot: int, packed: PendingMove) -> Pending:
    """Have a transport send a segment: at once, or when several devices have packed their parts."""
    if packed.is_of_one_device:
        return link.outbound.send(segment, slot, packed)
    return Then(packed, lambda: link.outbound.send(segment, slot, PendingMove(None)))
