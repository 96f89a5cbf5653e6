"""Cuts a prompt's blocks into segments, and decides when each may be packed. No I/O."""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass, field

from pagewire.shared.kv.kv_layout import KvLayout
from pagewire.shared.kv.packing import max_blocks


def layout_between(own: KvLayout, peer_ranks: int) -> KvLayout | None:
    """Return the layout of segments between two workers; None if heads cannot be divided so.

    Args:
        own: of this worker's blocks.
        peer_ranks: number of the other worker's ranks.
    """
    return own.divided(math.lcm(own.ranks, peer_ranks))


@dataclass(frozen=True, slots=True)
class Cut:
    """The part of a prompt's blocks that one segment has; never empty.

    Attributes:
        positions: positions of its blocks in the sequence.
        groups: layer groups of each block.
    """

    positions: range
    groups: range

    @property
    def num_units(self) -> int:
        """Number of blocks times the number of layer groups of each."""
        return len(self.positions) * len(self.groups)


@dataclass(slots=True)
class ExportQueue:
    """The blocks of one job that are still to be packed, in order.

    Whole blocks are packed in the order of the prompt. Blocks that are sent by layer group are
    packed in the order in which a step finishes the groups: first the earlier layer groups of all
    blocks (`KvLayout.send_ranges`). If a sequence loses its blocks, its position here stays:
    blocks that have been sent need not be sent again.

    Attributes:
        layout: of the blocks.
        slot_bytes: size of a staging slot, into which each segment and each block fits.
        planned: blocks before this position have been cut, or are not wanted.
    """

    layout: KvLayout
    slot_bytes: int
    planned: int
    _cuts: deque[Cut] = field(default_factory=deque)
    _blocks: list[int] = field(default_factory=list)  # that were exported, by position
    _plans: list[tuple[int, int]] = field(default_factory=list)  # (blocks, plan that ends them)

    def add(self, block_ids: list[int], plan: int, *, by_layer_group: bool) -> None:
        """Add blocks that a plan makes final.

        Args:
            block_ids: the blocks after those that were exported before.
            plan: the plan's number.
            by_layer_group: send them by layer group.
        """
        self._blocks += block_ids
        final = len(self._blocks)
        self._plans.append((final, plan))
        groups = self.layout.send_ranges() if by_layer_group else [self.layout.layer_groups]
        for group in groups:
            most = max_blocks(self.layout, self.slot_bytes, len(group))
            parts = _divide(range(self.planned, final), most)
            self._cuts += [Cut(part, group) for part in parts]
        self.planned = max(self.planned, final)

    def lose_blocks(self) -> None:
        """Forget blocks that the sequence lost; they will be exported again from the first."""
        self._blocks.clear()
        self._plans.clear()

    def num_new(self, block_ids: list[int]) -> int:
        """Return how many of the next blocks have not been cut yet."""
        return max(0, len(self._blocks) + len(block_ids) - self.planned)

    def take(self) -> tuple[Cut, list[int], int] | None:
        """Remove the next cut; return it, its blocks, and the plan that makes them final.

        Return None if nothing is left, or the blocks of the first cut are not exported yet.
        """
        if not self._cuts or self._cuts[0].positions.stop > len(self._blocks):
            return None
        cut = self._cuts.popleft()
        plan = next(plan for final, plan in self._plans if final >= cut.positions.stop)
        return cut, self._blocks[cut.positions.start : cut.positions.stop], plan

    def requeue(self, cut: Cut) -> None:
        """Put a cut back at the front, to be packed again."""
        self._cuts.appendleft(cut)


def _divide(positions: range, most: int) -> list[range]:
    """Divide blocks into parts of at most `most`; of several, the last one has a quarter of that.

    Each part is unpacked while the next one crosses: crossing takes four times as long. Nothing
    hides the unpacking of the last one.
    """
    num_last = most // 4 if len(positions) > most else 0
    end = len(positions) - num_last
    parts = [positions[first : min(first + most, end)] for first in range(0, end, most)]
    return [*parts, positions[end:]] if num_last else parts


@dataclass(slots=True)
class Coverage:
    """Which layer groups of which expected blocks have arrived.

    Attributes:
        positions: positions of the blocks that are expected.
        groups: layer groups of each.
    """

    positions: range
    groups: range
    _arrived: Counter[int] = field(default_factory=Counter)  # layer group -> a bit a position

    def allows(self, positions: range, groups: range) -> bool:
        """Whether a segment lies within what is expected, and nothing of it has arrived."""
        inside = _is_part(positions, self.positions) and _is_part(groups, self.groups)
        return inside and not any(self._arrived[group] & _bits(positions) for group in groups)

    def add(self, positions: range, groups: range) -> None:
        """Add blocks that have arrived; `allows` must have returned true for them."""
        for group in groups:
            self._arrived[group] |= _bits(positions)

    def remove(self, positions: range, groups: range) -> None:
        """Remove blocks that were added, but arrived corrupt."""
        for group in groups:
            self._arrived[group] &= ~_bits(positions)

    def is_full(self) -> bool:
        """Whether everything has arrived."""
        return all(self._arrived[group] == _bits(self.positions) for group in self.groups)


def _is_part(part: range, whole: range) -> bool:
    """Whether a range lies within another one and is not empty."""
    return whole.start <= part.start < part.stop <= whole.stop


def _bits(positions: range) -> int:
    return ((1 << len(positions)) - 1) << positions.start if positions else 0
