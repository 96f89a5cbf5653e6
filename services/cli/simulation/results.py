"""Sums up simulated requests: promises kept, rates, percentiles, cache hits."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from pagewire.services.cli.bench.stats import percentile

SHARE_OF_GAP, SHARE_OF_MEAN = 0.9, 0.975
PARTS = ("ttft", "tpot", "gap")  # of a promise
Outcome = Literal["ok", "refused", "unfinished"]


@dataclass(frozen=True, slots=True)
class Promise:
    """Upper bounds of an answer's times, in seconds.

    Attributes:
        ttft_s: bound on the time to the first token.
        tpot_s: bound on the mean time between tokens.
        gap_s: bound on the 99th percentile of an answer's times between tokens.
    """

    ttft_s: float = math.inf
    tpot_s: float = math.inf
    gap_s: float = math.inf

    @property
    def objective_s(self) -> float:
        """The workers' `slo_gap_s` that keeps it: a little less, since predictions err a little.

        Where only the mean is promised, no time between two tokens may be longer than that. Errors
        of both signs change the mean less than a single time.
        """
        return SHARE_OF_MEAN * self.tpot_s if self.gap_s == math.inf else SHARE_OF_GAP * self.gap_s

    def broken_by(self, ttft_s: float, gaps: Sequence[float]) -> set[str]:
        """Return which of `PARTS` an answer broke: time to its first token, and between tokens."""
        mean_s = sum(gaps) / len(gaps) if gaps else 0.0
        gap_s = percentile(gaps, 99) if gaps and self.gap_s != math.inf else 0.0
        broken = ttft_s > self.ttft_s, mean_s > self.tpot_s, gap_s > self.gap_s
        return {part for part, is_broken in zip(PARTS, broken, strict=True) if is_broken}


@dataclass(slots=True, eq=False)
class SimulatedAnswer:
    """A request and its answer, as the client sees them.

    Attributes:
        sent_s: when the request was sent.
        times: when each token arrived.
        prompt_tokens: length of the prompt.
        cached_tokens: of these, the ones that the worker which computed the prompt had cached.
        known_tokens: of these, the ones that some worker had computed by then: what a cache without
            bounds that all workers share would have had.
        is_remote: a prefill worker computed the prompt.
        is_too_long: it was refused, since its prompt needs more KV blocks than a worker has.
    """

    sent_s: float
    prompt_tokens: int
    times: array[float] = field(default_factory=lambda: array("d"))
    cached_tokens: int = 0
    known_tokens: int = 0
    is_remote: bool = False
    is_too_long: bool = False
    outcome: Outcome = "unfinished"

    @property
    def ttft_s(self) -> float:
        """Time to the first token; NaN without one."""
        return self.times[0] - self.sent_s if self.times else math.nan

    @property
    def tpot_s(self) -> float:
        """Mean time between tokens; 0 if there are fewer than two."""
        count = len(self.times) - 1
        return (self.times[-1] - self.times[0]) / count if count > 0 else 0.0

    def gaps(self) -> list[float]:
        """Return the seconds between consecutive tokens."""
        return [after - before for before, after in pairwise(self.times)]

    def breaks(self, promise: Promise) -> set[str]:
        """Return which of `PARTS` of a promise were broken; an incomplete answer breaks all."""
        return promise.broken_by(self.ttft_s, self.gaps()) if self.outcome == "ok" else set(PARTS)


@dataclass(frozen=True, slots=True)
class LatencyPercentiles:
    """Percentiles of times, in milliseconds; NaN if there are none."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> LatencyPercentiles:
        """Return the percentiles of times in seconds."""
        ordered = sorted(seconds)
        return cls(*(percentile(ordered, percent) * 1e3 for percent in (50, 90, 99)))


@dataclass(frozen=True, slots=True)
class SimulationSummary:
    """The figures of one simulation.

    Attributes:
        requests: how many were sent.
        refused: requests that no worker took.
        too_long: of these, the ones that need more KV blocks than a worker has.
        seconds: virtual time from the first request to the last token.
        completed_per_s: complete answers a second.
        kept_per_s: complete answers a second that kept the promise.
        kept_share: share of all requests whose answers kept the promise.
        broken: part of the promise -> share of all requests that broke it.
        tokens_per_s: output tokens a second.
        gap: times between tokens, of all answers together.
        remote_share: of the complete answers, those whose prompt a prefill worker computed.
        cached_share: of all prompt tokens, those that did not have to be computed.
        known_share: the same share if all workers had one cache without bounds.
        preemptions: how often a running sequence lost its blocks.
        busy: worker's name -> share of the time in which its device ran steps.
    """

    requests: int
    refused: int
    too_long: int
    seconds: float
    completed_per_s: float
    kept_per_s: float
    kept_share: float
    broken: dict[str, float]
    tokens_per_s: float
    ttft: LatencyPercentiles
    tpot: LatencyPercentiles
    gap: LatencyPercentiles
    remote_share: float
    cached_share: float
    known_share: float
    preemptions: int
    busy: dict[str, float]


def summarize(
    answers: Sequence[SimulatedAnswer], promise: Promise, preemptions: int, busy_s: dict[str, float]
) -> SimulationSummary:
    """Return the figures of a simulation.

    Args:
        answers: of all requests.
        promise: what the answers are to keep.
        preemptions: of all workers.
        busy_s: for each worker, the seconds in which its device ran steps.
    """
    complete = [answer for answer in answers if answer.outcome == "ok"]
    broken = Counter[str]()
    num_kept = 0
    for answer in answers:
        parts = answer.breaks(promise)
        num_kept += not parts
        broken.update(parts)
    first = min((answer.sent_s for answer in answers), default=0.0)
    last = max((answer.times[-1] for answer in answers if answer.times), default=first)
    seconds = last - first
    prompt = sum(answer.prompt_tokens for answer in complete)
    return SimulationSummary(
        requests=len(answers),
        refused=sum(answer.outcome == "refused" for answer in answers),
        too_long=sum(answer.is_too_long for answer in answers),
        seconds=seconds,
        completed_per_s=_ratio(len(complete), seconds),
        kept_per_s=_ratio(num_kept, seconds),
        kept_share=_ratio(num_kept, len(answers)),
        broken={name: _ratio(broken[name], len(answers)) for name in ("ttft", "tpot", "gap")},
        tokens_per_s=_ratio(sum(len(answer.times) for answer in answers), seconds),
        ttft=LatencyPercentiles.of([answer.ttft_s for answer in answers if answer.times]),
        tpot=LatencyPercentiles.of([answer.tpot_s for answer in complete]),
        gap=LatencyPercentiles.of([gap for answer in complete for gap in answer.gaps()]),
        remote_share=_ratio(sum(answer.is_remote for answer in complete), len(complete)),
        cached_share=_ratio(sum(answer.cached_tokens for answer in complete), prompt),
        known_share=_ratio(sum(answer.known_tokens for answer in complete), prompt),
        preemptions=preemptions,
        busy={name: _ratio(busy, seconds) for name, busy in busy_s.items()},
    )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
