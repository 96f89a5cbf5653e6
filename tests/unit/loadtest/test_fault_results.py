"""What is counted of the answers in a run with faults."""

from __future__ import annotations

import math

import pytest

from pagewire.loadtest.faults.measures import usage
from pagewire.loadtest.faults.results import (
    Observation,
    Result,
    SentRequest,
    Status,
    Summary,
    different,
    row,
    summarize,
    time_to_full,
)
from pagewire.loadtest.faults.scenarios import Kind, PlannedRequest
from pagewire.loadtest.faults.system import KvUsage


def sent(
    index: int, tokens: list[int], status: Status = "ok", kind: Kind = "stream", **fields: object
) -> SentRequest:
    request = PlannedRequest(index, 0.0, kind, 8, len(tokens))
    return SentRequest(request, status, token_ids=tokens, **fields)


def summary(failed: int = 0, different: int = 0) -> Summary:
    return Summary(9, 0, failed, {}, [], 0, list(range(different)), 0.1, 1.0, 1.0)


def test_answers_are_compared_by_their_numbers() -> None:
    calm = [sent(0, [1, 2]), sent(1, [3, 4]), sent(2, [5])]
    run = [sent(2, [5]), sent(1, [3, 9]), sent(0, [1, 2]), sent(7, [1])]
    assert different(calm, run) == [1]


def test_only_complete_answers_are_compared() -> None:
    assert different([sent(0, [1, 2])], [sent(0, [1], status="failed")]) == []


def test_texts_are_compared_where_token_ids_are_missing() -> None:
    calm = [sent(0, [], text="ab"), sent(1, [], text="cd"), sent(2, [1], text="e")]
    run = [sent(0, [], text="ab"), sent(1, [], text="cx"), sent(2, [], text="e")]
    assert different(calm, run) == [1]


def test_a_gap_reaches_to_the_failure_of_a_stream() -> None:
    times = [1.0, 1.5, 3.0]
    assert sent(0, [1, 2, 3], times=times, end=9.0).gaps == [0.5, 1.5]
    assert sent(0, [1, 2, 3], "failed", times=times, end=9.0).gaps == [0.5, 1.5, 6.0]
    assert sent(0, [], "failed", end=9.0).gaps == []


def test_a_summary_counts_failures_of_all_and_gaps_of_streams() -> None:
    run = [
        sent(0, [1], times=[0.2]),
        sent(1, [1, 2], times=[0.1, 0.4], retries=1),
        sent(2, [], "failed", kind="long", error="HTTP 503: no", end=1.0),
        sent(3, [], "failed", error="HTTP 503: no", end=1.0),
        sent(4, [1, 2], "left", kind="leaves", times=[0.0, 5.0]),
    ]
    run[2].kind = run[3].kind = "http 503"
    found = summarize(run, [sent(1, [1, 3])])
    assert found == Summary(
        requests=4,
        left=1,
        failed=2,
        errors={"http 503": 2},
        first_errors=["HTTP 503: no"],
        retried=1,
        different=[1],
        gap_p99_s=pytest.approx(0.3),
        longest_gap_s=pytest.approx(0.3),
        longest_first_s=0.2,
    )


@pytest.mark.parametrize(
    ("checks", "expected"),
    [
        ("wwww", 0.0),
        ("ww--w", 2.0),  # whole at 5, after a fault at 3
        ("ww-w-w", 3.0),
        ("ww--", math.inf),
        ("-www", 0.0),  # before the fault
    ],
)
def test_a_system_is_full_when_it_stays_whole(checks: str, expected: float) -> None:
    """A check a second; `w` finds the system whole."""
    seen = [Observation(i + 0.5, i + 1.0, check == "w") for i, check in enumerate(checks)]
    assert time_to_full(seen, fault_at=3.0) == expected


def test_what_is_required() -> None:
    assert Result("x", summary=summary(), kv_not_freed=0.0, capacity=0.5).problems == []
    assert Result("x", not_tried="it lacks a command").problems == []
    bad = Result("x", summary=summary(2, 3), kv_not_freed=1.0, is_whole=False, failed_after=4)
    assert bad.problems == [
        "2 requests failed",
        "3 answers differ from the calm run's",
        "KV was not freed",
        "4 requests failed after the run",
        "the system was not whole again",
    ]


@pytest.mark.parametrize(("capacity", "is_freed"), [(1.1, True), (0.9, True), (0.7, False)])
def test_without_a_metric_the_capacity_shows_what_is_not_freed(
    capacity: float, is_freed: bool
) -> None:
    assert Result("x", summary=summary(), capacity=capacity).is_freed is is_freed


def test_rows_say_what_was_not_tried_and_what_never_came_back() -> None:
    assert row(Result("x", not_tried="no command"), "blocks") == {
        "scenario": "x",
        "requests": "not tried: no command",
    }
    name = "whole again after, s"
    assert row(Result("x", summary=summary(), is_whole=False), "blocks")[name] == "never"
    assert row(Result("x", summary=summary(), full_after_s=2.5), "blocks")[name] == 2.5
    assert row(Result("x", summary=summary()), "blocks")[name] == "-"


def test_usage_is_the_sum_of_the_first_metric_that_is_there() -> None:
    pages = [
        'new{state="used",worker="a"} 2\nnew{state="free"} 90\nold 7\n',
        'new{state="used",worker="b"} 3\n',
    ]
    assert usage(pages, KvUsage(["new", "old"], {"state": "used"})) == 5
    assert usage(pages, KvUsage(["newer", "old"])) == 7
    assert usage(pages, KvUsage(["newer"])) is None
