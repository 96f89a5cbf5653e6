"""The work of a step, as far as it decides how long the step takes."""

from __future__ import annotations

import msgspec


class StepWork(msgspec.Struct, frozen=True, gc=False):
    """What a step computes.

    Attributes:
        rows: its decode rows.
        contexts: tokens that all decode rows together attend to, themselves included.
        tokens: prompt tokens, in chunks.
        products: pairs of a chunk's token and a token that it attends to, itself included.
        chunks: how many there are.
    """

    rows: int = 0
    contexts: int = 0
    tokens: int = 0
    products: int = 0
    chunks: int = 0

    def with_chunk(self, start: int, count: int) -> StepWork:
        """Return this work and a chunk of `count` tokens after `start` others of its sequence."""
        return StepWork(
            self.rows,
            self.contexts,
            self.tokens + count,
            self.products + products_of(start, count),
            self.chunks + 1,
        )

    def plus(self, other: StepWork) -> StepWork:
        """Return the sum of two works."""
        return StepWork(
            self.rows + other.rows,
            self.contexts + other.contexts,
            self.tokens + other.tokens,
            self.products + other.products,
            self.chunks + other.chunks,
        )

    def minus(self, other: StepWork) -> StepWork:
        """Return what is left of a sum without one of its parts."""
        return StepWork(
            self.rows - other.rows,
            self.contexts - other.contexts,
            self.tokens - other.tokens,
            self.products - other.products,
            self.chunks - other.chunks,
        )

    @property
    def text(self) -> str:
        """The number of prompt tokens and decode rows, in words for logs."""
        return f"{self.tokens} prompt tokens and {self.rows} decode rows"


def products_of(start: int, count: int) -> int:
    """Return the pairs of a token and what it attends to, of `count` tokens after `start`."""
    return count * start + count * (count + 1) // 2


NOTHING = StepWork()
