"""Adds up a bench's replies: samples, percentiles, goodput. No clock and no sockets."""

from __future__ import annotations

import math
import random
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pagewire.services.cli.client.openai_client import Reply

PERCENTS = (50, 90, 99)
MAX_SAMPLES = 1 << 20  # 8 MiB of each kind


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile by nearest rank, as in all of Pagewire's benches; NaN without values.

    Nearest rank: of n values, the one of rank ceil(n * percent / 100) in ascending order.

    Args:
        values: in any order; if they ascend, sorting takes linear time.
        percent: from 0 to 100.
    """
    if not values:
        return math.nan
    return sorted(values)[max(0, math.ceil(percent / 100 * len(values)) - 1)]


class Samples:
    """Numbers in bounded memory: all of them up to a limit, then a uniform sample of them.

    Attributes:
        count: number of all values that were added.
        total: sum of all values.
        highest: the largest value.
    """

    def __init__(self, limit: int = MAX_SAMPLES) -> None:
        self.count, self.total, self.highest = 0, 0.0, 0.0
        self._limit, self._sample, self._rng = limit, array("d"), random.Random(0)

    def add(self, value: float) -> None:
        """Add a number to the sums and, perhaps, to the sample for percentiles."""
        self.count += 1
        self.total += value
        self.highest = max(self.highest, value)
        if len(self._sample) < self._limit:
            self._sample.append(value)
        elif (place := self._rng.randrange(self.count)) < self._limit:
            self._sample[place] = value

    def summary(self, scale: float = 1.0) -> dict[str, float] | None:
        """Return mean, percentiles and maximum, multiplied by a scale; None without a sample."""
        if not self.count:
            return None
        ordered = sorted(self._sample)
        figures = {"mean": self.total / self.count}
        figures |= {f"p{percent}": percentile(ordered, percent) for percent in PERCENTS}
        figures["max"] = self.highest
        return {name: value * scale for name, value in figures.items()}


@dataclass(frozen=True)
class Slo:
    """Bounds that a good reply must meet; None means no bound.

    Attributes:
        ttft_s: bound on the time to first token.
        itl_s: bound on a reply's mean time between tokens.
    """

    ttft_s: float | None = None
    itl_s: float | None = None

    def is_met(self, ttft: float | None, gap: float | None) -> bool:
        """Return whether a reply is good; a reply of one token meets any bound on gaps.

        Args:
            ttft: time to its first token in seconds; None without a token.
            gap: mean time between its tokens in seconds; None if all came at the same time.
        """
        in_time = ttft is not None and (self.ttft_s is None or ttft <= self.ttft_s)
        return in_time and (self.itl_s is None or gap is None or gap <= self.itl_s)


def mean_gap(reply: Reply) -> float | None:
    """Return the mean time between a reply's tokens; None if all came at the same time."""
    return None if reply.tokens_per_s is None else 1 / reply.tokens_per_s


@dataclass
class Results:
    """The sums over all replies.

    Attributes:
        sent: requests that were started, or should have been.
        errors: number of errors, by kind.
        good: replies that meet the SLO.
        inexact: replies whose tokens were counted as chunks of text, since the server reports none.
        miscounted: replies whose number of token ids differs from their usage.
        start_lag: how late requests started because of the load generator itself.
    """

    slo: Slo = Slo()
    sent: int = 0
    ok: int = 0
    good: int = 0
    inexact: int = 0
    miscounted: int = 0
    output_tokens: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    first_messages: dict[str, str] = field(default_factory=dict)
    ttft: Samples = field(default_factory=Samples)
    itl: Samples = field(default_factory=Samples)
    e2e: Samples = field(default_factory=Samples)
    prompt_tokens: Samples = field(default_factory=Samples)
    cached_tokens: Samples = field(default_factory=Samples)
    start_lag: Samples = field(default_factory=Samples)

    @property
    def failed(self) -> int:
        """How many requests got no complete reply."""
        return self.errors.total()

    def add_error(self, kind: str, message: str) -> None:
        """Count a request without a complete reply."""
        self.errors[kind] += 1
        self.first_messages.setdefault(kind, message)

    def add_reply(self, reply: Reply) -> None:
        """Add a complete reply to the sums and samples."""
        self.ok += 1
        self.good += self.slo.is_met(reply.ttft, mean_gap(reply))
        self.output_tokens += reply.num_tokens
        self.e2e.add(reply.seconds)
        if reply.ttft is not None:
            self.ttft.add(reply.ttft)
        for gap in reply.gaps():
            self.itl.add(gap)
        if reply.usage is None:
            self.inexact += not reply.has_token_ids
            return
        self.miscounted += reply.has_token_ids and reply.num_tokens != reply.usage.completion_tokens
        self.prompt_tokens.add(reply.usage.prompt_tokens)
        if reply.cached_tokens is not None:
            self.cached_tokens.add(reply.cached_tokens)

    def report(self, seconds: float) -> dict[str, Any]:
        """Return all results as JSON values; times are in milliseconds.

        Args:
            seconds: time from the first request to the end of the last reply.
        """
        prompt = self.prompt_tokens
        return {
            "duration_s": seconds,
            "requests": {
                "sent": self.sent,
                "ok": self.ok,
                "failed": self.failed,
                "unfinished": self.sent - self.ok - self.failed,
                "errors": dict(self.errors.most_common()),
                "first_messages": self.first_messages,
            },
            "throughput": {
                "requests_per_s": self.ok / seconds if seconds else None,
                "output_tokens_per_s": self.output_tokens / seconds if seconds else None,
                "total_tokens_per_s": (
                    (self.output_tokens + prompt.total) / seconds
                    if seconds and prompt.count
                    else None
                ),
            },
            "tokens": {
                "output": self.output_tokens,
                "prompt": int(prompt.total) if prompt.count else None,
                "cached": int(self.cached_tokens.total) if self.cached_tokens.count else None,
                "prompt_per_request": prompt.summary(),
                "counted_by_chunks": self.inexact,
                "miscounted": self.miscounted,
            },
            "ttft_ms": self.ttft.summary(1e3),
            "itl_ms": self.itl.summary(1e3),
            "e2e_ms": self.e2e.summary(1e3),
            "start_lag_ms": self.start_lag.summary(1e3),
            "goodput": self._goodput(seconds),
        }

    def _goodput(self, seconds: float) -> dict[str, Any] | None:
        if self.slo == Slo():
            return None
        return {
            "slo_ttft_ms": None if self.slo.ttft_s is None else self.slo.ttft_s * 1e3,
            "slo_itl_ms": None if self.slo.itl_s is None else self.slo.itl_s * 1e3,
            "good": self.good,
            "share": self.good / self.sent if self.sent else None,
            "requests_per_s": self.good / seconds if seconds else None,
        }
