"""A cluster of a test's own, started as a user starts it: `pagewire up` in a child process."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 30.0
POLL_S = 0.2
LOG_TAIL = 2000


class ClusterError(Exception):
    """The cluster did not come up or did not go down."""


@contextmanager
def running_cluster(options: Sequence[str], log_dir: Path) -> Iterator[str]:
    """Start a cluster, give its URL once it can serve, and stop it.

    Args:
        options: of `pagewire up`.
        log_dir: gets the output of all processes.

    Raises:
        ClusterError: it ended, or was not ready in time.
    """
    log_dir.mkdir(parents=True, exist_ok=True)
    output, ready_file = log_dir / "up.log", log_dir / "ready.json"
    command = [sys.executable, "-P", "-m", "pagewire.services.cli.main", "up", "--port", "0"]
    command += ["--log-dir", str(log_dir), "--ready-file", str(ready_file), *options]
    with output.open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    try:
        yield _wait_ready(process, ready_file, output)["url"]
    finally:
        _stop(process)


def wait_idle(url: str, timeout: float = 30.0) -> None:
    """Wait until no worker's sequences hold a KV block.

    Raises:
        ClusterError: some still do at the end of the time.
    """
    deadline = time.monotonic() + timeout
    while _used_blocks(url) > 0:
        if time.monotonic() > deadline:
            raise ClusterError(f"KV blocks are still held {timeout:g} s after the load")
        time.sleep(POLL_S)


def read_ready_file(process: subprocess.Popen[Any], path: Path) -> dict[str, Any] | None:
    """Return what `pagewire up --ready-file` says, None before the cluster is ready.

    A file that another process has left does not count.
    """
    try:
        content: dict[str, Any] = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    return content if content["pid"] == process.pid else None


def _wait_ready(process: subprocess.Popen[bytes], path: Path, output: Path) -> dict[str, Any]:
    deadline = time.monotonic() + START_TIMEOUT_S
    while (content := read_ready_file(process, path)) is None:
        tail = f"\n{_tail(output)}"
        if process.poll() is not None:
            raise ClusterError(f"pagewire up ended with {process.returncode}:{tail}")
        if time.monotonic() > deadline:
            raise ClusterError(f"the cluster is not ready after {START_TIMEOUT_S:g} s:{tail}")
        time.sleep(POLL_S)
    return content


def _used_blocks(url: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:  # noqa: S310 - our http
        lines = answer.read().decode().splitlines()
    return sum(
        float(line.rpartition(" ")[2])
        for line in lines
        if line.startswith("pagewire_kv_blocks{") and 'state="used"' in line
    )


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the cluster as Ctrl-C does, or by force where that does not help."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired as exc:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(STOP_TIMEOUT_S)
        raise ClusterError(f"the cluster did not stop in {STOP_TIMEOUT_S:g} s") from exc


def _tail(output: Path) -> str:
    return output.read_text(encoding="utf-8", errors="replace")[-LOG_TAIL:]


def free_port() -> int:
    """Return a port of this machine that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
