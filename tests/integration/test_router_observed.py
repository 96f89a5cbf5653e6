"""Health and metrics."""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from pagewire.services.cli.client.cluster_status import fetch_status
from pagewire.shared.cluster.redis_client import cluster_tag
from pagewire.shared.control.protocol import PROTOCOL_VERSION
from pagewire.tests.support.aio import eventually, run_async
from pagewire.tests.support.documents import ROOT
from pagewire.tests.support.fake_decode_worker import FakeDecodeWorker, link, prefill_record
from pagewire.tests.support.live_router import (
    ANSWER,
    MODEL,
    SECRET,
    LiveRouter,
    live_router,
    with_worker,
)
from pagewire.tests.support.redis_server import RedisServer
from pagewire.tests.support.worker_records import client_of, record


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with RedisServer() as server:
        yield server.url


def test_without_workers_health_is_red_and_requests_say_when_to_come_back(redis_url):
    async def main() -> None:
        async with live_router(redis_url) as router:
            health = await router.http.get("/health")
            assert health.status_code == 503
            assert health.json()["services"] == []
            for stream in (False, True):
                response = await router.chat(stream=stream)
                assert response.status_code == 503
                assert int(response.headers["Retry-After"]) >= 1
                assert response.json()["error"]["code"] == "no_worker_available"
            assert (await router.http.get("/v1/models")).status_code == 200
            async with FakeDecodeWorker(redis_url, SECRET, answer=ANSWER):
                await router.ready()
                assert (await router.http.get("/health")).status_code == 200
                assert (await router.chat()).status_code == 200

    run_async(main())


def test_health_is_red_until_the_expected_workers_are_there(redis_url):
    async def main() -> None:
        names = ("decode-0", "prefill-0")
        links = [link("prefill-0", 1.5)]
        async with (
            live_router(redis_url, expected_workers=names) as router,
            FakeDecodeWorker(redis_url, SECRET, "decode-0", answer=ANSWER, links=links),
        ):
            await router.ready()
            health = await router.http.get("/health")
            assert (health.status_code, health.json()["status"]) == (503, "starting")
            assert health.json()["waiting_for"] == ["prefill-0"]
            assert (await router.chat()).status_code == 200  # it serves meanwhile
            async with prefill_record(redis_url, SECRET, "prefill-0"):
                await eventually(lambda: router.service.health()["status"] == "ok")
            await eventually(lambda: len(router.service.directory.workers()) == 1)
            assert (await router.http.get("/health")).status_code == 200  # it can serve

    run_async(main())


def test_health_names_workers_and_their_links(redis_url):
    async def main() -> None:
        async with (
            live_router(redis_url) as router,
            FakeDecodeWorker(redis_url, SECRET, "decode-0", links=[link("prefill-0", 1.5)]),
            prefill_record(
                redis_url, SECRET, "prefill-0", links=[link("decode-0", 1.5), link("gone")]
            ),
            prefill_record(redis_url, SECRET, "prefill-1"),
        ):
            await router.ready()
            await eventually(lambda: len(router.service.directory.workers()) == 3)
            body = (await router.http.get("/health")).json()
        assert body["status"] == "ok"
        assert body["model"] == MODEL
        prefill, other, decode = body["services"]
        assert (prefill["id"], prefill["role"], prefill["links"]) == ("prefill-0", "prefill", [])
        assert prefill["missing_links"] == other["missing_links"] == []
        assert decode["missing_links"] == ["prefill-1"]
        assert (decode["id"], decode["state"], decode["epoch"]) == ("decode-0", "ready", 1)
        assert decode["kv_transports"] == ["zmq"]
        assert decode["links"] == [{"peer": "prefill-0", "transport": "zmq", "gb_per_s": 1.5}]

    run_async(main())


def test_health_names_workers_of_another_release(redis_url):
    later = PROTOCOL_VERSION + 1

    async def main() -> None:
        async with (
            live_router(redis_url) as router,
            FakeDecodeWorker(redis_url, SECRET, "decode-0", protocol=later, epoch=7),
            prefill_record(redis_url, SECRET, "prefill-0"),
        ):
            await eventually(lambda: router.service.directory.others)
            await eventually(lambda: router.service.directory.workers())
            response = await router.http.get("/health")
            assert response.status_code == 503
            body = response.json()
            assert body["protocol"] == PROTOCOL_VERSION
            [prefill, decode] = body["services"]
            assert prefill["state"] == "ready"
            assert (decode["id"], decode["role"], decode["epoch"]) == ("decode-0", "decode", 7)
            assert (decode["state"], decode["protocol"]) == ("another version", later)
            assert (await router.complete(prompt="Hi")).status_code == 503
            shown = await fetch_status(router.http, router.url)
            assert not shown.ok
            assert [w.service.state for w in shown.workers] == ["ready", "another version"]

    run_async(main())


def test_metrics_show_requests_and_workers(redis_url):
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        worker.hold.clear()
        pending = asyncio.create_task(router.complete(prompt="Hi", max_tokens=10))
        label = f'{{model_name="{MODEL}"}}'
        await eventually(lambda: router.service.dispatcher.admission.num_waiting == 1)
        assert await router.metric(f"vllm:num_requests_waiting{label}") == 1
        worker.hold.set()
        assert (await pending).status_code == 200
        assert await router.metric(f"vllm:num_requests_waiting{label}") == 0
        assert await router.metric(f"vllm:time_to_first_token_seconds_count{label}") == 1
        assert await router.metric(f"vllm:inter_token_latency_seconds_count{label}") == 9
        assert await router.metric(f"vllm:generation_tokens_total{label}") == 10
        assert await router.metric("pagewire_redis_up") == 1
        free = 'pagewire_kv_blocks{role="decode",state="free",worker="decode-0"}'
        assert await router.metric(free) == 64

    with_worker(redis_url, scenario)


def test_the_readme_lists_the_metrics_that_have_vllms_names(redis_url):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    present, absent = re.search(
        r"these of vLLM's, (.*?)\n\n.* stay empty, (.*?)\n\n", readme, re.DOTALL
    ).groups()

    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        page = (await router.http.get("/metrics")).text
        names = re.findall(r"^# TYPE (vllm:\w+)", page, re.MULTILINE)
        families = {name for name in names if not name.endswith("_created")}  # off in a process
        assert set(re.findall(r"vllm:\w+", present)) == families
        assert families.isdisjoint(re.findall(r"vllm:\w+", absent))

    with_worker(redis_url, scenario)


Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def metrics_by(
    router: LiveRouter, worker: FakeDecodeWorker, answer: Answer
) -> AsyncIterator[None]:
    """Have a worker's metrics asked for here."""
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        worker.put_record(metrics_endpoint=f"http://127.0.0.1:{port}")
        await eventually(
            lambda: str(port) in router.service.directory.get("decode-0").metrics_endpoint
        )
        yield


def page_of(text: str) -> Answer:
    """Answer with this page."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(text)}\r\n\r\n"
        writer.write((head + text).encode())
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    return answer


def test_metrics_relay_the_workers_own(redis_url):
    family, own = "pagewire_kv_transfer_bytes_total", 'direction="received",peer="prefill-0"'
    page = f"# TYPE {family} counter\n{family}{{{own}}} 4096\n"

    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        async with metrics_by(router, worker, page_of(page)):
            labels = f'{own},role="decode",worker="decode-0"'
            assert await router.metric(f"{family}{{{labels}}}") == 4096
        # The server is gone: the router's own metrics come all the same.
        text = await router.metrics_page()
        assert family not in text
        assert 'pagewire_worker_scrape_failures_total{worker="decode-0"} 1.0' in text

    with_worker(redis_url, scenario)


def test_a_forged_worker_record_makes_the_router_fetch_nothing(redis_url):
    """Somebody who may write to Redis has no worker, nor a page that the router would relay."""
    asked: list[int] = []

    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            asked.append(1)
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        here = f"127.0.0.1:{port}"
        ends = {"endpoint": f"tcp://{here}", "metrics_endpoint": f"http://{here}"}
        async with server, client_of(redis_url) as redis:
            for worker_id in ("decode-0", "decode-1"):  # one that there is, and another
                forged = msgspec.msgpack.encode(record(worker_id, epoch=2**62, **ends))
                prefix = f"pagewire:{cluster_tag(SECRET)}:worker"
                await redis.set(f"{prefix}:{worker_id}", forged)
                await redis.sadd(f"{prefix}s", worker_id)
            name = 'pagewire_router_ignored_worker_records_total{reason="unsealed"}'
            for _ in range(500):
                if await router.metric(name):
                    break
                await asyncio.sleep(0.01)
            assert {each.worker_id for each in router.service.directory.workers()} == {"decode-0"}
            assert (await router.complete(prompt="Hi", max_tokens=2)).status_code == 200
        assert asked == []

    with_worker(redis_url, scenario)


def test_what_a_worker_shows_itself_is_newer_than_its_record(redis_url):
    page = """\
# TYPE pagewire_kv_blocks gauge
pagewire_kv_blocks{state="used"} 16
pagewire_kv_blocks{state="total"} 64
# TYPE pagewire_requests_running gauge
pagewire_requests_running 3
"""
    used = 'pagewire_kv_blocks{role="decode",state="used",worker="decode-0"}'
    running = 'pagewire_requests_running{role="decode",worker="decode-0"}'
    share = f'vllm:kv_cache_usage_perc{{model_name="{MODEL}"}}'

    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        assert [await router.metric(name) for name in (used, running, share)] == [0, 0, 0]
        async with metrics_by(router, worker, page_of(page)):
            assert [await router.metric(name) for name in (used, running, share)] == [16, 3, 0.25]
        assert [await router.metric(name) for name in (used, running, share)] == [0, 0, 0]

    with_worker(redis_url, scenario)


@pytest.mark.parametrize(
    "page", ["<html>no metrics</html>", "a{b=", "# TYPE x\n{} 5 6 7 8", 'a{b="1", ="c"} 1']
)
def test_of_a_worker_that_shows_nonsense_the_record_is_shown(redis_url, page):
    free = 'pagewire_kv_blocks{role="decode",state="free",worker="decode-0"}'

    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        async with metrics_by(router, worker, page_of(page)):
            text = await router.metrics_page()
        assert f"{free} 64.0" in text
        assert 'pagewire_worker_scrape_failures_total{worker="decode-0"} 1.0' in text

    with_worker(redis_url, scenario)


@pytest.mark.parametrize(
    "endpoint", ["http://127.0.0.1:70000", "http://[::1", "http://xn--\u2028.com", "elsewhere", ""]
)
def test_of_a_worker_whose_metrics_address_is_nonsense_the_record_is_shown(redis_url, endpoint):
    free = 'pagewire_kv_blocks{role="decode",state="free",worker="decode-0"}'

    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        worker.put_record(metrics_endpoint=endpoint)
        directory = router.service.directory
        await eventually(lambda: directory.get("decode-0").metrics_endpoint == endpoint)
        answer = await router.http.get("/metrics")
        assert answer.status_code == 200
        assert f"{free} 64.0" in answer.text

    with_worker(redis_url, scenario)


def test_a_frozen_workers_metrics_cost_no_more_than_their_timeout(redis_url):
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        release = asyncio.Event()

        async def hang(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await release.wait()
            writer.close()

        async with metrics_by(router, worker, hang):
            async with asyncio.timeout(4):
                assert (await router.http.get("/metrics")).status_code == 200
            release.set()

    with_worker(redis_url, scenario)
