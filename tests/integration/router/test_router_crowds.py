"""Crowds in front of a router process: more connections than it may hold keep nobody out."""

import asyncio
import json
import resource
import time
from contextlib import AsyncExitStack

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pagewire.shared.model.demo import demo_model_path
from pagewire.shared.text.tokenizer import Tokenizer
from pagewire.tests.support.aio import eventually, run_async
from pagewire.tests.support.fake_decode_worker import FakeDecodeWorker
from pagewire.tests.support.live_router import MODEL, SECRET
from pagewire.tests.support.local_cluster import free_port
from pagewire.tests.support.raw_http import RawClient, post
from pagewire.tests.support.router_process import ready, router_process
from pagewire.tests.support.silent_crowd import silent_crowd
from pagewire.tests.support.sse import arriving_events

WORD = Tokenizer.from_dir(demo_model_path()).encode(" the", add_special_tokens=False)
ASKED = {"model": MODEL, "prompt": "Hi", "max_tokens": 20}
PREFIX = "pagewire_router_http_connections"


async def metrics(port: int) -> dict[str, float]:
    """The metrics of connections, by what follows `PREFIX`; with the reason, if there is one."""
    found = {}
    async with httpx.AsyncClient() as http:
        page = (await http.get(f"http://127.0.0.1:{port}/metrics")).text
    for family in text_string_to_metric_families(page):
        for each in family.samples:
            if each.name.startswith(PREFIX):
                reason = each.labels.get("reason", "")
                found[f"{each.name.removeprefix(PREFIX)} {reason}".strip()] = each.value
    return found


async def answers(url: str) -> float:
    """Ask on a new connection; returns the seconds that it took."""
    started = time.monotonic()
    async with httpx.AsyncClient(base_url=url, timeout=10) as http:
        response = await http.post("/v1/completions", json=ASKED)
    assert response.json()["choices"][0]["text"] == " the" * 20
    return time.monotonic() - started


async def listens(url: str) -> None:
    async with httpx.AsyncClient(base_url=url) as http:
        await ready(http, 200)


def test_silent_connections_above_the_limit_of_open_files_keep_nobody_out(redis_url):
    """Streams and kept connections go on, and new connections are answered at once."""

    async def scenario() -> None:
        port, metrics_port = free_port(), free_port()
        options = ("--metrics-port", str(metrics_port), "--log-level", "warning")
        url = f"http://127.0.0.1:{port}"
        with router_process(redis_url, port, *options, open_files=1024) as process:
            async with (
                FakeDecodeWorker(redis_url, SECRET, answer=WORD * 400, step_s=0.01),
                httpx.AsyncClient(base_url=url, timeout=20) as http,
            ):
                await listens(url)
                asked = ASKED | {"max_tokens": 400, "stream": True}
                async with http.stream("POST", "/v1/completions", json=asked) as response:
                    events = arriving_events(response)
                    await anext(events)
                    with silent_crowd(port, 1300) as crowd:
                        assert max([await answers(url) for _ in range(20)]) < 2
                        found = await metrics(metrics_port)
                        assert crowd.leave() >= 1300 - 896
                    *_, last = [event async for event in events]
                assert last["choices"][0]["finish_reason"] == "length"
                assert found["_limit"] == 896
                assert 880 <= found[""] <= 896
                assert found["_closed_early_total dropped"] >= 1300 - 896
                assert found["_closed_early_total refused"] == 0
            process.terminate()
            _, log = await asyncio.to_thread(process.communicate, timeout=20)
        warnings = [line for line in log.splitlines() if "connections are in use" in line]
        assert 1 <= len(warnings) <= 3, log
        assert "all 896 connections" in warnings[0]

    run_async(scenario(), 60)


def test_where_all_connections_are_served_new_ones_are_answered_503(redis_url):
    async def scenario() -> None:
        port, metrics_port = free_port(), free_port()
        options = ("--metrics-port", str(metrics_port), "--log-level", "warning")
        url = f"http://127.0.0.1:{port}"
        with router_process(redis_url, port, *options, env={"PAGEWIRE_MAX_CONNECTIONS": "8"}):
            async with (
                FakeDecodeWorker(redis_url, SECRET, answer=WORD * 20, step_s=0.01) as worker,
                httpx.AsyncClient(base_url=url, timeout=20) as http,
                httpx.AsyncClient(
                    base_url=url, transport=httpx.AsyncHTTPTransport(local_address="127.0.0.2")
                ) as other,  # one address alone does not get all
            ):
                await listens(url)
                worker.hold.clear()
                held = [
                    asyncio.create_task(each.post("/v1/completions", json=ASKED, timeout=20))
                    for each in (http, other) * 4
                ]
                await eventually(lambda: worker.active == 8)
                async with RawClient(url) as late:
                    status, error = await late.error()
                assert (status, error["code"]) == (503, "too_many_connections")
                worker.hold.set()
                assert [(await task).status_code for task in held] == [200] * 8
                found = await metrics(metrics_port)
                assert found["_closed_early_total refused"] == 1
                await answers(url)

    run_async(scenario(), 60)


def test_clients_that_come_at_once_do_not_close_one_another(redis_url):
    """Idle connections, which others have left open, make room for them."""

    async def scenario() -> None:
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        limit = {"PAGEWIRE_MAX_CONNECTIONS": "24"}
        with router_process(redis_url, port, "--log-level", "warning", env=limit):
            async with FakeDecodeWorker(redis_url, SECRET, answer=WORD * 20), AsyncExitStack() as s:
                await listens(url)
                for _ in range(24):
                    idle = await s.enter_async_context(RawClient(url))
                    await idle.send(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
                    assert (await idle.response())[0] == 200
                clients = [await s.enter_async_context(RawClient(url)) for _ in range(8)]
                for client in clients:
                    await client.send(post(json.dumps(ASKED).encode()))
                for client in clients:
                    assert (await client.response())[0] == 200

    run_async(scenario(), 60)


@pytest.mark.parametrize("count", [2_000, pytest.param(10_000, marks=pytest.mark.exhaustive)])
def test_idle_connections_slow_nobody_down(redis_url, count):
    """Or as many as the hard limit of open files leaves."""
    count = min(count, resource.getrlimit(resource.RLIMIT_NOFILE)[1] * 3 // 4)

    async def scenario() -> None:
        port, metrics_port = free_port(), free_port()
        options = ("--metrics-port", str(metrics_port), "--log-level", "warning")
        url = f"http://127.0.0.1:{port}"
        with router_process(redis_url, port, *options):
            async with (
                FakeDecodeWorker(redis_url, SECRET, answer=WORD * 20, step_s=0.01),
                httpx.AsyncClient(base_url=url, timeout=20),
            ):
                await listens(url)
                alone = sorted([await answers(url) for _ in range(20)])
                with silent_crowd(port, count, requests=1) as crowd:
                    assert (await metrics(metrics_port))[""] == count
                    among = sorted([await answers(url) for _ in range(20)])
                    print(f"{count} connections: {among[10]:.3f} s, alone {alone[10]:.3f} s")
                    assert among[10] < 2 * alone[10] + 0.1
                    assert among[-1] < 10
                    assert crowd.leave() == 0

    run_async(scenario(), 100)


@pytest.mark.parametrize(
    ("open_files", "connections", "reason"),
    [
        (1024, {"PAGEWIRE_MAX_CONNECTIONS": "5000"}, "at most 896 fit below the limit of 1024"),
        (100, {}, "the limit of open files is 100, and a router needs 128"),
    ],
)
def test_files_that_are_too_few_are_refused_at_the_start(
    redis_url, open_files, connections, reason
):
    with router_process(redis_url, free_port(), open_files=open_files, env=connections) as process:
        _, log = process.communicate(timeout=30)
    assert process.returncode == 2
    [line] = log.strip().splitlines()
    assert reason in line
    assert all(name in line for name in connections)
