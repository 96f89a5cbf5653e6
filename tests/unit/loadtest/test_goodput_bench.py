"""The bench of promises kept: its loads, and what it counts of answers."""

from __future__ import annotations

import statistics

import pytest

from pagewire.loadtest.bench.goodput import Outcome, figures
from pagewire.loadtest.bench.open_load import OpenLoad
from pagewire.loadtest.cluster import BenchError


@pytest.mark.parametrize(
    "text", ["", "6144/256", "6144@5", "mixed@", "a/b@1", "1/2/3@4", "1/2@0", "1/2@3#", "1/2@3#-1"]
)
def test_a_load_of_another_form_is_named(text: str) -> None:
    with pytest.raises(BenchError, match=f"the load '{text}' is not PROMPT/ANSWER@RATE"):
        OpenLoad.parse(text)


def test_loads_have_their_rate_and_their_lengths() -> None:
    same = OpenLoad.parse("6144/256@6.5#1").arrivals(seconds=400)
    assert {(arrival.prompt, arrival.answer) for arrival in same} == {(6144, 256)}
    assert len(same) == pytest.approx(400 * 6.5, rel=0.1)
    assert [a.at for a in same] == sorted(a.at for a in same)
    assert same == OpenLoad.parse("6144/256@6.5#1").arrivals(400)
    assert same != OpenLoad.parse("6144/256@6.5").arrivals(400)
    mixed = OpenLoad.parse("mixed@36#1").arrivals(60)
    assert statistics.median(arrival.prompt for arrival in mixed) == pytest.approx(490, rel=0.1)
    assert statistics.median(arrival.answer for arrival in mixed) == pytest.approx(148, rel=0.1)


def test_an_answer_keeps_the_promise_by_first_token_mean_and_gaps() -> None:
    load = OpenLoad("8/3", 2.0)
    kept = Outcome(end=1.0, late=0.0, ttft=0.5, gaps=(0.01, 0.01))
    outcomes = [
        kept,
        Outcome(end=1.2, late=0.0, ttft=0.7, gaps=(0.01, 0.01)),  # the first token is late
        Outcome(end=1.4, late=0.0, ttft=0.5, gaps=(0.02, 0.02)),  # the mean is long
        Outcome(end=2.0, late=0.0, ttft=0.5, gaps=(0.0, 0.0, 0.04)),  # one gap is long
        Outcome(end=0.0, late=0.0, ttft=0.0, gaps=(), error="refused"),
    ]
    row = figures(load, outcomes)
    assert (row["n"], row["errors"], row["req_s"], row["good"], row["good_s"]) == (
        5, 1, 2.0, 0.2, 0.5,
    )  # fmt: skip
    assert (row["broke_ttft"], row["broke_tpot"], row["broke_gap"]) == (1, 1, 1)
    assert (row["kind"], row["mix"], row["chunks"]) == ("rate 2", "8/3", 13)
    with pytest.raises(BenchError, match="no request was answered: refused"):
        figures(load, outcomes[-1:])
