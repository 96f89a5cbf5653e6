"""Decides how many prompt tokens a step may have, from what the step is predicted to take.

Running answers wait for a step, and so do other prompts. On a CPU a step lasts about a second. If
the request of a decode row has an objective, no step with that row is predicted to last longer,
unless the rows alone take most of it: prompts have a share of each step. With an objective near or
below the time of the rows, others would wait for their first tokens without end.
"""

from __future__ import annotations

import bisect
import math

from pagewire.shared.costs.step_costs import StepCosts
from pagewire.shared.costs.step_prices import SMALLEST_CHUNK
from pagewire.shared.costs.step_work import StepWork
from pagewire.shared.engine.scheduling.schedule import SchedulerLimits

# A step reads all weights, whatever it computes. With fewer tokens than this, that takes much of
# its time. So a step of fewer may last several times `step_s`, but no longer than an objective.
EFFICIENT_CHUNK = 192
SMALL_STEP_FACTOR = 4
# Whatever the objective, a step may last this many times as long as its decode rows alone take.
# In simulations of two H200s, 1.6 kept most promises of agents and of mixed lengths together: see
# "How much of a step prompts have" in docs/simulation.md.
SHARED_FACTOR = 1.6
# A step that is larger than the captured ones is launched kernel by kernel. On a busy host that
# takes up to 40 ms, as long as the device takes for about this many times the tokens of the largest
# captured one. Where a step may not last as long as that, it would wait for the host, which
# predictions do not know.
LAUNCHED_FACTOR = 2


def chunk_room(
    limits: SchedulerLimits, costs: StepCosts, gap_s: float, work: StepWork, start: int
) -> int:
    """Return how many tokens the next chunk of a step may have, as far as time matters.

    0 only if the step has another chunk.

    Args:
        limits: the scheduler's.
        costs: predict how long the step takes.
        gap_s: the smallest objective of the step's rows; infinite if none has any.
        work: the step so far.
        start: position of the chunk's first token.
    """
    most, pace = limits.max_num_batched_tokens, costs.pace
    if gap_s != math.inf:
        rows_s = pace * costs.prices.step_s(StepWork(work.rows, work.contexts))
        gap_s = max(gap_s, SHARED_FACTOR * rows_s)
    usual_s, longest_s = min(limits.step_s, gap_s), min(SMALL_STEP_FACTOR * limits.step_s, gap_s)
    if longest_s == math.inf:
        return most
    if gap_s != math.inf:
        # The price of many more tokens than were ever seen is only a guess.
        most = min(most, max(EFFICIENT_CHUNK, 2 * costs.largest))
    within = costs.prices.tokens_within
    tokens = within(usual_s / pace, work, start, most)
    if not work.tokens and tokens < EFFICIENT_CHUNK:
        tokens = min(EFFICIENT_CHUNK, within(longest_s / pace, work, start, most))
    tokens = min(most, tokens)
    sizes = limits.step_sizes
    if gap_s == math.inf or not sizes:
        return tokens
    others = work.rows + work.tokens
    if others + tokens > sizes[-1]:
        launched = max(0, LAUNCHED_FACTOR * sizes[-1] - others)
        if pace * costs.prices.step_s(work.with_chunk(start, launched)) <= gap_s:
            return tokens
    return _filling(sizes, work, tokens)


def _filling(sizes: tuple[int, ...], work: StepWork, tokens: int) -> int:
    """Return at most this many tokens, so that a CUDA graph has no empty places if possible.

    0 if another chunk would make the step larger than the captured ones.
    """
    others = work.rows + work.tokens
    next_size = bisect.bisect_right(sizes, others + tokens)
    filling = sizes[next_size - 1] - others if next_size else 0
    if filling >= SMALLEST_CHUNK:
        return filling
    return 0 if work.tokens and next_size == len(sizes) else tokens
