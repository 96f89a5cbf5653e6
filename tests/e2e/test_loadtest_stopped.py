"""A load test that is stopped in the middle takes its cluster and its load generator along."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(180)

START_S, STOP_S = 90.0, 60.0


def processes_of(directory: Path) -> list[int]:
    """Ids of processes whose command line names a directory."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if str(directory) in command:
                found.append(int(entry.name))
    return found


def wait_for(condition: Callable[[], object], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s"
        time.sleep(0.1)


@pytest.mark.parametrize("phase", ["start", "load"])
def test_a_stopped_comparison_leaves_nothing_running(tmp_path: Path, phase: str) -> None:
    command = [sys.executable, "-P", "-m", "pagewire.loadtest.compare", "--quick"]
    command += ["--stage-s", "120", "--up", "--device cpu", "--out", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    pattern = "*/*/logs/up.log" if phase == "start" else "*/*/locust.log"
    try:
        wait_for(lambda: list(tmp_path.glob(pattern)) or process.poll() is not None, START_S)
        time.sleep(3)  # the processes are there, and do something
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=STOP_S)
        assert process.returncode == 128 + signal.SIGTERM
        assert errors == b""
        wait_for(lambda: not processes_of(tmp_path), 1)
    finally:
        process.kill()
        process.communicate()
        for pid in processes_of(tmp_path):
            os.kill(pid, signal.SIGKILL)
