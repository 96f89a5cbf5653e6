"""From raw data to the report; the command lines of a comparison."""

from __future__ import annotations

import json
import math
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest

from pagewire.loadtest import compare
from pagewire.loadtest.cpu import GENERATOR, MACHINE
from pagewire.loadtest.plots import hit_rates
from pagewire.loadtest.records import ClusterSample, CpuSample, MeasuredRequest, to_line
from pagewire.loadtest.report import ratios, write_report
from pagewire.loadtest.results import Manifest, RunPlan, load_results
from pagewire.loadtest.sampler import cluster_sample, parse_metrics
from pagewire.loadtest.shapes import schedule
from pagewire.loadtest.slo import Percentiles, StageSummary
from pagewire.services.cli.bench.stats import Slo

METRICS = """\
# HELP vllm:prefix_cache_queries_total Prompt tokens that might have been cached
vllm:prefix_cache_queries_total{model_name="m"} 200.0
vllm:prefix_cache_queries_created{model_name="m"} 1.7e+09
vllm:prefix_cache_hits_total{model_name="m"} 5e+01
vllm:num_requests_running{model_name="m"} 3.0
vllm:num_requests_waiting{model_name="m"} 2.0
pagewire_kv_blocks{role="prefill",state="free",worker="prefill-0"} 60.0
pagewire_kv_blocks{role="prefill",state="cached",worker="prefill-0"} 30.0
pagewire_kv_blocks{role="prefill",state="used",worker="prefill-0"} 10.0
pagewire_kv_blocks{role="prefill",state="total",worker="prefill-0"} 100.0
pagewire_kv_blocks{role="decode",state="used",worker="decode-0"} 1.0
pagewire_kv_blocks{role="decode",state="total",worker="decode-0"} 0.0
"""


def test_sample_of_a_metrics_page() -> None:
    sample = cluster_sample(parse_metrics(METRICS), 4.5)
    assert (sample.t, sample.queries, sample.hits) == (4.5, 200.0, 50.0)
    assert (sample.running, sample.waiting) == (3.0, 2.0)
    assert sample.used == {"prefill-0": 0.1}  # a worker without blocks has no share
    assert sample.cached == {"prefill-0": 0.3}


def test_hit_rate_looks_at_a_window_and_not_at_all_time() -> None:
    samples = [
        ClusterSample(t=float(t), queries=q, hits=h, running=0, waiting=0, used={}, cached={})
        for t, q, h in ((0, 0, 0), (1, 100, 0), (10, 100, 0), (15, 200, 90), (30, 200, 90))
    ]
    rates = hit_rates(samples)
    assert [t for t, _ in rates] == [0, 1, 10, 15, 30]
    assert math.isnan(rates[0][1])
    assert [share for _, share in rates[1:4]] == [0.0, 0.0, 0.9]
    assert math.isnan(rates[4][1])


def stage(rate: float, ttft: float, itl: float, goodput: float) -> StageSummary:
    return StageSummary(
        rate=rate,
        duration_s=10,
        requests=10,
        errors=0,
        cancelled=0,
        tokens=100,
        throughput=1,
        goodput=goodput,
        attainment=1,
        cached_share=0,
        ttft=Percentiles(ttft, ttft, ttft, 10),
        itl=Percentiles(itl, itl, itl, 90),
    )


def test_ratios_by_rate() -> None:
    ours = [stage(1, 0.2, 0.01, 1.0), stage(2, 0.4, 0.01, 2.0), stage(3, 1, 1, 1)]
    theirs = [stage(2, 0.1, 0.04, 0.0), stage(1, 0.1, 0.02, 0.5)]
    first, second = ratios(ours, theirs)
    assert (first.rate, first.ttft_p50, first.itl_p99, first.goodput) == (1, 2.0, 0.5, 2.0)
    assert (second.rate, second.ttft_p99) == (2, 4.0)
    assert math.isnan(second.goodput)


def write_run(directory: Path, speed: float) -> None:
    """Make up the files of a run, with random latencies."""
    directory.mkdir()
    rng = random.Random(speed)
    records = [
        MeasuredRequest(
            kind="chat",
            rate=1.0 if start < 5 else 2.0,
            start=float(start),
            token_times=[speed * (i + rng.random()) for i in range(1, 6)],
            end=speed * 6,
            outcome="ok",
            usage_prompt=100,
            usage_completion=5,
            usage_cached=16,
        )
        for start in range(10)
    ]
    records.append(MeasuredRequest("chat", 2.0, 9.0, outcome="error", error="<b>refused</b>"))
    samples = [
        ClusterSample(float(t), 100.0 * t, 16.0 * t, 1, 0, {"decode-0": t / 20}, {"decode-0": 0.1})
        for t in range(10)
    ]
    lines = "".join(to_line(each) for each in records)
    (directory / "records.jsonl").write_text(lines, encoding="utf-8")
    busy = [CpuSample(float(t), {MACHINE: 1.9, GENERATOR: 0.05 * t}) for t in range(1, 16)]
    lines = "".join(to_line(each) for each in busy)
    (directory / "cpu.jsonl").write_text(lines, encoding="utf-8")
    lines = "".join(to_line(each) for each in samples)
    (directory / "samples.jsonl").write_text(lines, encoding="utf-8")


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """The raw data of two runs."""
    write_run(tmp_path / "one", 0.01)
    write_run(tmp_path / "other", 0.02)
    plans = (
        RunPlan("one", "One", ("--decode", "2"), ("ChatUser",)),
        RunPlan("other", "Other", ()),
    )
    manifest = Manifest(
        command="compare --rates 1,2,3",
        date="2026-01-02 03:04 +0000",
        versions={"cpu": "A & B"},
        slo=Slo(0.5, 0.05),
        schedule=tuple(schedule("steps", [1.0, 2.0, 3.0], 5.0)),  # nothing was sent at 3/s
        plans=plans,
        comparisons=(("one", "other"),),
    )
    manifest.save(tmp_path)
    assert Manifest.load(tmp_path) == manifest
    return tmp_path


def test_report_has_tables_comparison_plots_and_escaped_errors(finished: Path) -> None:
    page = write_report(finished).read_text(encoding="utf-8")
    assert "One against Other" in page
    assert "pagewire up --decode 2" in page
    assert "A &amp; B" in page
    assert "&lt;b&gt;refused&lt;/b&gt;" in page
    for name in ("ttft", "itl", "goodput", "throughput", "prefix_hits", "kv_use", "cpu"):
        assert f'src="one-{name}.png"' in page
        content = (finished / f"one-{name}.png").read_bytes()
        assert content.startswith(b"\x89PNG")
        assert len(content) > 5000


def test_summary_is_strict_json_with_the_figures_of_the_runs(finished: Path) -> None:
    write_report(finished)
    text = (finished / "summary.json").read_text(encoding="utf-8")
    summary = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    [one, other] = summary["runs"]
    assert [each["requests"] for each in one["stages"]] == [5, 6, 0]
    assert one["stages"][1]["errors"] == 1
    assert one["stages"][0]["cached_share"] == pytest.approx(0.16)
    assert one["stages"][2]["ttft"]["p50"] is None
    assert other["stages"][0]["ttft"]["p50"] > one["stages"][0]["ttft"]["p50"]


def test_a_single_run_is_shown_without_comparison(finished: Path) -> None:
    manifest = Manifest.load(finished)
    replace(manifest, plans=manifest.plans[:1], comparisons=()).save(finished)
    page = write_report(finished).read_text(encoding="utf-8")
    assert "against" not in page
    assert 'src="all-ttft.png"' in page


def test_report_states_how_many_values_a_p99_has(finished: Path) -> None:
    page = write_report(finished).read_text(encoding="utf-8")
    assert re.search(r"<td>[\d.]+ of 5</td>", page)
    summary = json.loads((finished / "summary.json").read_text(encoding="utf-8"))
    assert [each["ttft"]["count"] for each in summary["runs"][0]["stages"]] == [5, 5, 0]


def test_report_shows_when_the_load_generator_was_the_bottleneck(finished: Path) -> None:
    [one, _] = load_results(finished, Manifest.load(finished))
    assert [one.mean_cores(GENERATOR, rate) for rate in (1, 2)] == pytest.approx([0.15, 0.4])
    assert one.busy_generator_rates == []
    faster = [CpuSample(s.t, {GENERATOR: 2 * s.cores[GENERATOR]}) for s in one.cpu]
    lines = "".join(to_line(each) for each in faster)
    (finished / "one" / "cpu.jsonl").write_text(lines, encoding="utf-8")
    [one, _] = load_results(finished, Manifest.load(finished))
    assert one.busy_generator_rates == [3.0]
    page = write_report(finished).read_text(encoding="utf-8")
    assert "At 3 requests/s the load generator was the bottleneck" in page
    assert "At 2 requests/s the load generator" not in page
    assert any("load generator was the bottleneck" in line for line in compare.table(one))


def test_a_run_without_processor_samples_can_still_be_shown(finished: Path) -> None:
    for path in finished.glob("*/cpu.jsonl"):
        path.unlink()
    page = write_report(finished).read_text(encoding="utf-8")
    assert "busy cores" not in page


def test_results_name_each_error_once(finished: Path) -> None:
    [one, _] = load_results(finished, Manifest.load(finished))
    assert one.errors == ["<b>refused</b>"]


def test_all_compared_clusters_have_the_same_number_of_workers() -> None:
    chosen = compare.plans(compare.parse(["--up", "--device cpu"]))
    assert {name for pair in compare.COMPARISONS for name in pair} == {p.name for p in chosen}
    for plan in chosen:
        words = plan.options
        workers = sum(int(words[words.index(role) + 1]) for role in ("--prefill", "--decode"))
        assert workers == 2
        assert words[-2:] == ("--device", "cpu")


def test_a_running_cluster_is_tested_as_it_is() -> None:
    words = ["--host", "http://127.0.0.1:8000", "--users", "ChatUser,BurstUser"]
    [plan] = compare.plans(compare.parse(words))
    assert (plan.label, plan.options) == ("http://127.0.0.1:8000", ())
    assert plan.users == ("ChatUser", "BurstUser")


def test_what_is_compared_differs_in_the_cluster_alone() -> None:
    chosen = {plan.name: plan for plan in compare.plans(compare.parse([]))}
    for one, other in compare.COMPARISONS:
        assert chosen[one].users == chosen[other].users
        assert chosen[one].options != chosen[other].options


def test_locust_gets_the_load(tmp_path: Path) -> None:
    load = compare.LoadOptions("burst", "2,8", 5.0, 400.0, 30.0)
    words = load.locust_command(compare.Urls("http://h:1", "http://h:2"), tmp_path, ("ChatUser",))
    for option, value in (
        ("--load-shape", "burst"),
        ("--rates", "2,8"),
        ("--slo-ttft-ms", "400.0"),
        ("--host", "http://h:1"),
        ("--out", str(tmp_path)),
    ):
        assert words[words.index(option) + 1] == value
    assert "ChatUser" in words
    assert load.slo == Slo(0.4, 0.03)
