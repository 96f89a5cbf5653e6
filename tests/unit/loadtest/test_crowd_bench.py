"""What the bench of many clients counts of an answer, and when the clients start."""

from __future__ import annotations

from itertools import pairwise

from pagewire.loadtest.bench.client import TimedAnswer
from pagewire.loadtest.bench.crowd import SPREAD, CrowdMeasurements, start_delays


def test_only_what_arrives_in_the_measured_time_counts() -> None:
    seen = CrowdMeasurements()
    seen.add(TimedAnswer([0.5, 1.5, 1.5, 2.0, 3.5], [1] * 5), began=10.0, span=(11.0, 13.0))
    assert seen.tokens == [0, 2, 1, 0, 0]
    assert list(seen.gaps) == [1000.0, 500.0], "tokens of one chunk have one gap"
    assert not seen.ttft
    seen.add(TimedAnswer([0.25], [1]), began=12.0, span=(11.0, 13.0))
    assert list(seen.ttft) == [250.0]
    assert seen.tokens == [0, 2, 1, 1, 0]


def test_clients_start_one_after_the_other() -> None:
    delays = start_delays(10, warm_up_s=20.0)
    gaps = {round(after - before, 6) for before, after in pairwise(delays)}
    assert (len(delays), delays[0], gaps) == (10, 0.0, {SPREAD * 20 / 10})
