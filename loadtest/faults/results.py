"""Evaluates a run: failed and different answers, gaps, time to full capacity. Pure functions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

from pagewire.loadtest.faults.scenarios import PlannedRequest
from pagewire.services.cli.bench.stats import percentile

LEAST_CAPACITY = 0.8  # less than this of the capacity before counts as "KV not freed"
LEAST_SHARE = 0.002  # share of a KV pool that counts as nothing: gauges are rounded
ERRORS_KEPT = 5

Status = Literal["ok", "left", "failed"]


@dataclass
class SentRequest:
    """A request as its client saw it; times are in seconds since the request was sent.

    Attributes:
        status: answered, left by its client as planned, or without a complete answer.
        token_ids: tokens of the answer; empty if the endpoint does not send them.
        times: arrival times of the tokens.
        end: time at which the answer ended or failed.
        kind: kind of error, for counting.
        retries: how often the request was sent again.
    """

    request: PlannedRequest
    status: Status = "failed"
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    times: list[float] = field(default_factory=list)
    end: float = 0.0
    kind: str = ""
    error: str = ""
    retries: int = 0

    @property
    def gaps(self) -> list[float]:
        """Times between two tokens, and from the last token to a failure."""
        times = [*self.times, self.end] if self.status == "failed" and self.times else self.times
        return [after - before for before, after in pairwise(times)]

    def is_same(self, other: SentRequest) -> bool:
        """Return whether two answers have the same tokens, or the same text without token ids."""
        if self.token_ids and other.token_ids:
            return self.token_ids == other.token_ids
        return self.text == other.text


@dataclass(frozen=True)
class Observation:
    """One check of whether a system is whole; times are in seconds since the start of a run."""

    begin: float
    end: float
    is_whole: bool


@dataclass(frozen=True)
class Summary:
    """The counts of one run.

    Attributes:
        requests: number of requests whose clients stayed.
        left: number of requests whose clients left.
        failed: number of requests without a complete answer.
        errors: failed requests by kind of error.
        first_errors: messages of the first of them.
        retried: number of requests that were sent again.
        different: numbers of the streams whose answer differs from the calm run's.
        gap_p99_s: 99th percentile of the times between two tokens of a stream.
        longest_gap_s: longest such time.
        longest_first_s: longest time to a stream's first token.
    """

    requests: int
    left: int
    failed: int
    errors: dict[str, int]
    first_errors: list[str]
    retried: int
    different: list[int]
    gap_p99_s: float
    longest_gap_s: float
    longest_first_s: float


@dataclass(frozen=True)
class Result:
    """The result of a scenario.

    Attributes:
        not_tried: why the scenario was not tried; empty if it was.
        faults: commands that were run, with their times in seconds since the start of the run.
        is_whole: whether the system was whole at the end.
        full_after_s: time from the first command until the system was whole again; 0 if it was
            whole all the time; None without a command, or if it was not whole at the end.
        kv_not_freed: KV that is still in use when no request is left, in the metric's unit; None
            without a metric.
        capacity: tokens per second after the scenario, divided by those before.
        failed_after: requests that failed while this capacity was measured, though the system
            called itself whole.
    """

    scenario: str
    not_tried: str = ""
    faults: list[tuple[float, str]] = field(default_factory=list)
    summary: Summary | None = None
    is_whole: bool = True
    full_after_s: float | None = None
    kv_not_freed: float | None = None
    capacity: float | None = None
    failed_after: int = 0

    @property
    def is_freed(self) -> bool:
        """Whether all KV was freed: by the metric if there is one, else by the capacity."""
        if self.kv_not_freed is not None:
            return self.kv_not_freed <= LEAST_SHARE
        return self.capacity is None or self.capacity >= LEAST_CAPACITY

    @property
    def problems(self) -> list[str]:
        """What would make the program fail with `--require`, in words."""
        problems = []
        if self.summary is not None and self.summary.failed:
            problems.append(f"{self.summary.failed} requests failed")
        if self.summary is not None and self.summary.different:
            problems.append(f"{len(self.summary.different)} answers differ from the calm run's")
        if not self.is_freed:
            problems.append("KV was not freed")
        if self.failed_after:
            problems.append(f"{self.failed_after} requests failed after the run")
        if not self.is_whole:
            problems.append("the system was not whole again")
        return problems


def different(calm: Iterable[SentRequest], run: Iterable[SentRequest]) -> list[int]:
    """Return the numbers of the requests that both runs answered, with different tokens."""
    known = {sent.request.index: sent for sent in calm if sent.status == "ok"}
    return [
        sent.request.index
        for sent in run
        if sent.status == "ok"
        and sent.request.index in known
        and not sent.is_same(known[sent.request.index])
    ]


def summarize(run: Sequence[SentRequest], calm: Sequence[SentRequest]) -> Summary:
    """Return the counts of a run.

    Args:
        run: all of its requests.
        calm: the same streams without any fault.
    """
    failed = [sent for sent in run if sent.status == "failed"]
    left = [sent for sent in run if sent.status == "left"]
    of_streams = [sent for sent in run if sent.request.kind == "stream"]
    gaps = [gap for sent in of_streams for gap in sent.gaps]
    return Summary(
        requests=len(run) - len(left),
        left=len(left),
        failed=len(failed),
        errors=dict(Counter(sent.kind for sent in failed).most_common()),
        first_errors=list(dict.fromkeys(sent.error for sent in failed))[:ERRORS_KEPT],
        retried=sum(sent.retries > 0 for sent in run),
        different=different(calm, run),
        gap_p99_s=percentile(gaps, 99) if gaps else 0.0,
        longest_gap_s=max(gaps, default=0.0),
        longest_first_s=max((sent.times[0] for sent in of_streams if sent.times), default=0.0),
    )


def time_to_full(observations: Sequence[Observation], fault_at: float) -> float:
    """Return the time from a fault until the system was whole for the rest of the run.

    Args:
        observations: checks in the order of their times.
        fault_at: time of the fault.

    Returns:
        0 if no check after the fault found that a part was away, infinite if the last one did.
    """
    full_at = fault_at
    for check in observations:
        if check.end >= fault_at and not check.is_whole:
            full_at = math.inf
        elif full_at == math.inf:
            full_at = check.end
    return full_at - fault_at


def row(result: Result, unit: str) -> dict[str, Any]:
    """Return a scenario's row of the table.

    Args:
        result: what was measured.
        unit: unit of `kv_not_freed`.
    """
    if result.summary is None:
        return {"scenario": result.scenario, "requests": f"not tried: {result.not_tried}"}
    fields = summary_row(result.scenario, result.summary)
    if result.failed_after:
        fields["failed"] = f"{fields['failed']}, {result.failed_after} after the run"
    full: float | str | None = result.full_after_s
    if full is None:
        full = "-" if result.is_whole else "never"
    return fields | {
        "whole again after, s": full,
        f"KV not freed, {unit}": "-" if result.kv_not_freed is None else result.kv_not_freed,
        "capacity after / before": result.capacity,
    }


def summary_row(name: str, summary: Summary) -> dict[str, Any]:
    """Return the part of a row that a calm run has, too."""
    return {
        "scenario": name,
        "requests": summary.requests,
        "failed": summary.failed,
        "different": len(summary.different),
        "gap p99, ms": summary.gap_p99_s * 1e3,
        "longest gap, s": summary.longest_gap_s,
        "latest first token, s": summary.longest_first_s,
    }
