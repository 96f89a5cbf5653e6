"""A cluster of fake services under the supervisor of `pagewire up`, in processes of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import httpx

from pagewire.tests.support import fake_cluster
from pagewire.tests.support.local_cluster import free_port


class Up:
    """A running `fake_cluster.py up`."""

    def __init__(
        self,
        state: Path,
        *arguments: str,
        orders: dict[str, str] | None = None,
        path: str | None = None,
        stdout: int | None = None,
    ) -> None:
        self.state, self.ready_file = state, state / "ready.json"
        for name, text in (orders or {}).items():
            (state / f"{name}.orders").write_text(text)
        self.port = free_port()
        command = [sys.executable, "-P", fake_cluster.__file__, "up", str(state), str(self.port)]
        self._out, self._err = state / "stdout.txt", state / "stderr.txt"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                [*command, *arguments],
                stdout=out if stdout is None else stdout,
                stderr=err,
                env={**os.environ, "PATH": path} if path is not None else None,
            )

    @property
    def stdout(self) -> str:
        return self._out.read_text()

    @property
    def stderr(self) -> str:
        return self._err.read_text()

    def wait_for(self, text: str, timeout: float = 20.0) -> None:
        wait_until(lambda: text in self.stdout, timeout, lambda: self.stdout + self.stderr)

    def wait_ready(self) -> None:
        wait_until(self.ready_file.exists, 20, lambda: self.stdout + self.stderr)

    def pid_of(self, name: str) -> int:
        return int((self.state / f"{name}.alive").read_text())

    def kill_router(self, name: str) -> None:
        os.kill(int((self.state / f"{name}.pid").read_text()), signal.SIGKILL)

    def answers(self) -> bool:
        """Whether a router answers."""
        try:
            httpx.get(f"http://127.0.0.1:{self.port}/health", timeout=1)
        except httpx.HTTPError:
            return False
        return True

    def stop(self, number: signal.Signals = signal.SIGINT) -> int:
        self.process.send_signal(number)
        return self.process.wait(30)

    def private_dirs(self) -> list[Path]:
        return list(Path(tempfile.gettempdir()).glob(f"pagewire-run-{self.process.pid}-*"))

    def left_over(self) -> list[str]:
        """Return the command lines of processes that belong to this cluster."""
        marks = (str(self.state), f"pagewire-run-{self.process.pid}-")
        return [line for line in command_lines().values() if any(mark in line for mark in marks)]


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def command_lines() -> dict[int, str]:
    """Return the command line of each process, by its id."""
    lines = {}
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # ended in the meantime
            line = file.read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
            lines[int(file.parent.name)] = line
    return lines


def wait_until(
    condition: Callable[[], bool], timeout: float, explain: Callable[[], str] = str
) -> None:
    """Wait until a condition holds; after `timeout` seconds, fail with an explanation."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, explain()
        time.sleep(0.02)
