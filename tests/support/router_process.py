"""The router in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest

from pagewire.tests.support.live_router import MODEL, SECRET


@contextlib.contextmanager
def router_process(
    redis_url: str,
    port: int,
    *options: str,
    open_files: int | None = None,
    env: dict[str, str] | None = None,
    fds: tuple[int, ...] = (),
) -> Iterator[subprocess.Popen[str]]:
    """Start a router.

    Args:
        redis_url: URL of the cluster's Redis.
        port: its port.
        options: further options of `pagewire router`.
        open_files: soft and hard limit of open files.
        env: further environment variables.
        fds: file descriptors that it inherits.
    """
    limit = [] if open_files is None else ["prlimit", f"--nofile={open_files}:{open_files}"]
    command = [*limit, sys.executable, "-P", "-m", "pagewire.services.cli.main", "router"]
    arguments = ["--redis-url", redis_url, "--port", str(port), "--served-model-name", MODEL]
    arguments += ["--operator-port", "0"]
    process = subprocess.Popen(
        [*command, *arguments, *options],
        env={
            "PATH": "/usr/bin:/bin",
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
            "PAGEWIRE_CLUSTER_SECRET": SECRET,
            **(env or {}),
        },
        pass_fds=fds,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


async def ready(http: httpx.AsyncClient, status: int) -> None:
    """Wait until /ready answers with a status."""
    for _ in range(1000):
        with contextlib.suppress(httpx.TransportError):
            if (await http.get("/ready")).status_code == status:
                return
        await asyncio.sleep(0.05)
    pytest.fail(f"no {status} from /ready")


async def drains(http: httpx.AsyncClient) -> None:
    """Wait until a router that was ready drains, or accepts no connections any more."""
    for _ in range(1000):
        try:
            if (await http.get("/ready")).status_code != 200:
                return
        except httpx.TransportError:  # it accepts no connections any more
            return
        await asyncio.sleep(0.02)
    pytest.fail("the router does not drain")
