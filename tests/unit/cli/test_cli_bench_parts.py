"""The pure parts of the bench: lengths, prompts, arrivals, percentiles, goodput."""

import itertools
import math
import random
import statistics
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewire.services.cli.bench.command import make_plan
from pagewire.services.cli.bench.load import (
    WORDS,
    Lengths,
    TokenRatio,
    Workload,
    arrival_times,
    text_of,
)
from pagewire.services.cli.bench.stats import Results, Samples, Slo, mean_gap, percentile
from pagewire.services.cli.bench.view import summary_lines
from pagewire.services.cli.client.openai_client import Reply
from pagewire.services.cli.client.openai_messages import PromptDetails, Usage
from pagewire.shared.base.errors import ConfigError

OPTIONS: dict[str, Any] = {
    "rate": None,
    "arrivals": "poisson",
    "concurrency": None,
    "requests": None,
    "duration": None,
    "max_in_flight": 1024,
    "endpoint": "completions",
    "prompt_tokens": "128",
    "output_tokens": "64",
    "shared_prefix": 0,
    "seed": None,
    "slo_ttft": None,
    "slo_itl": None,
}


def reply(*times: float, usage: Usage | None = None, ids: bool = True) -> Reply:
    """One token at each of the times."""
    return Reply(
        finish_reason="stop",
        usage=usage,
        arrivals=array("d", times),
        counts=array("l", [1] * len(times)),
        has_token_ids=ids,
        seconds=times[-1] if times else 0.0,
    )


@pytest.mark.parametrize(
    ("percent", "value"), [(0, 1), (10, 1), (50, 5), (51, 6), (90, 9), (99, 10), (100, 10)]
)
def test_percentile_is_the_nearest_rank(percent: float, value: float) -> None:
    assert percentile(range(10, 0, -1), percent) == value


def test_percentile_of_few_values() -> None:
    assert percentile([7.0], 99) == 7.0
    assert percentile([1.0, 2.0], 50) == 1.0
    assert math.isnan(percentile([], 50))


@given(st.lists(st.floats(0, 100), min_size=1), st.floats(0, 100))
def test_percentile_has_its_share_at_or_below(values: list[float], percent: float) -> None:
    found = percentile(values, percent)
    below = sum(value <= found for value in values)
    assert below >= percent / 100 * len(values) * (1 - 1e-9)
    assert found in values


def test_samples_are_exact_up_to_their_limit() -> None:
    samples = Samples(limit=100)
    for value in range(1, 101):
        samples.add(value)
    expected = {"mean": 50.5, "p50": 50, "p90": 90, "p99": 99, "max": 100}
    assert samples.summary() == expected
    assert samples.summary(1e3) == {name: value * 1e3 for name, value in expected.items()}


def test_samples_beyond_their_limit_are_a_fair_choice() -> None:
    samples = Samples(limit=1000)
    for value in range(100_000):
        samples.add(value)
    found = samples.summary()
    assert found is not None
    assert (samples.count, found["max"], found["mean"]) == (100_000, 99_999, 49_999.5)
    assert found["p50"] == pytest.approx(50_000, rel=0.1)
    assert found["p90"] == pytest.approx(90_000, rel=0.05)


def test_no_samples_have_no_summary() -> None:
    assert Samples().summary() is None


def test_fixed_arrivals_are_evenly_spaced() -> None:
    times = list(itertools.islice(arrival_times("fixed", 4.0, 0), 1001))
    assert times[:3] == [0.0, 0.25, 0.5]
    assert times[-1] == 250.0  # no drift


def test_poisson_arrivals_have_their_rate_and_spread() -> None:
    times = list(itertools.islice(arrival_times("poisson", 4.0, 1), 5001))
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert times[0] == 0.0
    assert statistics.mean(gaps) == pytest.approx(0.25, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.25, rel=0.1)
    assert sum(gap > 0.25 for gap in gaps) / len(gaps) == pytest.approx(math.exp(-1), abs=0.03)


def test_arrivals_repeat_by_their_seed() -> None:
    one, same, other = (
        list(itertools.islice(arrival_times("poisson", 4.0, seed), 10)) for seed in (1, 1, 2)
    )
    assert one == same != other


@pytest.mark.parametrize(
    ("text", "bounds"), [("128", (128, 128)), ("64:256", (64, 256)), ("1:1", (1, 1))]
)
def test_lengths(text: str, bounds: tuple[int, int]) -> None:
    lengths = Lengths.parse(text)
    assert (lengths.low, lengths.high) == bounds
    rng = random.Random(0)
    drawn = {lengths.draw(rng) for _ in range(2000)}
    assert (min(drawn), max(drawn)) == bounds


@pytest.mark.parametrize("text", ["", "a", "0", "-1", "9:3", "1:2:3", "1.5", "99999999999", "٣:x"])
def test_wrong_lengths(text: str) -> None:
    with pytest.raises(ConfigError, match="tokens"):
        Lengths.parse(text)


def test_ratio_turns_tokens_into_words() -> None:
    ratio = TokenRatio.measure((100, 130), (200, 250))
    assert (ratio.per_word, ratio.fixed) == pytest.approx((1.2, 10.0))
    assert ratio.words(130) == 100
    assert ratio.words(3) == 1


def test_ratio_without_usage_counts_words() -> None:
    assert TokenRatio.measure((100, 0), (200, 0)).words(128) == 128


def test_text_uses_words_alike() -> None:
    words = text_of(random.Random(0), 3 * len(WORDS)).split()
    assert all(words.count(word) == 3 * WORDS.count(word) for word in WORDS)


def workload(shared: int = 0, seed: int = 0) -> Workload:
    ratio = TokenRatio(fixed=10, per_word=2.0)
    return Workload(Lengths(110, 210), Lengths(4, 8), shared, ratio, seed)


def test_requests_have_the_asked_lengths_and_are_not_alike() -> None:
    requests = [workload().request(index) for index in range(50)]
    assert all(50 <= len(request.prompt.split()) <= 100 for request in requests)
    assert {request.output_tokens for request in requests} == set(range(4, 9))
    assert len({" ".join(request.prompt.split()[:6]) for request in requests}) == 50


def test_requests_repeat_by_seed_and_index() -> None:
    assert workload().request(7) == workload().request(7)
    assert workload().request(7) != workload(seed=1).request(7)


def test_shared_prefix_is_part_of_the_length() -> None:
    requests = [workload(shared=60).request(index) for index in range(20)]
    heads = {" ".join(request.prompt.split()[:30]) for request in requests}
    assert len(heads) == 1
    assert len({request.prompt.split()[30] for request in requests}) > 1
    assert all(50 <= len(request.prompt.split()) <= 100 for request in requests)


@pytest.mark.parametrize(
    ("slo", "kept"),
    [
        (Slo(), True),
        (Slo(ttft_s=0.5), True),
        (Slo(ttft_s=0.49), False),
        (Slo(itl_s=0.25), True),
        (Slo(itl_s=0.24), False),
        (Slo(ttft_s=0.5, itl_s=0.24), False),
    ],
    ids=str,
)
def test_slo_bounds_first_token_and_mean_gap(slo: Slo, kept: bool) -> None:
    assert keeps(slo, reply(0.5, 0.6, 1.0)) is kept


def keeps(slo: Slo, answer: Reply) -> bool:
    return slo.is_met(answer.ttft, mean_gap(answer))


def test_slo_of_replies_without_gaps() -> None:
    assert keeps(Slo(itl_s=0.001), reply(0.5))
    assert not keeps(Slo(ttft_s=1.0), reply())


def test_results_add_up() -> None:
    results = Results(Slo(ttft_s=0.5), sent=5)
    usage = Usage(10, 2, PromptDetails(4))
    results.add_reply(reply(0.4, 0.6, usage=usage))
    results.add_reply(reply(0.6, 1.0, usage=Usage(10, 3)))  # says 3, sent 2
    results.add_reply(reply(0.1, ids=False))
    results.add_error("http 429", "full")
    report = results.report(2.0)
    assert report["requests"] == {
        "sent": 5,
        "ok": 3,
        "failed": 1,
        "unfinished": 1,
        "errors": {"http 429": 1},
        "first_messages": {"http 429": "full"},
    }
    assert report["throughput"]["requests_per_s"] == 1.5
    assert report["throughput"]["output_tokens_per_s"] == 2.5
    assert report["throughput"]["total_tokens_per_s"] == 12.5
    assert (report["tokens"]["counted_by_chunks"], report["tokens"]["miscounted"]) == (1, 1)
    assert report["tokens"]["cached"] == 4
    assert report["itl_ms"]["max"] == pytest.approx(400)
    assert report["goodput"] == {
        "slo_ttft_ms": 500.0,
        "slo_itl_ms": None,
        "good": 2,
        "share": 0.4,
        "requests_per_s": 1.0,
    }
    text = "\n".join(summary_lines(report))
    for part in ("3 of 5 requests", "TTFT <= 500 ms", "http 429: 1 (full)", "1 not ended"):
        assert part in text


def test_report_of_nothing() -> None:
    report = Results().report(0.0)
    assert report["ttft_ms"] is None
    assert list(summary_lines(report)) == ["0 of 0 requests answered in 0.00 s"]


def test_plan_has_an_end_and_a_seed_of_its_own() -> None:
    plan, other = make_plan(OPTIONS), make_plan(OPTIONS)
    assert (plan.pace.requests, plan.pace.duration_s, plan.pace.concurrency) == (100, None, 8)
    assert plan.seed != other.seed
    timed = make_plan(OPTIONS | {"duration": 3.0, "slo_itl": 50.0, "seed": 5})
    assert (timed.pace.requests, timed.pace.duration_s) == (None, 3.0)
    assert (timed.slo, timed.seed) == (Slo(None, 0.05), 5)


def test_plan_shows_no_key() -> None:
    assert "secret" not in str(make_plan(OPTIONS | {"api_key": "secret"}).config("m", "u"))


@pytest.mark.parametrize(
    "options",
    [{"rate": 1.0, "concurrency": 2}, {"shared_prefix": 129}, {"prompt_tokens": "x"}],
    ids=["two-paces", "prefix-longer-than-prompt", "no-length"],
)
def test_plan_refuses(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        make_plan(OPTIONS | options)
