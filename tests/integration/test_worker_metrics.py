"""The HTTP server with a worker's metrics and health, on addresses of either family."""

import asyncio
import socket

import httpx
import pytest
from prometheus_client import CollectorRegistry

from pagewire.shared.errors import ConfigError
from pagewire.shared.metrics.server import MetricsServer
from pagewire.shared.worker.metrics import local_prefill_counter
from pagewire.tests.support.aio import run_async


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


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
        server = MetricsServer(registry, lambda: True)
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


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("::1", marks=needs_ipv6)])
def test_a_port_in_use_is_named(host: str) -> None:
    async def scenario() -> None:
        servers = [MetricsServer(CollectorRegistry(), lambda: True) for _ in range(2)]
        port = int((await servers[0].start(host, 0)).rpartition(":")[2])
        with pytest.raises(ConfigError, match=f"port {port} for metrics: Address already in use"):
            await servers[1].start(host, port)
        for server in servers:
            await server.close()

    run_async(scenario())


def test_a_host_without_an_address_is_named() -> None:
    async def scenario() -> None:
        with pytest.raises(ConfigError, match="cannot listen on no-such-host"):
            await MetricsServer(CollectorRegistry(), lambda: True).start("no-such-host.invalid", 0)

    run_async(scenario())


def test_a_server_that_dies_is_named_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def serve(server: object, sockets: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("uvicorn.Server.serve", serve)

    async def scenario() -> None:
        server = MetricsServer(CollectorRegistry(), lambda: True)
        await server.start("127.0.0.1", 0)
        await asyncio.sleep(0)
        await server.close()

    run_async(scenario())
    assert "metrics server failed" in caplog.text
