"""Records of requests, objectives, percentiles and goodput."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from pagewire.loadtest.records import MeasuredRequest, Outcome, read_lines, to_line
from pagewire.loadtest.slo import is_good, summarize
from pagewire.services.cli.bench.stats import Slo

SLO = Slo(ttft_s=0.5, itl_s=0.1)


def record(
    times: list[float], outcome: Outcome = "ok", rate: float = 2.0, cached: int | None = None
) -> MeasuredRequest:
    return MeasuredRequest(
        kind="chat",
        rate=rate,
        start=1.0,
        token_times=times,
        end=times[-1] if times else 0.0,
        outcome=outcome,
        usage_prompt=None if cached is None else 100,
        usage_cached=cached,
    )


def test_gaps_are_one_fewer_than_tokens_and_their_mean_is_exact() -> None:
    measured = record([0.25, 0.5, 0.5, 1.0])
    assert measured.ttft == 0.25
    assert measured.gaps == [0.25, 0.0, 0.5]
    assert measured.mean_gap == pytest.approx(sum(measured.gaps) / 3)


def test_one_token_or_none_has_no_gap() -> None:
    assert record([0.2]).gaps == []
    assert record([0.2]).mean_gap == 0.0
    assert record([]).ttft is None


@pytest.mark.parametrize(
    ("measured", "is_met"),
    [
        pytest.param(record([0.5, 0.6]), True, id="both-at-the-limit"),
        pytest.param(record([0.51, 0.6]), False, id="first-token-late"),
        pytest.param(record([0.1, 0.35]), False, id="tokens-slow"),
        pytest.param(record([0.1, 0.3, 0.3]), True, id="one-slow-gap-in-a-good-mean"),
        pytest.param(record([0.1]), True, id="one-token"),
        pytest.param(record([0.1, 0.2], "cancelled"), True, id="cut-in-time"),
        pytest.param(record([0.9, 1.0], "cancelled"), False, id="cut-too-late"),
        pytest.param(record([0.1, 0.2], "error"), False, id="broken-off"),
        pytest.param(record([]), False, id="no-token"),
    ],
)
def test_objectives(measured: MeasuredRequest, is_met: bool) -> None:
    assert is_good(measured, SLO) is is_met


def test_summary_counts_by_hand() -> None:
    records = [
        record([0.1, 0.2, 0.3], cached=0),
        record([0.7, 0.8], cached=64),  # late
        record([0.2], "cancelled"),
        record([], "error"),
        record([0.1], "unfinished"),
        record([0.4, 0.5], rate=4.0, cached=96),
    ]
    low, high = summarize(records, SLO, {4.0: 5.0, 2.0: 10.0})
    assert (low.rate, high.rate) == (2.0, 4.0)
    assert (low.requests, low.errors, low.cancelled, low.tokens) == (4, 1, 1, 6)
    assert low.throughput == pytest.approx(0.3)
    assert low.goodput == pytest.approx(0.2)
    assert low.attainment == pytest.approx(0.5)
    assert low.cached_share == pytest.approx(0.32)
    assert (low.ttft.p50, low.ttft.p99) == (0.2, 0.7)
    assert low.itl.p99 == pytest.approx(0.1)
    assert (high.requests, high.goodput, high.cached_share) == (1, 0.2, 0.96)


def test_a_rate_without_requests_has_no_percentiles() -> None:
    [empty] = summarize([], SLO, {1.0: 5.0})
    assert (empty.requests, empty.goodput) == (0, 0.0)
    assert math.isnan(empty.ttft.p50)
    assert math.isnan(empty.attainment)


def test_records_survive_their_file(tmp_path: Path) -> None:
    written = [record([0.1, 0.25], cached=16), record([], "error")]
    file = tmp_path / "records.jsonl"
    file.write_text("".join(to_line(each) for each in written), encoding="utf-8")
    assert read_lines(file, MeasuredRequest) == written
