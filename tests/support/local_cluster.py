"""A whole cluster as a user starts it: `pagewire up` in a process of its own."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import signal
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil

from pagewire.loadtest.cluster import (
    PROGRAM,
    START_TIMEOUT_S,
    BenchError,
    metrics,
    read_ready_file,
    start,
    stop,
    up_command,
    used_blocks,
    wait_idle,
    wait_ready,
)
from pagewire.services.cli.up.machine import LOOPBACK, PortTakenError, require_free_port
from pagewire.tests.support.aio import wait_until

ASSIGNED_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
MIN_PORT, PORTS = 10_000, 16_000
# Services find each other sooner than with the default of 1 s; the lease is as long as it is.
HEARTBEAT = {"PAGEWIRE_HEARTBEAT_S": "0.25"}
# Most tests are about KV that crosses. On a CPU at rest, prediction would hardly let any.
BY_PREFIX, PREDICTED = ({"PAGEWIRE_POLICY": policy} for policy in ("prefix", "predicted"))
ONE_ROUTER = ("--routers", "1")  # of tests of what workers compute: it starts sooner than two
TIME = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ")


class LocalCluster:
    """A running `pagewire up`.

    Attributes:
        url: URL of the routers.
        operator_url: URL at which they describe the cluster; empty until it is ready.

    Args:
        options: options of `pagewire up`.
        env: further environment variables; requests are placed by prefix unless these say.
        program: the module that is `pagewire`.
    """

    def __init__(
        self, *options: str, env: dict[str, str] | None = None, program: str = PROGRAM
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.operator_url = ""
        self.directory = tempfile.TemporaryDirectory(prefix="pw-e2e-")
        self._path = Path(self.directory.name)
        command = up_command(self._path, "--port", str(self.port), *options, program=program)
        env = {**HEARTBEAT, **BY_PREFIX, **os.environ, "PYTHONUNBUFFERED": "1", **(env or {})}
        self.process = start(command, self._path / "up.log", env)

    @property
    def output(self) -> str:
        """All that the supervisor printed so far."""
        return (self._path / "up.log").read_text(encoding="utf-8")

    @property
    def lines(self) -> list[str]:
        """The same, without the times of lines."""
        return [TIME.sub("", line) for line in self.output.splitlines()]

    def log_of(self, name: str) -> str:
        """Return the log of a service."""
        [file] = self._path.glob(f"*/{name}.log")
        return file.read_text(encoding="utf-8")

    def wait_ready(self, timeout: float = START_TIMEOUT_S) -> None:
        """Wait for the ready file."""
        log = self._path / "up.log"
        ready = wait_ready(
            self.process, log, lambda: read_ready_file(self.process, self._path), timeout
        )
        self.operator_url = ready["operator_url"]

    def wait_whole(self, timeout: float = 60.0) -> None:
        """Wait until all workers that have died or ended are back and linked."""
        wait_until(self._is_whole, timeout, lambda: self.output, every=0.1)

    def _is_whole(self) -> bool:
        dead = set()
        for line in self.lines:
            if " died: " in line or " ended: exit code " in line:
                dead.add(line.partition(" ")[0])
            elif line.endswith(" is ready again"):
                dead.discard(line.partition(" ")[0])
        return not dead and all(
            each["state"] == "ready" and not each["missing_links"]
            for each in self.health()["services"]
        )

    def wait_for_line(self, start: str, timeout: float = 10.0) -> str:
        """Wait until a line that begins with `start` was printed, and return it."""

        def found() -> list[str]:
            return [line for line in self.lines if line.startswith(start)]

        wait_until(found, timeout, lambda: f"no line {start!r}: {self.output}")
        return found()[0]

    def stop(self) -> int:
        """End it as Ctrl-C does; returns the exit code."""
        code = stop(self.process)
        assert code != -signal.SIGKILL, f"it did not stop:\n{self.output}"
        self.directory.cleanup()
        return code

    def worker_pid(self, name: str) -> int:
        """Return the process id of a worker."""
        return self.pid_of(f"--worker-id {name} ")

    def router_pid(self, name: str) -> int:
        """Return the process id of a router."""
        return self.pid_of(f"--router-id {name} ")

    def busy_routers(self) -> list[str]:
        """Return the names of the routers that have running requests."""
        pattern = r'vllm:num_requests_running\{.*router="(.*?)"'
        found = [(re.match(pattern, name), value) for name, value in self.metrics().items()]
        return [match[1] for match, value in found if match is not None and value]

    def processes(self) -> dict[int, list[str]]:
        """Return the command lines of the cluster's processes by id, without the supervisor."""
        found: dict[int, list[str]] = {}
        with suppress(psutil.NoSuchProcess):  # the cluster has ended
            for process in psutil.Process(self.process.pid).children(recursive=True):
                with suppress(psutil.Error):  # it has ended
                    found[process.pid] = process.cmdline()
        return {pid: words for pid, words in found.items() if words}

    def pid_of(self, text: str) -> int:
        """Return the process id of the service that has this text on its command line."""
        pids = [pid for pid, words in self.processes().items() if text in " ".join([*words, ""])]
        assert len(pids) == 1, f"{text}: {pids}"
        return pids[0]

    def health(self) -> dict[str, Any]:
        """Return the router's view of the cluster."""
        body: dict[str, Any] = httpx.get(f"{self.operator_url}/cluster", timeout=10).json()
        return body

    def metrics(self) -> dict[str, float]:
        """Return all processes' metrics: the sample's name with its labels -> value."""
        return metrics(self.operator_url)

    def total(self, name: str) -> float:
        """Return a metric's sum over all routers and workers."""
        found = [each for each in self.metrics().items() if each[0].partition("{")[0] == name]
        assert found, name
        return sum(value for _, value in found)

    def used_blocks(self) -> dict[str, float]:
        """Return how many KV blocks each worker's sequences hold."""
        return used_blocks(self.operator_url)

    def wait_idle(self, workers: int, timeout: float = 15.0) -> None:
        """Wait until no worker holds a block any more."""
        try:
            wait_idle(self.operator_url, timeout, workers)
        except BenchError as exc:
            raise AssertionError(f"{exc}\n{self.output}") from exc


@contextmanager
def local_cluster(
    *options: str,
    env: dict[str, str] | None = None,
    program: str = PROGRAM,
    start_timeout: float = START_TIMEOUT_S,
) -> Iterator[LocalCluster]:
    """Start a cluster, wait until it is ready, stop it at the end."""
    cluster = LocalCluster(*options, env=env, program=program)
    try:
        cluster.wait_ready(start_timeout)
        yield cluster
    finally:
        cluster.stop()


_SHARED_OPTIONS = ("--device", "cpu", "--dtype", "float32", "--tool-parser", "hermes")


class SharedClusters:
    """Clusters that several files of tests share; each test leaves them as it would find them."""

    def __init__(self) -> None:
        self._clusters: dict[tuple[int, int, bool], LocalCluster] = {}
        self._stack = ExitStack()

    def get(self, prefill: int, decode: int, *, predicted: bool = False) -> LocalCluster:
        """Return a cluster with these numbers of workers, all of which are there."""
        key = (prefill, decode, predicted)
        if key not in self._clusters:
            workers = ("--prefill", str(prefill), "--decode", str(decode))
            env = PREDICTED if predicted else BY_PREFIX
            made = self._stack.enter_context(local_cluster(*workers, *_SHARED_OPTIONS, env=env))
            self._clusters[key] = made
        self._clusters[key].wait_whole()
        return self._clusters[key]

    def close(self) -> None:
        self._stack.close()


async def complete_all(
    url: str, bodies: list[dict[str, Any]], in_flight: int, timeout: float = 120.0
) -> list[dict[str, Any]]:
    """Post completions, several at a time; returns the response bodies in order."""
    limit = asyncio.Semaphore(in_flight)

    async with httpx.AsyncClient(timeout=timeout) as client:

        async def one(body: dict[str, Any]) -> dict[str, Any]:
            async with limit:
                response = await client.post(f"{url}/v1/completions", json=body)
                assert response.status_code == 200, response.text
                answer: dict[str, Any] = response.json()
                return answer

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(body)) for body in bodies]
    return [task.result() for task in tasks]


def listening_sockets(pids: Iterable[int]) -> set[tuple[str, int]]:
    """Return address and port of each TCP socket on which one of the processes listens."""
    found = set()
    for pid in pids:
        with suppress(psutil.Error):  # it has ended
            for each in psutil.Process(pid).net_connections("tcp"):
                if each.status == psutil.CONN_LISTEN:
                    found.add((each.laddr.ip, each.laddr.port))
    return found


def free_port() -> int:
    """Return a free port, if possible below the range from which the system assigns ports."""
    first_assigned = int(ASSIGNED_PORTS.read_text().split()[0])
    lowest = max(MIN_PORT, first_assigned - PORTS)
    while lowest < first_assigned:
        with suppress(PortTakenError):
            return require_free_port(LOOPBACK, lowest + secrets.randbelow(first_assigned - lowest))
    return require_free_port(LOOPBACK, 0)
