"""Tensor parallelism: which part of a model a rank holds, and what ranks exchange.

Each rank has some heads of each attention layer, and a part of the inner size of each feed-forward
layer, so that it computes a part of the sum that is the layer's output: one `reduce` after each. It
also has a part of the vocabulary: one `reduce` of embeddings, and one `gather` of logits. All ranks
have norms and routers. torch is not imported.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from pagewire.shared.base.errors import ModelLoadError

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = Any


class Communicator(Protocol):
    """The ranks of one model: all call the same methods in the same order."""

    def reduce(self, x: Tensor) -> Tensor:
        """Return the sum over the ranks, added in their order: the same bits on each rank.

        Args:
            x: of the same shape on each rank; it may be overwritten.
        """
        ...

    def reduce_norm(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None
    ) -> tuple[Tensor, Tensor] | None:
        """Return the normalised sum over the ranks and the new residual stream, by one kernel.

        None, on all ranks: there is no kernel for these sizes, and nothing has been exchanged.

        Args:
            x: see `reduce`.
            weight: see `RmsNorm`, as the following ones.
            eps: see there.
            residual: see there; the same on each rank.
        """
        ...

    def gather(self, x: Tensor) -> Tensor:
        """Return `[N, sum of n]` of each rank's `[N, n]`, in the order of the ranks."""
        ...


@dataclass(frozen=True, slots=True)
class Cut:
    """The part of a tensor's dimension that a rank holds.

    Attributes:
        size: of the dimension in the checkpoint.
        ranges: first index and the one after the last, of each contiguous part, ascending.
    """

    size: int
    ranges: tuple[tuple[int, int], ...]

    @property
    def count(self) -> int:
        """Number of indices that the rank holds."""
        return sum(end - start for start, end in self.ranges)

    @property
    def is_whole(self) -> bool:
        """Whether the rank holds all of it."""
        return self.ranges == ((0, self.size),)

    def times(self, width: int) -> Cut:
        """Return the cut of a dimension that has `width` numbers for each of these."""
        return Cut(self.size * width, tuple((a * width, b * width) for a, b in self.ranges))

    def blocks(self, width: int, what: str) -> Cut:
        """Return the cut of a dimension that has one number for `width` of these.

        Args:
            width: numbers of a block; the last block may have less.
            what: what is cut, for the error.

        Raises:
            ModelLoadError: a part begins or ends within a block; one line.
        """
        if any(a % width or (b % width and b != self.size) for a, b in self.ranges):
            raise ModelLoadError(
                f"{what}: a rank's part would begin or end within {width} numbers that are "
                "quantised together; use fewer ranks"
            )
        ranges = tuple((a // width, -(-b // width)) for a, b in self.ranges)
        return Cut(-(-self.size // width), ranges)

    @staticmethod
    def joined(cuts: Iterable[Cut]) -> Cut:
        """Return the cut of a dimension that has several, one after the other."""
        size, ranges = 0, list[tuple[int, int]]()
        for cut in cuts:
            for start, end in cut.ranges:
                if ranges and ranges[-1][1] == size + start:
                    start = ranges.pop()[0] - size
                ranges.append((size + start, size + end))
            size += cut.size
        return Cut(size, tuple(ranges))


ALIGNED = 16  # numbers

# For each dimension of a checkpoint's tensor, the rank's part; None, or no entries: all of it.
Cuts = tuple[Cut | None, ...]


def block_cuts(what: str, cuts: Cuts, widths: Sequence[int | None]) -> Cuts:
    """Return the cuts of a tensor that has one number for each block of another.

    Args:
        what: what is cut, for an error.
        cuts: of the other tensor.
        widths: numbers of a block, in each dimension; None: all of them.

    Raises:
        ModelLoadError: a part begins or ends within a block; one line.
    """
    pairs = zip(cuts, widths, strict=False)
    return tuple(None if cut is None or n is None else cut.blocks(n, what) for cut, n in pairs)


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a model that a rank holds.

    Attributes:
        rank: of this part, from 0.
        count: number of ranks.
    """

    rank: int = 0
    count: int = 1

    def cut(self, size: int, what: str, unit: int = 1) -> Cut:
        """Return this rank's part of a dimension: one of nearly equal parts, in order.

        Args:
            size: of the dimension.
            what: its name, for the error.
            unit: parts begin at multiples of this, and of `ALIGNED` where they cannot be equal.

        Raises:
            ModelLoadError: a rank would have nothing; one line.
        """
        if size % (unit * self.count):  # parts differ: let them begin where kernels read faster
            aligned = math.lcm(unit, ALIGNED)
            unit = aligned if aligned * self.count <= size else unit
        units = -(-size // unit)
        if units < self.count:
            of = f" of {unit}" if unit > 1 else ""
            raise ModelLoadError(
                f"{self.count} ranks cannot share {what} ({size}), which has {units} parts{of}: at "
                f"most {units} ranks can"
            )
        start, end = (units * rank // self.count * unit for rank in (self.rank, self.rank + 1))
        return Cut(size, ((start, min(end, size)),))

    def heads(self, num_heads: int, num_kv_heads: int) -> tuple[Cut, Cut]:
        """Return this rank's query heads, and the KV heads that these read.

        If there are fewer KV heads than ranks, several ranks have the same one.

        Raises:
            ModelLoadError: ranks would have different numbers of heads; one line.
        """
        if not _divides(self.count, num_heads, num_kv_heads):
            counts = range(1, num_heads + 1)
            possible = [str(n) for n in counts if _divides(n, num_heads, num_kv_heads)]
            raise ModelLoadError(
                f"{self.count} ranks cannot share {num_heads} attention heads and {num_kv_heads} "
                f"KV heads; possible numbers of ranks are {', '.join(possible)}"
            )
        heads = self.cut(num_heads, "num_attention_heads")
        if num_kv_heads % self.count == 0:
            return heads, self.cut(num_kv_heads, "num_key_value_heads")
        head = self.rank * num_kv_heads // self.count
        return heads, Cut(num_kv_heads, ((head, head + 1),))


WHOLE = Shard()


def _divides(count: int, num_heads: int, num_kv_heads: int) -> bool:
    return num_heads % count == 0 and (num_kv_heads % count == 0 or count % num_kv_heads == 0)
