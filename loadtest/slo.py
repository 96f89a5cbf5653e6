"""Service-level objectives, and the arithmetic over requests: percentiles and goodput."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pagewire.loadtest.records import MeasuredRequest
from pagewire.services.cli.bench.stats import Slo, percentile

FEWEST_FOR_P99 = 100  # the p99 of fewer values is the largest of them


def is_good(record: MeasuredRequest, slo: Slo) -> bool:
    """Whether all that the client wanted came in time.

    One that hung up by itself got what it wanted, if that much came in time.
    """
    return record.outcome in ("ok", "cancelled") and slo.is_met(record.ttft, record.mean_gap)


@dataclass(frozen=True)
class Percentiles:
    """Percentiles of a quantity, in seconds; NaN when nothing was measured.

    Attributes:
        count: values that they are taken from.
    """

    p50: float
    p90: float
    p99: float
    count: int

    @property
    def p99_is_largest(self) -> bool:
        """Whether the values are too few for a p99 below their largest one."""
        return 0 < self.count < FEWEST_FOR_P99


@dataclass(frozen=True)
class StageSummary:
    """The requests sent at one offered rate.

    Attributes:
        rate: requests a second that the users wanted to send.
        duration_s: how long it was offered.
        requests: requests that were sent and finished.
        errors: refused or broken requests.
        cancelled: requests that the client cut short.
        tokens: generated tokens that arrived.
        throughput: finished or cut requests a second.
        goodput: requests a second that met the objectives.
        attainment: share of requests that met the objectives.
        cached_share: prompt tokens that did not have to be computed, of all whose usage came.
    """

    rate: float
    duration_s: float
    requests: int
    errors: int
    cancelled: int
    tokens: int
    throughput: float
    goodput: float
    attainment: float
    cached_share: float
    ttft: Percentiles
    itl: Percentiles


def percentiles(values: Sequence[float]) -> Percentiles:
    """Return the three that the report shows."""
    p50, p90, p99 = (percentile(values, q) for q in (50, 90, 99))
    return Percentiles(p50, p90, p99, len(values))


def summarize(
    records: Sequence[MeasuredRequest], slo: Slo, durations: dict[float, float]
) -> list[StageSummary]:
    """Summarize by offered rate, lowest first.

    Args:
        records: of one run.
        slo: what counts as good.
        durations: seconds for which each rate was offered.
    """
    done = [record for record in records if record.outcome != "unfinished"]
    return [
        _stage([record for record in done if record.rate == rate], slo, rate, durations[rate])
        for rate in sorted(durations)
    ]


def _stage(
    records: Sequence[MeasuredRequest], slo: Slo, rate: float, duration_s: float
) -> StageSummary:
    good = sum(is_good(record, slo) for record in records)
    errors = sum(record.outcome == "error" for record in records)
    prompt = sum(record.usage_prompt or 0 for record in records)
    return StageSummary(
        rate=rate,
        duration_s=duration_s,
        requests=len(records),
        errors=errors,
        cancelled=sum(record.outcome == "cancelled" for record in records),
        tokens=sum(len(record.token_times) for record in records),
        throughput=(len(records) - errors) / duration_s,
        goodput=good / duration_s,
        attainment=good / len(records) if records else math.nan,
        cached_share=sum(r.usage_cached or 0 for r in records) / prompt if prompt else math.nan,
        ttft=percentiles([record.ttft for record in records if record.ttft is not None]),
        itl=percentiles([gap for record in records for gap in record.gaps]),
    )
