"""Faults, caused for real, as they stand in `/metrics`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import httpx
import msgspec
import pytest
import zmq
from prometheus_client.parser import text_string_to_metric_families

from pagewire.shared.cluster.redis_client import cluster_tag
from pagewire.shared.control.channel import ClusterKeys
from pagewire.shared.control.protocol import PROTOCOL_VERSION
from pagewire.shared.settings.config import WorkerSettings, load_settings
from pagewire.shared.worker.compose import make_service
from pagewire.shared.worker.runtime import WorkerRuntime
from pagewire.tests.support.aio import run_async
from pagewire.tests.support.control import raw_peer
from pagewire.tests.support.fake_decode_worker import FakeDecodeWorker
from pagewire.tests.support.live_router import SECRET, live_router
from pagewire.tests.support.redis_server import RedisServer
from pagewire.tests.support.worker_records import record, sealed

KEYS = ClusterKeys.derive(SECRET)
Sample = tuple[str, frozenset[tuple[str, str]]]


def sample(name: str, **labels: str) -> Sample:
    return f"pagewire_{name}_total", frozenset(labels.items())


CONTROL = [sample("control_faults", kind=k) for k in ("malformed", "other_version", "denied")]
KV = [sample("kv_link_faults", kind=k) for k in ("malformed", "denied")]
UNSEEN_KV = [sample("kv_link_faults", kind=k) for k in ("lost", "stray")]
IGNORED = ("malformed", "other_version", "unsealed")
RECORDS = [sample("ignored_worker_records", reason=r) for r in IGNORED]
REDIS = [sample("worker_record_failed_renewals"), sample("index_failed_flushes")]


async def page(http: httpx.AsyncClient, url: str) -> dict[Sample, float]:
    """Samples of a page, without the name of the one router there is."""
    text = (await http.get(f"{url}/metrics")).text
    return {
        (
            each.name,
            frozenset(set(each.labels.items()) - {("router", each.labels.get("router"))}),
        ): (each.value)
        for family in text_string_to_metric_families(text)
        for each in family.samples
    }


async def wait_for(http: httpx.AsyncClient, url: str, samples: list[Sample]) -> None:
    """Wait until each of these is above 0."""
    for _ in range(150):
        shown = await page(http, url)
        missing = [each for each in samples if not shown.get(each)]
        if not missing:
            return
        await asyncio.sleep(0.1)
    pytest.fail(f"not on {url}/metrics: {missing}")


@asynccontextmanager
async def decode_worker(redis: RedisServer) -> AsyncIterator[WorkerRuntime]:
    """Run a real decode worker in this process."""
    fields = {
        "redis_url": redis.url,
        "cluster_secret": SECRET,
        "worker_id": "decode-0",
        "device": "cpu",
        "num_blocks": 64,
        "kv_transport": "zmq",
        "heartbeat_s": 0.1,
        "lease_s": 1.0,
    }
    runtime = WorkerRuntime(load_settings(WorkerSettings, fields), "decode")
    life = asyncio.create_task(runtime.run(make_service))
    try:
        yield runtime
    finally:
        life.cancel()
        await asyncio.wait([life])


def leave_records(redis: RedisServer) -> None:
    """Put three worker records into Redis that nobody can use."""
    later = msgspec.msgpack.encode(record("later", protocol=PROTOCOL_VERSION + 1))
    left = {
        "later": sealed("later", later, SECRET),
        "noise": sealed("noise", b"noise", SECRET),
        "stranger": msgspec.msgpack.encode(record("stranger")),
    }
    prefix = f"pagewire:{cluster_tag(SECRET)}:worker"
    with redis.client() as client:
        for worker_id, stored in left.items():
            client.set(f"{prefix}:{worker_id}", stored)
            client.sadd(f"{prefix}s", worker_id)


@asynccontextmanager
async def saying(endpoint: str, *frames: bytes) -> AsyncIterator[None]:
    """Send something as a member of the cluster."""
    async with raw_peer(endpoint, keys=KEYS) as member:
        for frame in frames:
            member.send(frame)
        yield


@contextmanager
def knocking(endpoint: str) -> Iterator[None]:
    """Come without the cluster's key."""
    public, secret = zmq.curve_keypair()
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        stranger.curve_serverkey = KEYS.public
        stranger.curve_publickey, stranger.curve_secretkey = public, secret
        stranger.connect(endpoint)
        yield


def test_a_workers_faults_are_on_its_page(redis_server: RedisServer) -> None:
    async def scenario() -> None:
        async with (
            live_router(redis_server.url) as router,
            decode_worker(redis_server) as worker,
            httpx.AsyncClient(trust_env=False) as http,
        ):
            await router.ready()
            record = router.service.members.directory.get("decode-0")
            kv_endpoint = worker.kv.receiver.socket.endpoint
            shown = await page(http, record.metrics_endpoint)
            everything = [*CONTROL, *KV, *UNSEEN_KV, *RECORDS, *REDIS]
            assert {each: shown.get(each) for each in everything} == dict.fromkeys(everything, 0)
            leave_records(redis_server)
            async with (
                saying(record.endpoint, b"", bytes([PROTOCOL_VERSION + 1, 0])),
                saying(kv_endpoint, b"noise"),
            ):
                with knocking(record.endpoint), knocking(kv_endpoint):
                    await wait_for(http, record.metrics_endpoint, [*CONTROL, *KV, *RECORDS])
            redis_server.kill()
            caused = [*CONTROL, *KV, *RECORDS, *REDIS]
            await wait_for(http, record.metrics_endpoint, caused)

    run_async(scenario(), timeout=60)


def test_a_routers_faults_are_on_its_page(redis_server: RedisServer) -> None:
    records = [sample("router_ignored_worker_records", reason=r) for r in IGNORED]
    lookups = sample("index_failed_lookups")

    async def scenario() -> None:
        workers = [FakeDecodeWorker(redis_server.url, SECRET, f"decode-{i}") for i in range(2)]
        async with live_router(redis_server.url) as router, workers[0], workers[1]:
            await router.ready(2)
            url = router.service.pages.metrics_endpoint
            shown = await page(router.http, url)
            assert [shown.get(each) for each in (*records, lookups)] == [0, 0, 0, 0]
            leave_records(redis_server)
            await wait_for(router.http, url, records)
            redis_server.freeze()
            answer = await router.complete(prompt=[5] * 40, max_tokens=2)
            assert answer.status_code == 200
            await wait_for(router.http, url, [lookups])
            redis_server.thaw()

    run_async(scenario())
