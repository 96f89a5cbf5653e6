"""`pagewire bench` keeps its results: Ctrl-C again and again, files that cannot be written."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagewire.tests.support.openai_server import OpenAIServer, openai_server

CLI = [sys.executable, "-P", "-m", "pagewire.services.cli.main"]


@pytest.fixture
def endpoint() -> Iterator[OpenAIServer]:
    with openai_server() as server:
        yield server


def start(endpoint: OpenAIServer, file: str, *options: str) -> subprocess.Popen[str]:
    command = [*CLI, "bench", "--url", endpoint.url, "--json", file, *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def end(process: subprocess.Popen[str]) -> tuple[str, str]:
    try:
        return process.communicate(timeout=20)
    finally:
        process.kill()


# Seconds between one Ctrl-C and the next: while requests end, the report is made, or all at once.
@pytest.mark.parametrize("gaps", [[0.0] * 20, [0.001] * 20, [0.005] * 20, [0.02] * 10], ids=max)
@pytest.mark.parametrize("to", ["file", "stdout"])
def test_more_ctrl_c_change_nothing(
    endpoint: OpenAIServer, tmp_path: Path, gaps: list[float], to: str
) -> None:
    file = str(tmp_path / "r.json") if to == "file" else "-"
    process = start(endpoint, file, "--duration", "60", "--concurrency", "16")
    while len(endpoint.bodies) < 40:
        assert process.poll() is None
        time.sleep(0.02)
    for gap in gaps:
        process.send_signal(signal.SIGINT)
        time.sleep(gap)
    output, errors = end(process)
    # One after the report ends the process at once.
    assert process.returncode in (130, -signal.SIGINT), errors
    assert "Traceback" not in errors and "Exception" not in errors
    report = json.loads(output if to == "stdout" else Path(file).read_text())
    assert report["requests"]["ok"] > 0
    assert "requests answered" in (errors if to == "stdout" else output)


def test_ctrl_c_before_anything_is_measured(endpoint: OpenAIServer, tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    endpoint.delay_s = 2.0
    process = start(endpoint, str(file))
    while not endpoint.bodies:
        assert process.poll() is None
        time.sleep(0.02)
    for _ in range(5):
        process.send_signal(signal.SIGINT)
    output, errors = end(process)
    assert process.returncode in (130, -signal.SIGINT)
    assert (output, errors, file.exists()) == ("", "", False)


@pytest.mark.parametrize(
    ("name", "part"),
    [("no-such/r.json", "No such file"), (".", "Is a directory"), ("file/r.json", "Not a dir")],
    ids=["no-directory", "directory", "below-a-file"],
)
def test_json_file_is_checked_before_the_load(
    endpoint: OpenAIServer, tmp_path: Path, name: str, part: str
) -> None:
    (tmp_path / "file").touch()
    process = start(endpoint, str(tmp_path / name), "--requests", "2")
    output, errors = end(process)
    assert (process.returncode, output, endpoint.bodies) == (2, "", [])
    assert errors.startswith("pagewire: --json ") and errors.count("\n") == 1
    assert part in errors


def test_older_results_stay_until_there_are_new_ones(
    endpoint: OpenAIServer, tmp_path: Path
) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text("old")
    endpoint.mode = "busy"
    for file in (old, new):
        process = start(endpoint, str(file), "--requests", "2")
        _, errors = end(process)
        assert process.returncode == 1 and "come back later" in errors
    assert (old.read_text(), new.exists()) == ("old", False)


def test_results_go_through_a_link(endpoint: OpenAIServer, tmp_path: Path) -> None:
    link, target = tmp_path / "link.json", tmp_path / "target.json"
    link.symlink_to(target)
    process = start(endpoint, str(link), "--requests", "2")
    _, errors = end(process)
    assert process.returncode == 0, errors
    assert link.is_symlink() and json.loads(target.read_text())["requests"]["ok"] == 2


def test_full_stdout_loses_no_file(endpoint: OpenAIServer, tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    command = [*CLI, "bench", "--url", endpoint.url, "--json", str(file), "--requests", "2"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, check=False, timeout=60)
    assert done.returncode == 1
    assert json.loads(file.read_text())["requests"]["ok"] == 2


def test_full_file_loses_no_table(endpoint: OpenAIServer) -> None:
    process = start(endpoint, "/dev/full", "--requests", "2")
    output, errors = end(process)
    assert process.returncode == 2
    assert "2 of 2 requests" in output
    assert errors == "pagewire: --json /dev/full cannot be written: No space left on device\n"
