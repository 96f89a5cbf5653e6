"""The gateway's own configuration, in a real HAProxy in front of a router process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from pagewire.shared.model.demo import demo_model_path
from pagewire.shared.text.tokenizer import Tokenizer
from pagewire.tests.support.aio import run_async
from pagewire.tests.support.certificates import write_certificate
from pagewire.tests.support.documents import ROOT
from pagewire.tests.support.fake_decode_worker import FakeDecodeWorker
from pagewire.tests.support.live_router import MODEL, SECRET
from pagewire.tests.support.local_cluster import free_port
from pagewire.tests.support.raw_http import GET, RawClient
from pagewire.tests.support.router_process import ready, router_process

pytestmark = pytest.mark.gateway

WORD = Tokenizer.from_dir(demo_model_path()).encode(" the", add_special_tokens=False)
CONFIG = (ROOT / "services" / "gateway" / "haproxy.cfg").read_text(encoding="utf-8")
TRUSTS = {"PAGEWIRE_TRUST_PROXY_PROTOCOL": "true"}


@contextlib.contextmanager
def gateway(
    folder: Path, router_port: int, checks: int = 0, metrics: int = 0, **env: str
) -> Iterator[str]:
    """Run HAProxy with the configuration of the containers, but for addresses; yields its URL.

    Args:
        folder: of its certificates; next to it comes the configuration.
        checks: port that is asked by the container's health check.
        metrics: port that Prometheus reads.
    """
    port = free_port()
    changes = {
        r"bind :8000\n": f"bind 127.0.0.1:{port}\n",
        r"bind :8000 ssl crt /certificates/": f"bind 127.0.0.1:{port} ssl crt {folder}/",
        r"bind 127.0.0.1:8001": f"bind 127.0.0.1:{checks or free_port()}",
        r"bind :8404": f"bind 127.0.0.1:{metrics or free_port()}",
        r"server-template router 8 router:8000": f"server router 127.0.0.1:{router_port}",
    }
    text = CONFIG
    for pattern, replacement in changes.items():
        text, count = re.subn(pattern, replacement, text)
        assert count == 1, pattern
    file = folder.with_name(f"{folder.name}.cfg")
    file.write_text(text)
    command = ["haproxy", "-db", "-f", str(file)]
    with subprocess.Popen(command, env={"PATH": os.environ["PATH"]} | env) as process:
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


def test_with_a_certificate_the_gateway_speaks_tls_and_streams(redis_url, tmp_path):
    chain, checks = write_certificate(tmp_path), free_port()

    async def scenario() -> None:
        port = free_port()
        on = {"GATEWAY_CERTIFICATES": "/anywhere"}
        with (
            router_process(redis_url, port, env=TRUSTS),
            gateway(tmp_path, port, checks, **on) as url,
        ):
            async with FakeDecodeWorker(redis_url, SECRET, answer=WORD * 20):
                await wait_for(f"http://127.0.0.1:{checks}")  # without TLS
                context = ssl.create_default_context(cafile=chain)
                async with httpx.AsyncClient(
                    base_url=url.replace("http:", "https:"), verify=context
                ) as http:
                    asked = {"model": MODEL, "prompt": "Hi", "max_tokens": 20, "stream": True}
                    answer = await http.post("/v1/completions", json=asked)
                    assert answer.text.count(" the") == 20
                    assert answer.text.endswith("data: [DONE]\n\n")
                async with httpx.AsyncClient(base_url=url) as plain:
                    with pytest.raises(httpx.TransportError):
                        await plain.get("/health")

    run_async(scenario(), 60)


async def wait_for(url: str) -> None:
    async with httpx.AsyncClient(base_url=url) as http:
        await ready(http, 200)


async def is_served(url: str) -> bool:
    """Whether a new connection's request is answered; it is reset otherwise."""
    try:
        async with RawClient(url) as client:
            await client.send(GET)
            return (await client.response())[0] == 200
    except (OSError, asyncio.IncompleteReadError):
        return False


def test_the_router_sees_the_clients_address_and_the_health_check_passes(redis_url, tmp_path):
    async def scenario() -> None:
        port = free_port()
        with router_process(redis_url, port, env=TRUSTS) as process, gateway(tmp_path, port) as url:
            async with FakeDecodeWorker(redis_url, SECRET, answer=WORD * 20):
                await wait_for(url)
                transport = httpx.AsyncHTTPTransport(local_address="127.0.0.9")
                async with httpx.AsyncClient(base_url=url, transport=transport) as http:
                    asked = {"model": MODEL, "prompt": "Hi", "max_tokens": 20}
                    answer = await http.post("/v1/completions", json=asked)
                    assert answer.json()["choices"][0]["text"] == " the" * 20
                    assert (await http.get("/nowhere")).status_code == 404
                async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
                    assert (await http.get("/elsewhere")).status_code == 404  # without a header
            process.terminate()
            _, log = await asyncio.to_thread(process.communicate, timeout=20)
        refused = "status=404 outcome=refused client"
        assert f"method=GET path=/nowhere {refused}=127.0.0.9 " in log
        assert f"method=GET path=/elsewhere {refused}=127.0.0.1 " in log

    run_async(scenario(), 60)


async def denied_connections(port: int) -> float:
    """Return how many clients' connections the gateway has closed, as Prometheus reads it."""
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
        assert (await http.get("/")).status_code == 404
        page = (await http.get("/metrics")).text
    [value] = re.findall(
        r'^haproxy_frontend_denied_connections_total\{proxy="clients"\} (\d+)$', page, re.M
    )
    return float(value)


def test_connections_of_one_address_are_bounded_and_others_are_served(redis_url, tmp_path):
    async def scenario() -> None:
        port, metrics = free_port(), free_port()
        with (
            router_process(redis_url, port, env=TRUSTS),
            gateway(tmp_path, port, metrics=metrics, GATEWAY_CLIENT_CONNECTIONS="10") as url,
        ):
            async with FakeDecodeWorker(redis_url, SECRET), contextlib.AsyncExitStack() as stack:
                await wait_for(url)
                for _ in range(10):
                    client = await stack.enter_async_context(RawClient(url))
                    await client.send(GET)
                    assert (await client.response())[0] == 200
                assert await denied_connections(metrics) == 0
                assert not await is_served(url)
                assert await denied_connections(metrics) >= 1
                transport = httpx.AsyncHTTPTransport(local_address="127.0.0.9")
                async with httpx.AsyncClient(base_url=url, transport=transport) as http:
                    assert (await http.get("/ready")).status_code == 200
                await stack.aclose()
                await wait_for(url)

    run_async(scenario(), 60)


def test_new_connections_of_one_address_are_bounded_by_time(redis_url, tmp_path):
    async def scenario() -> None:
        port = free_port()
        with (
            router_process(redis_url, port, env=TRUSTS),
            gateway(tmp_path, port, GATEWAY_CLIENT_RATE="200") as url,
        ):
            async with FakeDecodeWorker(redis_url, SECRET):
                await wait_for(url)
                assert 100 < sum([await is_served(url) for _ in range(400)]) <= 201
                transport = httpx.AsyncHTTPTransport(local_address="127.0.0.9")
                async with httpx.AsyncClient(base_url=url, transport=transport) as http:
                    assert (await http.get("/ready")).status_code == 200

    run_async(scenario(), 60)
