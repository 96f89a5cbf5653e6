"""What the bench of the first requests after "ready" counts, and when it fails."""

from __future__ import annotations

import statistics

import pytest

from pagewire.loadtest.bench.client import TimedAnswer
from pagewire.loadtest.bench.warm import (
    ANSWER_TOKENS,
    CONTEXT,
    PROMPT_TOKENS,
    compare,
    failures,
    late_builds,
    lengths,
    wrong_in,
)
from pagewire.loadtest.sampler import parse_metrics


def answers(*ttft: float, gap: float = 0.01) -> list[TimedAnswer]:
    return [TimedAnswer([first, first + gap], [1, 2]) for first in ttft]


def test_lengths_are_log_normal_around_their_medians_and_fit_into_the_context() -> None:
    prompts, replies = zip(*lengths(2001), strict=True)
    assert statistics.median(prompts) == pytest.approx(PROMPT_TOKENS, rel=0.1)
    assert statistics.median(replies) == pytest.approx(ANSWER_TOKENS, rel=0.1)
    assert all(1 <= sum(pair) <= CONTEXT for pair in lengths(2001))
    assert lengths(9) == lengths(9), "both windows have the same"


@pytest.mark.parametrize(
    ("first", "later", "wrong"),
    [
        (0.20, 0.10, []),  # 100 ms more
        (0.24, 0.10, []),
        (0.26, 0.10, ["TTFT p99"]),  # 160 ms more, and 2.6 times
        (0.44, 0.30, []),  # 1.47 times
        (0.46, 0.30, ["TTFT p99"]),
        (0.55, 0.45, ["1 requests"]),
        (0.70, 0.60, []),  # slow in both
    ],
)
def test_the_first_requests_may_be_a_bit_slower(
    first: float, later: float, wrong: list[str]
) -> None:
    row = compare(answers(0.05, first), answers(0.05, later))
    found = failures(row)
    assert len(found) == len(wrong)
    assert all(line.startswith(start) for line, start in zip(found, wrong, strict=True)), found


def test_a_stream_that_stalls_once_ready_is_slow() -> None:
    assert compare(answers(0.1, gap=0.6), answers(0.1))["slow"] == 1
    assert compare(answers(0.1, gap=0.6), answers(0.1, gap=0.6))["slow"] == 0


def test_each_late_build_of_a_worker_is_a_failure() -> None:
    page = """
pagewire_engine_builds_total{kind="compiled",when="early",worker="decode-0"} 50
pagewire_engine_builds_total{kind="compiled",when="late",worker="decode-0"} 2
pagewire_engine_builds_total{kind="captured",when="late",worker="prefill-0"} 0
"""
    built = late_builds(parse_metrics(page))
    assert built == {'kind="compiled",when="late",worker="decode-0"': 2}
    row = {"cluster": "both", "cache": "filled", "built": built}
    assert wrong_in(row) == [
        'both, filled cache: 2 built after ready: kind="compiled",when="late",worker="decode-0"'
    ]
    assert wrong_in({**row, "built": {}}) == []
