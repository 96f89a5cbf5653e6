"""The HTTP server with a worker's metrics and health, on addresses of either family."""

import asyncio
import os
import socket

import httpx
import pytest
from prometheus_client import CollectorRegistry
from starlette.responses import Response
from starlette.routing import Route

from pagewire.shared.base.errors import ConfigError
from pagewire.shared.http.connections import TAKING_TIMEOUT_S
from pagewire.shared.http.side_server import MAX_CONNECTIONS
from pagewire.shared.metrics.server import MetricsServer
from pagewire.shared.worker.metrics import local_prefill_counter
from pagewire.tests.support.aio import run_async
from pagewire.tests.support.silent_crowd import silent_crowd


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


OPEN = "pagewire_worker_http_connections "
needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")


async def get(url: str, path: str) -> httpx.Response:
    async with httpx.AsyncClient(trust_env=False, timeout=5) as http:
        return await http.get(url + path)


@pytest.mark.parametrize(
    ("host", "shown", "reached"),
    [
        ("127.0.0.1", "127.0.0.1", ["127.0.0.1"]),
        ("localhost", None, ["localhost"]),
        ("0.0.0.0", "0.0.0.0", ["127.0.0.1"]),  # noqa: S104 - to be tested
        pytest.param("::1", "[::1]", ["[::1]"], marks=needs_ipv6),
        pytest.param("::", "[::]", ["[::1]", "127.0.0.1"], marks=needs_ipv6),
    ],
)
def test_metrics_are_served_on(host: str, shown: str | None, reached: list[str]) -> None:
    async def scenario() -> None:
        registry = CollectorRegistry()
        local_prefill_counter(registry)
        server = MetricsServer(registry, lambda: True, "pagewire_worker")
        url = await server.start(host, 0)
        try:
            name, _, port = url.removeprefix("http://").rpartition(":")
            assert shown in (None, name)
            for address in reached:
                answer = await get(f"http://{address}:{port}", "/metrics")
                assert "pagewire_local_prefills" in answer.text
                assert (await get(f"http://{address}:{port}", "/health")).json() == {"ready": True}
        finally:
            await server.close()

    run_async(scenario())


def test_a_thousand_silent_connections_keep_no_scraper_out() -> None:
    async def scenario() -> None:
        server = MetricsServer(CollectorRegistry(), lambda: True, "pagewire_worker")
        url = await server.start("127.0.0.1", 0)
        before = len(os.listdir("/proc/self/fd"))
        port = int(url.rpartition(":")[2])
        try:
            # In another thread: this one's loop takes the connections.
            context = silent_crowd(port, 1000)
            crowd = await asyncio.to_thread(context.__enter__)
            for _ in range(5):
                assert (await get(url, "/health")).json() == {"ready": True}
                answer = await get(url, "/metrics")
            assert len(os.listdir("/proc/self/fd")) < before + MAX_CONNECTIONS + 20
            assert await asyncio.to_thread(crowd.leave) >= 1000 - MAX_CONNECTIONS
            context.__exit__(None, None, None)
            assert f"pagewire_worker_http_connections_limit {MAX_CONNECTIONS}.0" in answer.text
        finally:
            await server.close()

    run_async(scenario())


class ShiftedLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock can be set forward."""

    shift_s = 0.0

    def time(self) -> float:
        return super().time() + self.shift_s


async def take(client: socket.socket, num_bytes: int) -> None:
    while num_bytes > 0:
        data = await asyncio.get_running_loop().sock_recv(client, num_bytes)
        assert data, "the server has closed the connection"
        num_bytes -= len(data)


def test_a_client_that_takes_no_response_is_given_up_and_a_slow_one_is_not() -> None:
    async def scenario() -> None:
        page = b"x" * (64 << 20)
        routes = [Route("/large", lambda _request: Response(page))]
        server = MetricsServer(CollectorRegistry(), lambda: True, "pagewire_worker", routes=routes)
        url = await server.start("127.0.0.1", 0)
        loop, asked = asyncio.get_running_loop(), b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n"
        assert isinstance(loop, ShiftedLoop)
        slow, idle = (socket.socket() for _ in range(2))
        try:
            for client in (slow, idle):
                client.setblocking(False)
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
                await loop.sock_connect(client, ("127.0.0.1", int(url.rpartition(":")[2])))
                await loop.sock_sendall(client, asked * 2)
            await take(idle, 1)
            for _ in range(4):
                await take(slow, 12 << 20)  # more than the kernel holds: the server has sent some
                loop.shift_s += TAKING_TIMEOUT_S + 1
                for _ in range(3):  # all timers that are due
                    await asyncio.sleep(0)
            answer = await get(url, "/metrics")
            found = [line for line in answer.text.splitlines() if line.startswith(OPEN)]
            assert found == [f"{OPEN}2.0"]  # the slow one and this one
        finally:
            slow.close()
            idle.close()
            await server.close()

    run_async(scenario(), 1e6, ShiftedLoop)  # by the loop's own clock


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("::1", marks=needs_ipv6)])
def test_a_port_in_use_is_named(host: str) -> None:
    async def scenario() -> None:
        servers = [
            MetricsServer(CollectorRegistry(), lambda: True, "pagewire_worker") for _ in range(2)
        ]
        port = int((await servers[0].start(host, 0)).rpartition(":")[2])
        with pytest.raises(ConfigError, match=f"port {port} for metrics: Address already in use"):
            await servers[1].start(host, port)
        for server in servers:
            await server.close()

    run_async(scenario())


def test_a_host_without_an_address_is_named() -> None:
    async def scenario() -> None:
        with pytest.raises(ConfigError, match="cannot listen on no-such-host"):
            await MetricsServer(CollectorRegistry(), lambda: True, "pagewire_worker").start(
                "no-such-host.invalid", 0
            )

    run_async(scenario())


def test_a_server_that_dies_is_named_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def serve(server: object, sockets: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("uvicorn.Server.serve", serve)

    async def scenario() -> None:
        server = MetricsServer(CollectorRegistry(), lambda: True, "pagewire_worker")
        await server.start("127.0.0.1", 0)
        await asyncio.sleep(0)
        await server.close()

    run_async(scenario())
    assert "server of the metrics port failed" in caplog.text
