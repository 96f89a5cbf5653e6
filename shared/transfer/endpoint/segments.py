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
class SegmentRange:
    """The part of a prompt's blocks that one segment has; never empty.

    Attributes:
        blocks: numbers of its blocks in the job.
        groups: layer groups of each block.
    """

    blocks: range
    groups: range

    @property
    def num_block_groups(self) -> int:
        """Number of blocks times the number of layer groups of each."""
        return len(self.blocks) * len(self.groups)


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
        planned: blocks before this one are in a range, or are not wanted.
    """

    layout: KvLayout
    slot_bytes: int
    planned: int
    _ranges: deque[SegmentRange] = field(default_factory=deque)
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
            ranges = _divide(range(self.planned, final), most)
            self._ranges += [SegmentRange(part, group) for part in ranges]
        self.planned = max(self.planned, final)

    def lose_blocks(self) -> None:
        """Forget blocks that the sequence lost; they will be exported again from the first."""
        self._blocks.clear()
        self._plans.clear()

    def num_new(self, block_ids: list[int]) -> int:
        """Return how many of the next blocks are in no range yet."""
        return max(0, len(self._blocks) + len(block_ids) - self.planned)

    def pop(self) -> tuple[SegmentRange, list[int], int] | None:
        """Remove the next range; return it, its blocks, and the plan that makes them final.

        Return None if nothing is left, or the blocks of the first range are not exported yet.
        """
        if not self._ranges or self._ranges[0].blocks.stop > len(self._blocks):
            return None
        segment_range = self._ranges.popleft()
        start, stop = segment_range.blocks.start, segment_range.blocks.stop
        plan = next(plan for final, plan in self._plans if final >= stop)
        return segment_range, self._blocks[start:stop], plan

    def requeue(self, segment_range: SegmentRange) -> None:
        """Put a range back at the front, to be packed again."""
        self._ranges.appendleft(segment_range)


def _divide(blocks: range, most: int) -> list[range]:
    """Divide blocks into ranges of at most `most`; of several, the last one has a quarter of that.

    Each range is unpacked while the next one crosses: crossing takes four times as long. Nothing
    hides the unpacking of the last one.
    """
    num_last = most // 4 if len(blocks) > most else 0
    end = len(blocks) - num_last
    ranges = [blocks[first : min(first + most, end)] for first in range(0, end, most)]
    return [*ranges, blocks[end:]] if num_last else ranges


@dataclass(slots=True)
class Coverage:
    """Which layer groups of which expected blocks have arrived.

    Attributes:
        blocks: numbers of the blocks that are expected.
        groups: layer groups of each.
    """

    blocks: range
    groups: range
    _arrived: Counter[int] = field(default_factory=Counter)  # layer group -> a bit a position

    def allows(self, blocks: range, groups: range) -> bool:
        """Whether a segment lies within what is expected, and nothing of it has arrived."""
        inside = _is_part(blocks, self.blocks) and _is_part(groups, self.groups)
        return inside and not any(self._arrived[group] & _bits(blocks) for group in groups)

    def add(self, blocks: range, groups: range) -> None:
        """Add blocks that have arrived; `allows` must have returned true for them."""
        for group in groups:
            self._arrived[group] |= _bits(blocks)

    def remove(self, blocks: range, groups: range) -> None:
        """Remove blocks that were added, but arrived corrupt."""
        for group in groups:
            self._arrived[group] &= ~_bits(blocks)

    def is_full(self) -> bool:
        """Whether all layer groups of all expected blocks have arrived."""
        return all(self._arrived[group] == _bits(self.blocks) for group in self.groups)


def _is_part(part: range, whole: range) -> bool:
    """Whether a range lies within another one and is not empty."""
    return whole.start <= part.start < part.stop <= whole.stop


def _bits(blocks: range) -> int:
    return ((1 << len(blocks)) - 1) << blocks.start if blocks else 0
