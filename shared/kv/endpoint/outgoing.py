"""The sender's staging slots: segments are packed and staged there, then written by the carrier."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from pagewire.shared.engine.execution.executor import BlockMoves
from pagewire.shared.errors import TransferError
from pagewire.shared.kv.carriers.base import has_ended
from pagewire.shared.kv.endpoint.segments import Cut
from pagewire.shared.kv.endpoint.sender_link import OutgoingSegment, SenderJob, SenderLink
from pagewire.shared.kv.layer_groups import LayerGroups
from pagewire.shared.kv.messages import Segment
from pagewire.shared.kv.staging import Staging


@dataclass(slots=True)
class Outgoing:
    """The segments in the sender's staging slots.

    Attributes:
        staging: the staging slots.
        moves: packs the engine's blocks.
        groups: layer groups of a block.
        clock: returns a time in seconds.
        may_pack: something has changed since nothing more could be packed.
        packing: segments that are being packed, in the order in which their packing ends.
        writing: segments whose payload the carrier is sending.
    """

    staging: Staging
    moves: BlockMoves
    groups: LayerGroups
    clock: Callable[[], float]
    may_pack: bool = False
    packing: deque[OutgoingSegment] = field(default_factory=deque)
    writing: list[OutgoingSegment] = field(default_factory=list)

    @property
    def is_busy(self) -> bool:
        """Whether anything is being packed or written."""
        return bool(self.packing or self.writing)

    def is_due(self) -> bool:
        """Whether some packing or sending has ended; quick."""
        oldest = [segments[0] for segments in (self.packing, self.writing) if segments]
        return any(has_ended(segment.pending) for segment in oldest)

    def has_room(self, link: SenderLink, num_links: int) -> bool:
        """Whether there is a staging slot and a credit for a link's next segment.

        The last free staging slot is kept for a link that uses none, so that a receiver that has
        stopped does not delay the others.
        """
        if not link.credits.idle or not self.staging.num_free:
            return False
        if self.staging.num_free > 1 or num_links == 1:
            return True
        return all(segment.job.link is not link for segment in (*self.packing, *self.writing))

    def launch(self, job: SenderJob, cut: Cut, blocks: list[int], plan: int) -> None:
        """Launch the packing and staging of a segment; `has_room` said that there is room.

        Args:
            job: the job.
            cut: the part of the job that it has.
            blocks: of the cut.
            plan: that makes them final.

        Raises:
            TransferError: the link is broken.
            Exception: whatever the packing raises.
        """
        slot, seed = self.staging.acquire(), secrets.randbits(64) - 2**63
        link, now = job.link, self.clock()
        try:
            packed = self.moves.pack(blocks, cut.groups, self.staging.buffers[slot], seed, plan)
            credit, use = link.credits.take()  # after the packing, which may fail
            segment = Segment(
                credit=credit,
                use=use,
                job=job.name,
                first=cut.positions.start,
                count=len(cut.positions),
                first_group=cut.groups.start,
                num_groups=len(cut.groups),
                seed=seed,
                nbytes=self.groups.packed_bytes(len(cut.positions), len(cut.groups)),
            )
            try:
                pending = link.outbound.stage(segment, slot, packed) or packed
            except RuntimeError as exc:  # of the device: a copy may be queued
                raise TransferError(f"a KV segment cannot be staged: {exc}") from exc
        except BaseException:  # whatever a device raises: the staging slot may not leak
            self.release(slot)
            raise
        self.packing.append(OutgoingSegment(job, job.queue.epoch, cut, segment, slot, pending, now))

    def free_written(self) -> list[tuple[SenderLink, TransferError]]:
        """Free the staging slots whose payloads are sent; return the links that failed, and why."""
        failed = []
        for segment in list(self.writing):
            try:
                if not segment.pending.is_done():
                    continue
            except TransferError as exc:
                failed.append((segment.job.link, exc))
            self.writing.remove(segment)
            self.release(segment.slot)
        return failed

    def release(self, slot: int) -> None:
        """Free a staging slot."""
        self.staging.release(slot)
        self.may_pack = True
