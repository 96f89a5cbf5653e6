"""Cuts a prompt's blocks into segments, and decides when each may be packed. No I/O."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from pagewire.shared.kv.layer_groups import LayerGroups


@dataclass(frozen=True, slots=True)
class Cut:
    """A segment's share of a prompt; never empty.

    Attributes:
        positions: of its blocks in the sequence.
        groups: layer groups of each block.
    """

    positions: range
    groups: range

    @property
    def num_units(self) -> int:
        """Layer groups of blocks that it has."""
        return len(self.positions) * len(self.groups)


@dataclass(slots=True)
class ExportQueue:
    """What of one job is still to be packed, in order.

    Whole blocks leave in the order of the prompt. Blocks that leave by layer group do so one group
    of all of them after the other (`LayerGroups.halvings`), as a step finishes them. A sequence
    that loses its blocks keeps its place here: what has left needs not leave again.

    Attributes:
        groups: of a block.
        slot_bytes: of a staging slot; a segment fits them, and a block does.
        planned: blocks before this position have been cut, or are not wanted.
    """

    groups: LayerGroups
    slot_bytes: int
    planned: int
    _cuts: deque[Cut] = field(default_factory=deque)
    _blocks: list[int] = field(default_factory=list)  # that were exported, by position
    _plans: list[tuple[int, int]] = field(default_factory=list)  # (blocks, plan that ends them)

    def add(self, block_ids: list[int], plan: int, *, by_layer_group: bool) -> None:
        """Note blocks that a plan makes final.

        Args:
            block_ids: they follow those exported before.
            plan: its number.
            by_layer_group: they leave by layer group.
        """
        self._blocks += block_ids
        final = len(self._blocks)
        self._plans.append((final, plan))
        groups = self.groups.halvings() if by_layer_group else [self.groups.whole]
        for group in groups:
            most = self.groups.max_blocks(self.slot_bytes, len(group))
            for first in range(self.planned, final, most):
                self._cuts.append(Cut(range(first, min(first + most, final)), group))
        self.planned = max(self.planned, final)

    def lose_blocks(self) -> None:
        """The blocks belong to others now; they will be exported again from the first on."""
        self._blocks.clear()
        self._plans.clear()

    def num_new(self, block_ids: list[int]) -> int:
        """Return how many of further blocks have not been cut yet."""
        return max(0, len(self._blocks) + len(block_ids) - self.planned)

    def take(self) -> tuple[Cut, list[int], int] | None:
        """Remove what is to be packed next; returns it, its blocks, the plan that ends them.

        None if nothing is left, or the blocks of the first cut are not exported.
        """
        if not self._cuts or self._cuts[0].positions.stop > len(self._blocks):
            return None
        cut = self._cuts.popleft()
        plan = next(plan for final, plan in self._plans if final >= cut.positions.stop)
        return cut, self._blocks[cut.positions.start : cut.positions.stop], plan

    def again(self, cut: Cut) -> None:
        """Have something packed once more, before all else."""
        self._cuts.appendleft(cut)


@dataclass(slots=True)
class Coverage:
    """Which layer groups of which expected blocks have arrived.

    Attributes:
        positions: of the blocks that are expected.
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
        """Note what has arrived; `allows` said that none of it had."""
        for group in groups:
            self._arrived[group] |= _bits(positions)

    def remove(self, positions: range, groups: range) -> None:
        """Note that something that was added has not arrived after all."""
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
