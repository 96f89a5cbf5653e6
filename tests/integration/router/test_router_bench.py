"""The router's bench: the fields of its lines, and that it refuses wrong tokens."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

COMMAND = [sys.executable, "-P", "-m", "pagewire.loadtest.bench.router"]
SMALL = ["--streams", "8", "--repeats", "1"]


def run(*options: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *SMALL, *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        env={**os.environ, **env},
    )


def test_a_line_for_each_case_has_its_figures() -> None:
    done = run("--seconds", "1", "--tokens-per-event", "1", "4", "--routers", "2")
    assert (done.returncode, done.stderr) == (0, "")
    lines = [line.removeprefix("RESULT ") for line in done.stdout.splitlines()]
    one, four, short = map(json.loads, lines)
    for row, tokens in ((one, 1), (four, 4)):
        assert (row["what"], row["streams"], row["tokens_per_event"]) == ("router", 8, tokens)
        assert row["routers"] == 2
        assert 0 < row["low"] <= row["events_per_cpu_s"] <= row["high"]
        assert row["tokens_per_cpu_s"] == pytest.approx(tokens * row["events_per_cpu_s"], rel=0.1)
        assert 0 < row["added_p50_ms"] <= row["added_p99_ms"]
        assert 0 < row["loop_cores"] <= row["cores"] < 2.1
        assert 0 < row["of_relay"] < 1
        assert (row["nginx_events_per_cpu_s"] is None) == (row["of_nginx"] is None)
    assert short["what"] == "router_requests"
    assert short["requests_per_cpu_s"] > 0


def test_a_router_and_a_worker_may_have_no_stream() -> None:
    done = run("--seconds", "0.5", "--tokens-per-event", "1", "--routers", "2", "--streams", "1")
    assert (done.returncode, done.stderr) == (0, "")
    assert [line[:7] for line in done.stdout.splitlines()] == ["RESULT "] * 2


@pytest.mark.parametrize("fault", ["change", "lose"])
def test_a_wrong_or_missing_token_ends_the_bench(fault: str) -> None:
    program = "pagewire.tests.support.wrong_router"
    done = run("--seconds", "0.4", "--program", program, WRONG_ROUTER=fault)
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r"error: stream \d: wrong text at token \d+: .*\n", done.stderr)
