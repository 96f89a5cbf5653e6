"""Servers of the GPU benches: those that do not start, and those that must stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pagewire.loadtest.bench import clusters
from pagewire.loadtest.bench.clusters import Topology, late_port, running_cluster
from pagewire.loadtest.bench.idle import idle
from pagewire.loadtest.cluster import BenchError


def test_a_cluster_that_does_not_start_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clusters, "READY_TIMEOUT_S", 60.0)
    with (  # the folder holds no model
        pytest.raises(BenchError, match="did not start"),
        running_cluster(tmp_path, Topology(1, 1, 64), tmp_path),
    ):
        pytest.fail("it has started")


def test_a_late_port_is_none_that_the_kernel_gives_away() -> None:
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(1024 < late_port() < first for _ in range(20))


BENCH = """
import pathlib, sys, time
from pagewire.loadtest.cluster import server
from pagewire.loadtest.bench.clusters import run_bench
log = pathlib.Path(sys.argv[1])
command = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
def work():
    with server(command, log, {}) as process:
        print(process.pid, flush=True)
        time.sleep(600)
run_bench(work)
"""


def test_servers_stop_with_a_bench_that_is_terminated(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-c", BENCH, str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as bench:
        assert bench.stdout is not None
        server = int(bench.stdout.readline())
        while "up" not in (tmp_path / "log").read_text():
            time.sleep(0.02)
        bench.send_signal(signal.SIGTERM)
        assert bench.wait(60) != 0
    assert not Path(f"/proc/{server}").exists()


WORKERS = """
import subprocess, sys
command = ["-m", "pagewire.services.cli.main", "decode", "--worker-id"]
for name, work in (("decode-0", "while True: pass"), ("decode-1", "import time; time.sleep(60)")):
    subprocess.Popen([sys.executable, "-c", work, *command, name])
print(flush=True)
sys.stdin.read()
"""


def test_idle_shows_which_worker_is_not() -> None:
    command = [sys.executable, "-c", WORKERS]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as up:
        assert up.stdout is not None
        try:
            up.stdout.readline()
            used = {row["worker"]: row["percent_of_a_core"] for row in idle(seconds=1)}
        finally:
            os.killpg(up.pid, signal.SIGKILL)
    assert used.keys() == {"decode-0", "decode-1"}
    assert used["decode-0"] > 5  # the machine may be busy with more
    assert used["decode-1"] < used["decode-0"] / 2
    with pytest.raises(BenchError, match="workers were"):
        idle(seconds=0)
