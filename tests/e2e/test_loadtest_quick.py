"""The load test at its smallest: a real cluster, real locust, and arithmetic that must be exact."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pagewire.loadtest.cpu import GENERATOR, MACHINE, OTHERS
from pagewire.loadtest.records import ClusterSample, CpuSample, MeasuredRequest, read_lines
from pagewire.loadtest.results import Manifest
from pagewire.loadtest.slo import is_good

pytestmark = pytest.mark.timeout(180)

RATE, STAGE_S = 6.0, 5.0


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a finished quick run."""
    out = tmp_path_factory.mktemp("loadtest")
    command = [sys.executable, "-P", "-m", "pagewire.loadtest.compare", "--quick"]
    command += ["--rates", f"{RATE:g}", "--stage-s", f"{STAGE_S:g}", "--up", "--device cpu"]
    done = subprocess.run(
        [*command, "--out", str(out)], capture_output=True, text=True, timeout=150, check=False
    )
    logs = "".join(log.read_text(encoding="utf-8") for log in out.glob("*/*/locust.log"))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    [directory] = out.iterdir()
    assert f"report: {directory / 'report.html'}" in done.stdout
    return directory


@pytest.fixture(scope="module")
def records(report: Path) -> list[MeasuredRequest]:
    """The finished requests."""
    every = read_lines(report / "disaggregated" / "records.jsonl", MeasuredRequest)
    return [record for record in every if record.outcome != "unfinished"]


@pytest.fixture(scope="module")
def summary(report: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((report / "summary.json").read_text(encoding="utf-8"))
    return found


def locust_counts(report: Path) -> tuple[Counter[str], Counter[str]]:
    """Return entries and failures of locust's own table, by request type."""
    entries: Counter[str] = Counter()
    failures: Counter[str] = Counter()
    stats = (report / "disaggregated" / "locust.json").read_text(encoding="utf-8")
    for row in json.loads(stats):
        entries[row["method"]] += row["num_requests"]
        failures[row["method"]] += row["num_failures"]
    return entries, failures


def test_requests_came_and_none_failed(records: list[MeasuredRequest]) -> None:
    assert len(records) >= RATE * STAGE_S / 3
    assert {record.outcome for record in records} <= {"ok", "cancelled"}
    assert len({record.kind for record in records}) >= 3
    assert {record.rate for record in records} == {RATE}


def test_tokens_counted_equal_the_servers_usage(records: list[MeasuredRequest]) -> None:
    for record in records:
        if record.outcome == "ok":
            assert len(record.token_times) == record.usage_completion
        else:
            assert record.usage_completion is None


def test_locust_has_an_entry_for_every_request_and_every_token(
    report: Path, records: list[MeasuredRequest]
) -> None:
    entries, failures = locust_counts(report)
    tokens = sum(len(record.token_times) for record in records)
    assert entries["TTFT"] == entries["GOODPUT"] == len(records)
    assert entries["E2E"] + entries["CANCEL"] == len(records)
    assert entries["CANCEL"] == sum(record.outcome == "cancelled" for record in records)
    assert entries["ITL"] == tokens - len(records)
    slo = Manifest.load(report).slo
    missed = sum(not is_good(record, slo) for record in records)
    assert failures == Counter({"GOODPUT": missed})


def test_summary_says_the_same(
    records: list[MeasuredRequest], summary: dict[str, Any], report: Path
) -> None:
    [run] = summary["runs"]
    [stage] = run["stages"]
    slo = Manifest.load(report).slo
    assert stage["requests"] == len(records)
    assert stage["tokens"] == sum(len(record.token_times) for record in records)
    good = sum(is_good(record, slo) for record in records)
    assert stage["goodput"] * STAGE_S == pytest.approx(good)
    assert run["errors"] == []


def test_router_counted_the_prompts_that_were_answered(
    report: Path, records: list[MeasuredRequest]
) -> None:
    samples = read_lines(report / "disaggregated" / "samples.jsonl", ClusterSample)
    assert len(samples) >= STAGE_S
    assert set(samples[-1].used) == {"prefill-0", "decode-0"}
    known = sum(record.usage_prompt or 0 for record in records)
    hits = sum(record.usage_cached or 0 for record in records)
    if all(record.outcome == "ok" for record in records):
        assert (samples[-1].queries, samples[-1].hits) == (known, hits)
    else:  # of those that were cut the client does not learn the usage
        assert samples[-1].queries > known
        assert samples[-1].hits >= hits
    assert any(max(sample.used.values(), default=0) > 0 for sample in samples)


def test_the_processes_use_of_the_processor_was_sampled(
    report: Path, summary: dict[str, Any]
) -> None:
    samples = read_lines(report / "disaggregated" / "cpu.jsonl", CpuSample)
    during = [sample for sample in samples if sample.t <= STAGE_S]
    assert STAGE_S / 2 <= len(during) <= STAGE_S
    services = {"pagewire up", "router", "redis", "prefill-0", "decode-0"}
    for sample in during:
        assert sample.cores.keys() == services | {GENERATOR, MACHINE, OTHERS}
    [run] = summary["runs"]
    [stage] = run["stages"]
    assert 0 < stage["cores"][GENERATOR] < 1.2
    assert 0 < stage["cores"]["decode-0"] < stage["cores"][MACHINE]
    assert 'alt="Use of the processor' in (report / "report.html").read_text(encoding="utf-8")


def test_report_and_plots_are_there(report: Path) -> None:
    assert (report / "report.html").stat().st_size > 2000
    assert len(list(report.glob("*.png"))) == 7
    assert (report / "disaggregated" / "locust.html").exists()
