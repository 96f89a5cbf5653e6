"""Predicts how long steps and prompts take. A worker publishes the prices of its own steps.

    seconds = fixed + base(rows + tokens)
            + sequences * per sequence + contexts * per context + products * per product

`base` is what the layers' products take. It is linear between `KNOTS`, each part with its own price
of a token: few tokens cost nearly nothing where reading the weights takes longer (a GPU), or much
where each brings further experts; many tokens cost what computing them takes.

Two parts of a step's time on a GPU have no price: where contexts are not divided by their lengths,
attention lasts as long as that of the longest one, and a captured step is padded. The prices that a
load has shown contain both.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import cached_property
from itertools import zip_longest
from typing import Annotated

import msgspec
from msgspec import Meta

from pagewire.shared.costs.step_work import NOTHING, StepWork, products_of

KNOTS = (0, 8, 32, 128, 512)  # tokens of a step from which another price of a token applies
SMALLEST_CHUNK = 16
MOST_TOKENS = 1 << 20  # in a chunk, whatever it costs

Price = Annotated[float, Meta(ge=0, le=1e9)]
Number = Annotated[int, Meta(ge=0, lt=2**40)]


class StepPrices(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """What each part of a step's work takes, in seconds, and how right predictions were.

    Attributes:
        fixed: of any step.
        per_token: of a decode row or a prompt token, one price from each of `KNOTS` on.
        per_sequence: of a decode row or a chunk, in addition.
        per_context: of a token that a decode row attends to.
        per_product: of a token that a prompt token attends to.
        error: median relative error of recent predictions; None before there were any.
        prompt_error: median relative error of predictions for steps with prompt tokens.
        steps: from how many steps the prices were learnt.
        prompt_steps: how many of them had prompt tokens.
        largest: most prompt tokens that one of them had.
    """

    fixed: Price = 0.0
    per_token: Annotated[tuple[Price, ...], Meta(max_length=16)] = (0.0,) * len(KNOTS)
    per_sequence: Price = 0.0
    per_context: Price = 0.0
    per_product: Price = 0.0
    error: Price | None = None
    prompt_error: Price | None = None
    steps: Number = 0
    prompt_steps: Number = 0
    largest: Number = 0

    def step_s(self, work: StepWork) -> float:
        """Return the seconds of a step; 0 if nothing is known."""
        tokens = work.rows + work.tokens
        knot, seconds, price = self._parts[max(0, bisect_left(KNOTS, tokens) - 1)]
        seconds += (tokens - knot) * price + (work.rows + work.chunks) * self.per_sequence
        return seconds + work.contexts * self.per_context + work.products * self.per_product

    @cached_property
    def _parts(self) -> list[tuple[int, float, float]]:
        """For each of `KNOTS`: tokens from which a price applies, what these take, the price."""
        parts: list[tuple[int, float, float]] = []
        last, seconds, price = 0, self.fixed, 0.0
        for knot, per_token in zip_longest(KNOTS, self.per_token[: len(KNOTS)]):
            if per_token is not None:  # else another release wrote fewer prices
                seconds += (knot - last) * price
                last, price = knot, per_token
            parts.append((last, seconds, price))
        return parts

    def prefill_s(
        self, num_tokens: int, after: int, chunk: int, alongside: StepWork = NOTHING
    ) -> float:
        """Return the seconds in which a prompt is computed.

        Args:
            num_tokens: how many of its tokens are computed.
            after: tokens before them, whose KV is there.
            chunk: most tokens of a step.
            alongside: what each of these steps computes, too.
        """
        return self.prompts_s(num_tokens, products_of(after, num_tokens), chunk, alongside)

    def prompts_s(
        self, num_tokens: int, products: int, chunk: int, alongside: StepWork = NOTHING
    ) -> float:
        """Return the seconds in which some prompts are computed that share steps.

        Args:
            num_tokens: of all of them.
            products: as in `StepWork`, of all of them.
            chunk: most tokens of a step.
            alongside: what each of these steps computes, too.
        """
        full, rest = divmod(max(0, num_tokens), max(1, chunk))
        seconds = products * self.per_product
        if full:
            seconds += full * self.step_s(_with_tokens(alongside, chunk))
        if rest:
            seconds += self.step_s(_with_tokens(alongside, rest))
        return seconds

    def tokens_within(
        self, seconds: float, work: StepWork, start: int, most: int = MOST_TOKENS
    ) -> int:
        """Return how many tokens a further chunk of a step may have, to keep it within a time.

        Chunks have a few sizes only, so that equal prompts are mostly cut alike.

        Args:
            seconds: how long the step may take.
            work: the step's other work.
            start: tokens of the chunk's sequence before it.
            most: the result is at most this, or the smallest chunk.

        Returns:
            At least `SMALLEST_CHUNK` if the step has no other chunk, otherwise that or 0.
        """
        if self.step_s(work.with_chunk(start, most)) <= seconds:
            return most
        low, high = 0, most  # a size that fits, and one that does not
        while high - low > 1:
            middle = (low + high) // 2
            if self.step_s(work.with_chunk(start, middle)) <= seconds:
                low = middle
            else:
                high = middle
        if low < SMALLEST_CHUNK:
            return 0 if work.tokens else SMALLEST_CHUNK
        return low - low % max(SMALLEST_CHUNK, 1 << (low.bit_length() - 3))


def _with_tokens(work: StepWork, count: int) -> StepWork:
    """Return a work with a chunk whose tokens attend to nothing."""
    tokens, chunks = work.tokens + count, work.chunks + 1
    return StepWork(work.rows, work.contexts, tokens, work.products, chunks)
