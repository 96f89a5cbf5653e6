"""Which parts of which blocks of a prompt leave together, and in what order."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from pagewire.shared.kv_cache.parts import BlockParts
from pagewire.shared.transfer.pieces import next_piece_size

# Of a piece that has parts of blocks: so many more of them than of whole ones fit a slot that the
# header which names them could get too long to leave by credit, without waiting for a grant.
MOST_DIVIDED_BLOCKS = 256


@dataclass(frozen=True, slots=True)
class Span:
    """Blocks that follow each other, and parts of each of them; never empty.

    Attributes:
        positions: of the blocks in the sequence.
        parts: the same of every block.
    """

    positions: range
    parts: range

    @property
    def num_units(self) -> int:
        """Parts of blocks that it has."""
        return len(self.positions) * len(self.parts)


@dataclass(slots=True)
class SpanQueue:
    """What of a prompt is to be packed, in order.

    Whole blocks leave in the order of the prompt. Blocks that leave by parts do so layers first:
    one group of parts (`BlockParts.halvings`) of all of them, then the next. That is the order in
    which a step finishes them.

    Attributes:
        parts: of a block.
        slot_bytes: a piece has to fit them.
        planned: the blocks before this position were put into the queue.
    """

    parts: BlockParts
    slot_bytes: int
    planned: int
    _spans: deque[Span] = field(default_factory=deque)

    def add(self, end: int, *, by_part: bool) -> None:
        """Put the blocks up to a position into the queue."""
        positions = range(self.planned, end)
        self.planned = end
        if by_part:
            self._spans.extend(Span(positions, group) for group in self.parts.halvings())
            return
        if self._spans and self._spans[-1].parts == self.parts.whole:
            # As one span, it is cut into pieces as if it had been added at once.
            positions = range(self._spans.pop().positions.start, end)
        self._spans.append(Span(positions, self.parts.whole))

    def next(self, final: int, *, is_first: bool) -> Span | None:
        """Return what the next piece takes; None if nothing is ready.

        Args:
            final: blocks before this position can be packed.
            is_first: see `next_piece_size`.
        """
        if not self._spans or self._spans[0].positions.start >= final:
            return None
        positions, parts = self._spans[0].positions, self._spans[0].parts
        ready = min(final, positions.stop) - positions.start
        most = self.parts.max_blocks(self.slot_bytes, len(parts))
        if parts == self.parts.whole:
            count = next_piece_size(ready, most, is_first=is_first)
        else:
            count = min(ready, most, MOST_DIVIDED_BLOCKS)
        return Span(positions[:count], parts)

    def take(self, span: Span) -> None:
        """Remove what `next` returned."""
        front = self._spans.popleft()
        rest = front.positions[len(span.positions) :]
        if rest:
            self._spans.appendleft(Span(rest, front.parts))
