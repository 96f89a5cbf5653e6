"""Use of the processor by the load generator and the services."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pagewire.loadtest.cpu import GENERATOR, MACHINE, OTHERS, CpuSampler, process_name
from pagewire.loadtest.records import CpuSample, read_lines

COMMAND = ["/usr/bin/python", "-P", "-m", "pagewire.services.cli.main"]
BUSY = "while True: pass"


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        ([*COMMAND, "up", "--decode", "2"], "pagewire up"),
        ([*COMMAND, "router", "--port", "8000"], "router"),
        ([*COMMAND, "decode", "--host", "h", "--worker-id", "decode-1"], "decode-1"),
        (["/usr/bin/redis-server unixsocket:/tmp/s"], "redis"),
        (["python", "-m", "pagewire.services.cli.up.fake_redis", "6379"], "redis"),
        (["python", "-P", "-m", "locust", "-f", "x"], GENERATOR),
        (["python", "-c", "from multiprocessing import spawn"], None),
        ([], None),
    ],
)
def test_processes_are_named_by_their_command_line(argv: list[str], name: str | None) -> None:
    assert process_name(argv) == name


def test_children_and_what_they_start_are_counted_under_their_name(tmp_path: Path) -> None:
    starts_a_child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BUSY!r}])"
    path = tmp_path / "cpu.jsonl"
    before = time.monotonic()
    with CpuSampler(every_s=0.25) as sampler:
        command = [sys.executable, "-c", starts_a_child, "-m", "locust"]
        with subprocess.Popen(command, start_new_session=True) as process:
            try:
                time.sleep(2)
            finally:
                os.killpg(process.pid, signal.SIGKILL)
        time.sleep(1.5)  # several samples
    sampler.save(path, before)
    samples = read_lines(path, CpuSample)
    shares = [sample.cores.get(GENERATOR, 0.0) for sample in samples]
    assert 0.1 < max(shares) < 1.5
    assert shares[-1] == 0  # it has ended
    for sample in samples:
        assert 0 < sample.t < 60
        assert sample.cores[OTHERS] <= sample.cores[MACHINE]


def test_what_was_used_before_the_load_is_left_out(tmp_path: Path) -> None:
    with CpuSampler(every_s=0.05) as sampler:
        time.sleep(0.5)
    sampler.save(tmp_path / "cpu.jsonl", time.monotonic())
    assert read_lines(tmp_path / "cpu.jsonl", CpuSample) == []
