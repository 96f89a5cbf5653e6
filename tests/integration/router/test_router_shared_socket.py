"""Real router processes that accept from one socket which another process has bound."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import time
from contextlib import AbstractContextManager

import httpx
import pytest

from pagewire.shared.base.listener import bound_socket
from pagewire.tests.support.aio import run_async
from pagewire.tests.support.fake_decode_worker import FakeDecodeWorker
from pagewire.tests.support.live_router import ANSWER, MODEL, SECRET
from pagewire.tests.support.router_process import router_process

CONNECTIONS = 32
# Others know soon that a router is frozen.
LEASES = {"PAGEWIRE_HEARTBEAT_S": "0.5", "PAGEWIRE_LEASE_S": "3"}


def router(
    redis_url: str, fd: int, operator_fd: int | None, name: str
) -> AbstractContextManager[subprocess.Popen[str]]:
    options = ["--fd", str(fd), "--router-id", name]
    if operator_fd is None:
        return router_process(redis_url, 0, *options, fds=(fd,), env=LEASES)
    options += ["--operator-fd", str(operator_fd)]
    return router_process(redis_url, 0, *options, fds=(fd, operator_fd), env=LEASES)


async def until_healthy(operator_url: str, routers: int) -> None:
    """Wait until the router that answers has a decode worker and knows this number of routers."""
    url = f"{operator_url}/cluster"
    deadline = time.monotonic() + 60
    async with httpx.AsyncClient(timeout=20) as http:
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.TransportError):
                response = await http.get(url)
                if response.status_code == 200 and len(response.json()["routers"]) == routers:
                    return
            await asyncio.sleep(0.05)
    pytest.fail(f"{url} is not healthy")


async def ask_all(url: str) -> int:
    """Ask over new connections, all at once; returns how many were answered."""

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(timeout=60, limits=limits) as http:

        async def ask() -> bool:
            asked = {"model": MODEL, "prompt": "Hi", "max_tokens": 4}
            return (await http.post(f"{url}/v1/completions", json=asked)).is_success

        return sum(await asyncio.gather(*(ask() for _ in range(CONNECTIONS))))


@pytest.mark.timeout(400)
def test_one_that_is_stopped_killed_or_frozen_leaves_the_socket_to_the_other(
    redis_url: str,
) -> None:
    async def scenario(url: str, operator: str, processes: list[subprocess.Popen[str]]) -> None:
        async with FakeDecodeWorker(redis_url, SECRET, answer=ANSWER, lease_s=30):
            await until_healthy(operator, 2)
            assert await ask_all(url) == CONNECTIONS
            os.kill(processes[0].pid, signal.SIGSTOP)
            assert await ask_all(url) == CONNECTIONS
            await until_healthy(operator, 1)  # the other one alone, on the socket that both have
            os.kill(processes[0].pid, signal.SIGCONT)
            processes[0].send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(processes[0].wait, 60) == 0
            assert await ask_all(url) == CONNECTIONS

    with bound_socket("127.0.0.1", 0) as listener, bound_socket("127.0.0.1", 0) as operator:
        urls = [f"http://127.0.0.1:{each.getsockname()[1]}" for each in (listener, operator)]
        fds = (listener.fileno(), operator.fileno())
        with router(redis_url, *fds, "router-0") as one, router(redis_url, *fds, "router-1") as two:
            run_async(scenario(urls[0], urls[1], [one, two]), 300)
            # With nobody left a connection waits, for a router to come.
            two.kill()
            two.wait(10)
        with socket.create_connection(listener.getsockname(), timeout=5) as waiting:
            waiting.sendall(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n")
            with router(redis_url, *fds, "router-0"):
                waiting.settimeout(60)
                assert waiting.recv(15) == b"HTTP/1.1 200 OK"


@pytest.mark.parametrize("kind", ["file", "pipe", "udp", "unbound"])
def test_what_is_not_a_bound_tcp_socket_is_refused_with_one_line(redis_url: str, kind: str) -> None:
    with contextlib.ExitStack() as stack:
        if kind == "file":
            fd = stack.enter_context(open(os.devnull)).fileno()
        elif kind == "pipe":
            fd, other = os.pipe()
            stack.callback(os.close, fd)
            stack.callback(os.close, other)
        else:
            family = socket.SOCK_DGRAM if kind == "udp" else socket.SOCK_STREAM
            fd = stack.enter_context(socket.socket(socket.AF_INET, family)).fileno()
        with router(redis_url, fd, None, "router-0") as process:
            _, stderr = process.communicate(timeout=30)
    assert process.returncode == 2, stderr
    [line] = stderr.strip().splitlines()
    assert f"--fd {fd}" in line
