"""`pagewire bench` as a user runs it."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from pagewire.tests.support.client_cluster import (
    ANSWER,
    CLI,
    Cluster,
    client_cluster,
    pagewire,
)
from pagewire.tests.support.openai_server import OpenAIServer, openai_server


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with client_cluster() as found:
        yield found


@pytest.fixture
def old() -> Iterator[OpenAIServer]:
    with openai_server() as server:
        yield server


def bench(url: str, file: Path, *options: str) -> tuple[Result, dict[str, Any]]:
    done = pagewire("bench", "--url", url, "--json", str(file), *options)
    return done, json.loads(file.read_text())


def test_bench_counts_by_token_ids(cluster: Cluster, tmp_path: Path) -> None:
    slo = ["--slo-ttft", "2000", "--slo-itl", "0.001"]
    done, report = bench(
        cluster.url, tmp_path / "r.json", "--requests", "12", "--concurrency", "4", *slo
    )
    assert done.exit_code == 0, done.stderr
    assert report["requests"]["ok"] == report["requests"]["sent"] == 12
    assert report["tokens"]["output"] == 12 * len(ANSWER)
    assert (report["tokens"]["counted_by_chunks"], report["tokens"]["miscounted"]) == (0, 0)
    assert report["tokens"]["prompt_per_request"]["mean"] == pytest.approx(128, abs=15)
    assert report["itl_ms"]["p50"] == pytest.approx(20, abs=15)
    assert report["ttft_ms"]["p50"] <= report["ttft_ms"]["p99"] < report["e2e_ms"]["p99"]
    assert report["goodput"]["good"] == 0
    assert "12 of 12 requests" in done.stdout


def test_bench_at_a_rate_for_a_time(cluster: Cluster, tmp_path: Path) -> None:
    options = ["--rate", "20", "--arrivals", "fixed", "--duration", "1", "--endpoint", "chat"]
    done, report = bench(cluster.url, tmp_path / "r.json", *options, "--max-in-flight", "500")
    assert done.exit_code == 0, done.stderr
    assert 18 <= report["requests"]["sent"] <= 20
    assert report["requests"]["failed"] == 0
    assert report["start_lag_ms"]["p50"] < 100


def test_bench_does_not_exceed_its_bound(cluster: Cluster, tmp_path: Path) -> None:
    options = ["--rate", "200", "--requests", "40", "--max-in-flight", "3"]
    done, report = bench(cluster.url, tmp_path / "r.json", *options)
    assert done.exit_code == 0, done.stderr
    errors = report["requests"]["errors"]
    assert errors.keys() == {"not sent: in-flight limit"}
    assert report["requests"]["ok"] == 40 - sum(errors.values()) >= 3


def test_bench_without_token_ids_counts_by_usage(old: OpenAIServer, tmp_path: Path) -> None:
    old.mode = "usage"
    done, report = bench(old.url, tmp_path / "r.json", "--requests", "3")
    assert done.exit_code == 0, done.stderr
    assert (report["tokens"]["output"], report["tokens"]["prompt"]) == (12, 21)
    assert len(old.bodies) == 1 + 2 + 3  # what it does not know is asked for only once


def test_bench_without_any_count_says_so(old: OpenAIServer, tmp_path: Path) -> None:
    done, report = bench(old.url, tmp_path / "r.json", "--requests", "3")
    assert (report["tokens"]["output"], report["tokens"]["counted_by_chunks"]) == (9, 3)
    assert "each chunk of text counts" in done.stdout


def test_bench_of_an_endpoint_that_always_refuses_fails(cluster: Cluster, tmp_path: Path) -> None:
    too_long = ["--requests", "3", "--prompt-tokens", "1000", "--output-tokens", "1000000"]
    done, report = bench(cluster.url, tmp_path / "r.json", *too_long)
    assert done.exit_code == 1
    assert report["requests"]["errors"] == {"http 400": 3}
    assert "maximum context length" in done.stdout


def test_bench_shows_what_it_has_when_interrupted(cluster: Cluster, tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    command = [*CLI, "bench", "--url", cluster.url, "--duration", "60", "--json", str(file)]
    before = len(cluster.worker.generated)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        while len(cluster.worker.generated) < before + 20:
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=20)
    assert process.returncode == 130, errors
    report = json.loads(file.read_text())
    assert report["requests"]["ok"] > 0
    assert report["requests"]["unfinished"] > 0
    assert "not ended when the bench was stopped" in output
