"""Starts servers for benches and tests in child processes, and `pagewire up` as users do."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from pagewire.loadtest.sampler import blocks_of, parse_metrics
from pagewire.services.cli.client.client_options import key_in_environment
from pagewire.services.cli.client.endpoint_url import key_header, usual_operator_url
from pagewire.shared.metrics.pages import decode_targets, joined

START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 60.0  # longer than `pagewire up` takes: 30 s for requests, 15 s to leave
POLL_S = 0.1
FETCH_TIMEOUT_S = 5.0
PROGRAM = "pagewire.services.cli.main"


class BenchError(Exception):
    """A server did not start or stop, or gave an answer that cannot be counted."""


@dataclass(frozen=True, slots=True)
class Running:
    """A cluster of Pagewire that runs.

    Attributes:
        operator_url: where a router describes the cluster.
        pid: of `pagewire up`.
        services: as its ready file lists them.
    """

    url: str
    operator_url: str
    pid: int
    services: list[dict[str, Any]]


@contextmanager
def running_cluster(
    options: Sequence[str],
    log_dir: Path,
    timeout: float = START_TIMEOUT_S,
    env: Mapping[str, str] | None = None,
) -> Iterator[Running]:
    """Start a cluster, yield it once it can serve, and stop it.

    Args:
        options: of `pagewire up`.
        log_dir: gets the output of all processes.
        timeout: seconds that it has to become ready.
        env: environment of its processes; None: this one's.

    Raises:
        BenchError: it ended, was not ready in time, or did not stop.
    """
    log_dir.mkdir(parents=True, exist_ok=True)
    log = log_dir / "up.log"
    with server(up_command(log_dir, "--port", "0", *options), log, env) as process:
        ready = wait_ready(process, log, lambda: read_ready_file(process, log_dir), timeout)
        yield Running(ready["url"], ready["operator_url"], process.pid, ready["services"])
    if process.returncode == -signal.SIGKILL:
        raise BenchError(f"the cluster did not stop in {STOP_TIMEOUT_S:g} s")


def up_command(directory: Path, *options: str, program: str = PROGRAM) -> list[str]:
    """Return the command line of a cluster whose logs and ready file are in a directory.

    Args:
        directory: for them; must exist.
        options: further ones of `pagewire up`, or others instead.
        program: the module that is `pagewire`.
    """
    command = [sys.executable, "-P", "-m", program, "up", "--log-dir", str(directory)]
    return [*command, "--ready-file", str(directory / "ready.json"), *options]


def read_ready_file(process: subprocess.Popen[Any], directory: Path) -> dict[str, Any] | None:
    """Return what the ready file of `up_command` says, None before the cluster is ready.

    A file that another process has left does not count.
    """
    try:
        content: dict[str, Any] = json.loads((directory / "ready.json").read_bytes())
    except FileNotFoundError:
        return None
    return content if content["pid"] == process.pid else None


@contextmanager
def server(
    command: Sequence[str], log: Path, env: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server until the context ends; see `start` and `stop`."""
    process = start(command, log, env)
    try:
        yield process
    finally:
        stop(process)


def start(
    command: Sequence[str], log: Path, env: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a server with its children in a session of its own, its output into a file."""
    with log.open("wb") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=env,
            start_new_session=True,
        )


def stop(process: subprocess.Popen[bytes]) -> int:
    """End a server as Ctrl-C does, or by force where that does not help; returns its exit code."""
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_TIMEOUT_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait(STOP_TIMEOUT_S)


def wait_ready(
    process: subprocess.Popen[bytes], log: Path, ready: Callable[[], Any], timeout: float
) -> Any:
    """Return what `ready` returns as soon as that is true.

    Raises:
        BenchError: the server ended, or was not ready in time.
    """
    deadline = time.monotonic() + timeout
    while not (result := ready()):
        if process.poll() is not None:
            why = f"it ended with {process.returncode}"
        elif time.monotonic() > deadline:
            why = f"not ready after {timeout:g} s"
        else:
            time.sleep(POLL_S)
            continue
        text = log.read_text(encoding="utf-8", errors="replace")
        raise BenchError(f"a server did not start, {why}:\n{gist(text)}")
    return result


def answers(url: str) -> bool:
    """Return whether a server answers a request for a page with success."""
    try:
        return httpx.get(url, timeout=2, trust_env=False).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def gist(log: str) -> str:
    """Return the lines of a log that name errors, and its end."""
    lines = log.splitlines()
    errors = [line[:300] for line in lines if "rror" in line]
    return "\n".join([*errors[:20], "...", *lines[-10:]])


def key_headers() -> dict[str, str]:
    """Return the header with the API key that the environment names, as `pagewire bench` does."""
    return key_header(key_in_environment())


def metrics(operator_url: str) -> dict[str, float]:
    """Return the metrics of all routers and workers: the sample's name with its labels -> value.

    A process that does not answer, since it has just ended, is left out.

    Raises:
        OSError: no router answers operators there.
    """
    pages = []
    for target in decode_targets(_fetch(f"{operator_url}/sd")):
        for url in target.urls:
            with contextlib.suppress(OSError):
                pages.append((target.labels, _fetch(url).decode()))
    return parse_metrics(joined(pages))


def metrics_near(url: str) -> dict[str, float]:
    """Return the metrics of the cluster, or of the server of another make, with an endpoint.

    Args:
        url: of the endpoint; a cluster's operator port is taken to be the usual one.

    Raises:
        OSError: nothing answers there.
    """
    try:
        return metrics(usual_operator_url(url))
    except OSError:
        return parse_metrics(_fetch(f"{url}/metrics").decode())


def _fetch(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=FETCH_TIMEOUT_S) as answer:  # noqa: S310 - our http
        body: bytes = answer.read()
        return body


def used_blocks(operator_url: str) -> dict[str, float]:
    """Return how many KV blocks each worker's sequences hold."""
    return {name: states["used"] for name, states in blocks_of(metrics(operator_url)).items()}


def wait_idle(operator_url: str, timeout: float = 30.0, workers: int | None = None) -> None:
    """Wait until no worker's sequences hold a KV block.

    Args:
        operator_url: of a router.
        timeout: in seconds.
        workers: number of those whose blocks must be known; None: any.

    Raises:
        BenchError: some still do at the end of the time.
    """
    deadline = time.monotonic() + timeout
    while True:
        used = used_blocks(operator_url)
        if workers in (None, len(used)) and not any(used.values()):
            return
        if time.monotonic() > deadline:
            raise BenchError(f"KV blocks are still held after {timeout:g} s: {used}")
        time.sleep(POLL_S)


def say(text: str) -> None:
    """Print which step of a program begins."""
    print(f"==> {text}", flush=True)
