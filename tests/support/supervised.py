"""A cluster of fake services under the supervisor of `pagewire up`, in processes of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import httpx
import psutil

from pagewire.tests.support import fake_cluster
from pagewire.tests.support.aio import wait_until
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
    with suppress(psutil.Error):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


def command_lines() -> dict[int, str]:
    """Return the command line of each process, by its id."""
    processes = psutil.process_iter(["cmdline"])
    return {each.pid: " ".join(each.info["cmdline"] or []) for each in processes}
