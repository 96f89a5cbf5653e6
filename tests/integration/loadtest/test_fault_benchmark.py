"""The fault benchmark counts all that an endpoint does wrong, and nothing else."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pagewire.loadtest.faults.run import run
from pagewire.tests.support.aio import wait_until
from pagewire.tests.support.local_cluster import free_port

# The endpoint's faults, by the names of commands that scenarios have.
SYSTEM = """
name = "a faulty endpoint"
url = "http://127.0.0.1:$PORT"
health = ["http://127.0.0.1:$PORT/health"]
vocab = 1000
whole = "! test -e $RUN/pause"
start_timeout_s = 30
[processes]
server = "rm -f $RUN/pause; exec $PYTHON -P -m pagewire.tests.support.faulty_endpoint $PORT $RUN"
[commands]
"kill decode" = "touch $RUN/drop"
"kill prefill" = "touch $RUN/change"
"kill router" = "touch $RUN/pause"
"freeze decode" = "touch $RUN/pause"
"thaw decode" = "rm $RUN/pause"
"cut link" = "touch $RUN/leak"
"mend link" = "true"
restart = ["true", "echo no such pod >&2; exit 3"]
[kv]
metrics = ["kv_blocks"]
labels = {state = "used"}
pages = ["http://127.0.0.1:$PORT/metrics"]
free_timeout_s = 1
"""
PROGRAM = (sys.executable, "-P", "-m", "pagewire.loadtest.faults.run")
LOAD = "--seconds 0.6 --rate 16 --prompt-tokens 4:8 --output-tokens 8:16 --long-prompt-tokens 50"
LOAD += " --storm-clients 8 --storm-stay-s 0.1 --freeze-s 0.5 --probe-clients 2 --long-rate 5"
LOAD += " --timeout 1 --recovery-s 0.5"


def benchmark(folder: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """Run the benchmark; returns its exit code and its results."""
    description = folder / "system.toml"
    if not description.exists():
        description.write_text(SYSTEM)
    words = [str(description), *LOAD.split(), "--set", f"PORT={free_port()}"]
    code = run([*words, "--out", str(folder), *options])
    return code, json.loads((folder / "faults.json").read_text())


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results of a run with all scenarios."""
    code, results = benchmark(tmp_path_factory.mktemp("faults"), "--require")
    assert code == 1
    return results


@pytest.fixture(scope="module")
def results(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {each["scenario"]: each for each in report["report"]["results"]}


def test_a_calm_run_is_fine(report: dict[str, Any]) -> None:
    assert report["report"]["unstable"] == []
    calm = report["report"]["calm"]
    assert calm["requests"] >= 5
    assert calm["failed"] == 0


def test_a_stream_that_breaks_off_has_failed(results: dict[str, dict[str, Any]]) -> None:
    summary = results["kill decode"]["summary"]
    assert summary["failed"] == 1
    assert summary["errors"] == {"cut off": 1}
    assert summary["first_errors"] == ["the stream ended before the answer was complete"]
    assert summary["different"] == []


def test_a_changed_token_is_found(results: dict[str, dict[str, Any]]) -> None:
    summary = results["kill prefill"]["summary"]
    assert (summary["failed"], len(summary["different"])) == (0, 1)


def test_a_pause_is_a_gap_in_which_the_system_is_not_whole(
    report: dict[str, Any], results: dict[str, dict[str, Any]]
) -> None:
    result = results["freeze decode"]
    assert result["summary"]["failed"] == 0
    longest = max(result["summary"]["longest_gap_s"], result["summary"]["longest_first_s"])
    assert 0.25 < longest < 5
    assert 0.4 < result["full_after_s"] < 5
    assert [command for _, command in result["faults"]] == ["freeze decode", "thaw decode"]
    calm = report["report"]["calm"]["requests"]
    assert result["summary"]["requests"] >= 2 * calm, "streams were repeated until the thaw"


def test_a_system_that_does_not_come_back_is_started_again(
    report: dict[str, Any], results: dict[str, dict[str, Any]]
) -> None:
    result = results["kill router"]
    assert (result["is_whole"], result["full_after_s"]) == (False, None)
    assert result["summary"]["failed"] == result["summary"]["errors"]["timeout"] > 3
    assert report["problems"]["kill router"][-1] == "the system was not whole again"


def test_a_leak_is_kv_that_is_not_freed(
    report: dict[str, Any], results: dict[str, dict[str, Any]]
) -> None:
    assert results["cut link"]["kv_not_freed"] == 1
    assert report["problems"]["cut link"] == ["KV was not freed"]
    assert results["kill decode"]["kv_not_freed"] == 0


def test_what_was_not_tried_is_never_passed(results: dict[str, dict[str, Any]]) -> None:
    assert "no command 'freeze prefill'" in results["freeze prefill"]["not_tried"]
    assert results["freeze prefill"]["summary"] is None
    failed = results["rolling restart"]["not_tried"]
    assert failed == "command 'restart' failed with 3: no such pod"


def test_clients_that_leave_have_not_failed(results: dict[str, dict[str, Any]]) -> None:
    summary = results["abort storm"]["summary"]
    assert summary["left"] >= 6
    assert (summary["failed"], summary["different"]) == (0, [])
    assert results["abort storm"]["kv_not_freed"] == 0
    assert results["long prompts"]["summary"]["requests"] > summary["requests"] - 8


def test_a_retry_hides_what_was_dropped(tmp_path: Path) -> None:
    """Of a system that reports neither its KV nor its parts: both are measured by capacity."""
    lines = [line for line in SYSTEM.partition("[kv]")[0].splitlines() if "whole =" not in line]
    (tmp_path / "system.toml").write_text("\n".join(lines))
    options = ("--scenario", "kill decode", "--retry", "1", "--recovery-s", "30")
    code, results = benchmark(tmp_path, *options)
    assert code == 0
    [result] = results["report"]["results"]
    assert (result["summary"]["retried"], result["summary"]["failed"]) == (1, 0)
    assert result["kv_not_freed"] is None
    assert result["capacity"] > 0.5
    assert result["full_after_s"] > 0.3, "it is measured after the run"


def test_no_process_is_left(report: dict[str, Any]) -> None:
    folder = Path(report["command"].partition("--out ")[2].split()[0])
    assert not is_running(folder / "server.pid")


def is_running(pid_file: Path) -> bool:
    try:
        os.kill(int(pid_file.read_text()), 0)
    except ProcessLookupError:
        return False
    return True


def test_a_benchmark_that_is_stopped_ends_faults_and_processes(tmp_path: Path) -> None:
    (tmp_path / "system.toml").write_text(SYSTEM)
    words = [*LOAD.split(), "--set", f"PORT={free_port()}", "--out", str(tmp_path)]
    words += ["--scenario", "freeze decode", "--freeze-s", "60", "--timeout", "60"]
    process = subprocess.Popen(
        [*PROGRAM, str(tmp_path / "system.toml"), *words], stdout=subprocess.PIPE, text=True
    )
    pause = tmp_path / "pause"
    try:
        wait_until(lambda: pause.exists() or process.poll() is not None, 60, every=0.05)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGINT, output
    assert not pause.exists()
    assert not is_running(tmp_path / "server.pid")


def test_a_wrong_command_line_is_one_line() -> None:
    done = subprocess.run([*PROGRAM, "nothing"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: nothing: No such file or directory; name a file, or one ")
    assert done.stderr.count("\n") == 1
