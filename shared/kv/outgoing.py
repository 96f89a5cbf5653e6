"""Segments on their way out: being packed and staged on the device, then written by the carrier."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from pagewire.shared.engine.block_mover import PendingMove
from pagewire.shared.engine.executor import BlockMoves
from pagewire.shared.errors import TransferError
from pagewire.shared.kv.carriers.base import Pending, has_ended
from pagewire.shared.kv.link_test import TEST_JOB, fill_test
from pagewire.shared.kv.messages import Segment
from pagewire.shared.kv.segments import Cut
from pagewire.shared.kv.sender_link import SenderLink
from pagewire.shared.kv.staging import Staging

TEST_CUT = Cut(range(0), range(0))  # no blocks: a test of the link


@dataclass(frozen=True, slots=True)
class Packing:
    """A segment that is being packed, or staged.

    Attributes:
        job: its name; that of a link's test.
        life: of the job's blocks when it was launched.
        since: when it was launched.
    """

    link: SenderLink
    job: str
    life: int
    cut: Cut
    segment: Segment
    slot: int
    pending: Pending
    since: float


@dataclass(slots=True)
class Outgoing:
    """The sender's staging slots, and what is in them.

    Attributes:
        moves: of the engine's blocks.
        staging: slots to pack into.
        clock: in seconds.
        has_freed: a slot has come free since this was last set to False.
    """

    moves: BlockMoves
    staging: Staging
    clock: Callable[[], float]
    has_freed: bool = False
    _packing: deque[Packing] = field(default_factory=deque)
    _writing: list[tuple[SenderLink, Pending, int]] = field(default_factory=list)

    @property
    def is_busy(self) -> bool:
        """Whether anything is being packed or written."""
        return bool(self._packing or self._writing)

    def is_due(self) -> bool:
        """Whether something has ended; quickly told."""
        if self._packing and has_ended(self._packing[0].pending):
            return True
        return bool(self._writing) and has_ended(self._writing[0][1])

    def has_room(self, link: SenderLink, num_links: int) -> bool:
        """Whether there is a slot and a credit for a link's next segment.

        A receiver that has stopped must not hold up the others: the last slot is for a link that
        has none.
        """
        if not link.credits.idle or not self.staging.num_free:
            return False
        if self.staging.num_free > 1 or num_links == 1:
            return True
        is_packing = any(packing.link is link for packing in self._packing)
        return not (is_packing or any(writing[0] is link for writing in self._writing))

    def launch(
        self,
        link: SenderLink,
        job: str,
        life: int,
        cut: Cut,
        nbytes: int,
        blocks: list[int],
        plan: int,
    ) -> None:
        """Launch the packing and staging of a segment; `has_room` said that there is room.

        Args:
            link: that it leaves by.
            job: its name, or `TEST_JOB`.
            life: of the job's blocks.
            cut: what it has of the job.
            nbytes: of its payload.
            blocks: of the pool.
            plan: that makes them final.

        Raises:
            TransferError: the link is broken.
            Exception: whatever the packing raises.
        """
        slot, taken = self.staging.try_acquire(), link.credits.take()
        if slot is None or taken is None:
            raise TransferError("there is no free slot or credit")
        segment = _new_segment(*taken, job, cut, nbytes)
        buffer = self.staging.buffers[slot]
        try:
            packed: PendingMove
            if job == TEST_JOB:
                packed = fill_test(self.moves, buffer, segment)
            else:
                packed = self.moves.pack(blocks, cut.parts, buffer, segment.seed, plan)
            staged = link.outbound.stage(slot, segment.credit, nbytes, packed)
        except BaseException:
            self.release(slot)
            link.put_back(segment.credit)
            raise
        pending = packed if staged is None else staged
        self._packing.append(Packing(link, job, life, cut, segment, slot, pending, self.clock()))

    def take_packed(self) -> tuple[Packing, TransferError | None] | None:
        """Return what was packed first, and what went wrong; None if it has not ended."""
        if not self._packing:
            return None
        error = None
        try:
            if not self._packing[0].pending.is_done():
                return None
        except TransferError as exc:
            error = exc
        return self._packing.popleft(), error

    def send(self, packing: Packing) -> None:
        """Announce a segment, and begin to write what has not crossed.

        Raises:
            TransferError: the link is broken; the slot is free.
        """
        try:
            write = packing.link.outbound.send(packing.segment, packing.slot)
        except TransferError:
            self.release(packing.slot)
            raise
        self._writing.append((packing.link, write, packing.slot))

    def free_written(self) -> list[tuple[SenderLink, TransferError]]:
        """Free the slots whose payloads have left; returns the links that have failed, and why."""
        failed = []
        for writing in list(self._writing):
            link, pending, slot = writing
            try:
                if pending.is_done():
                    self._writing.remove(writing)
                    self.release(slot)
            except TransferError as exc:
                failed.append((link, exc))
        return failed

    def drop_writes(self, link: SenderLink) -> None:
        """Free the slots from which an ended link was writing."""
        for writing in [writing for writing in self._writing if writing[0] is link]:
            self._writing.remove(writing)
            self.release(writing[2])

    def release(self, slot: int) -> None:
        """Free a slot."""
        self.staging.release(slot)
        self.has_freed = True


def _new_segment(credit: int, use: int, job: str, cut: Cut, nbytes: int) -> Segment:
    return Segment(
        credit=credit,
        use=use,
        job=job,
        first=cut.positions.start,
        count=len(cut.positions),
        first_part=cut.parts.start,
        num_parts=len(cut.parts),
        seed=secrets.randbits(64) - 2**63,
        nbytes=nbytes,
    )
