"""The blocks of one sequence in one cache group, by position."""

from __future__ import annotations

from dataclasses import dataclass, field

NO_BLOCK = -1


@dataclass(slots=True)
class BlockTable:
    """A sequence's blocks in one group.

    Attributes:
        block_ids: by position; `NO_BLOCK` at those before `first`.
        first: earlier positions have no block: no later token reads them.
    """

    block_ids: list[int] = field(default_factory=list)
    first: int = 0

    def __len__(self) -> int:
        return len(self.block_ids)

    @property
    def held(self) -> list[int]:
        """The blocks that the sequence refers to."""
        return self.block_ids[self.first :] if self.first else self.block_ids

    def skip_to(self, position: int) -> None:
        """Append positions without a block, up to `position`."""
        self.block_ids += [NO_BLOCK] * (position - len(self.block_ids))
        self.first = max(self.first, position)

    def drop_before(self, position: int) -> list[int]:
        """Remove the blocks before a position, and return them."""
        end = min(position, len(self.block_ids))
        dropped = self.block_ids[self.first : end]
        if dropped:
            self.block_ids[self.first : end] = [NO_BLOCK] * len(dropped)
            self.first = end
        return dropped
