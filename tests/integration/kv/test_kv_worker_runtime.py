"""Whole prefill and decode workers: their links in worker records, and what `/metrics` shows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import httpx
import pytest
import zmq
from prometheus_client.parser import text_string_to_metric_families

from pagewire.shared.cluster.registry import WorkerRecord
from pagewire.shared.control.channel import ClusterKeys, ControlServer
from pagewire.shared.control.protocol import Generate, KvHello, Role, TokenBatch, TokenOutput
from pagewire.shared.request.sampling import RequestSpec
from pagewire.shared.settings.config import WorkerSettings, load_settings
from pagewire.shared.worker import compose
from pagewire.shared.worker.compose import make_service
from pagewire.shared.worker.runtime import WorkerRuntime
from pagewire.tests.support.aio import eventually, run_async
from pagewire.tests.support.control import connected, raw_peer
from pagewire.tests.support.live_router import SECRET, LiveRouter, live_router
from pagewire.tests.support.redis_server import RedisServer

KEYS = ClusterKeys.derive(SECRET)
Sample = tuple[str, frozenset[tuple[str, str]]]


def samples(name: str, label: str, values: str, **labels: str) -> set[Sample]:
    """Those of a counter with one label of several values."""
    return {
        (f"pagewire_kv_{name}_total", frozenset({label: value, **labels}.items()))
        for value in values.split()
    }


OF_ALL = (
    samples("transfer_segments", "outcome", "ok corrupt dropped lost", direction="sent")
    | samples("transfer_segments", "outcome", "ok corrupt dropped", direction="received")
    | samples("link_faults", "kind", "lost malformed stray denied")
    | {("pagewire_kv_transfer_resends_total", frozenset())}
    | {
        ("pagewire_local_prefills_total", frozenset({("reason", reason)}))
        for reason in ("short", "no_worker", "no_link", "failed")
    }
)


async def page(http: httpx.AsyncClient, url: str) -> dict[Sample, float]:
    text = (await http.get(f"{url}/metrics")).text
    return {
        (each.name, frozenset(each.labels.items())): each.value
        for family in text_string_to_metric_families(text)
        for each in family.samples
    }


def value(shown: dict[Sample, float], name: str, **labels: str) -> float | None:
    return shown.get((f"pagewire_kv_{name}", frozenset(labels.items())))


@asynccontextmanager
async def worker(redis: RedisServer, role: Role) -> AsyncIterator[WorkerRuntime]:
    """Run a whole worker in this process."""
    fields = {
        "redis_url": redis.url,
        "cluster_secret": SECRET,
        "worker_id": f"{role}-0",
        "device": "cpu",
        "num_blocks": 64,
        "kv_transport": "zmq",
        "heartbeat_s": 0.1,
        "lease_s": 5.0,
    }
    runtime = WorkerRuntime(load_settings(WorkerSettings, fields), role)
    life = asyncio.create_task(runtime.run(make_service))
    try:
        yield runtime
    finally:
        life.cancel()
        await asyncio.wait([life])


async def record_of(router: LiveRouter, worker_id: str) -> WorkerRecord:
    directory = router.service.members.directory
    await eventually(lambda: directory.get(worker_id), timeout=20)
    record = directory.get(worker_id)
    assert record is not None
    return record


def test_links_are_in_worker_records_and_all_labels_on_the_pages_from_the_start(
    redis_server: RedisServer,
) -> None:
    async def scenario() -> None:
        async with (
            live_router(redis_server.url, policy="prefix") as router,
            worker(redis_server, "prefill"),
            worker(redis_server, "decode"),
            httpx.AsyncClient(trust_env=False) as http,
        ):
            await router.ready()
            decode = await record_of(router, "decode-0")
            prefill = await record_of(router, "prefill-0")
            sent = await page(http, prefill.metrics_endpoint)
            received = await page(http, decode.metrics_endpoint)
            for shown in (sent, received):
                assert {each: shown.get(each) for each in OF_ALL} == dict.fromkeys(OF_ALL, 0)

            directory = router.service.members.directory
            await eventually(lambda: directory.get("prefill-0").links, timeout=20)
            [link] = directory.get("prefill-0").links
            assert (link.peer, link.transport) == ("decode-0", "zmq")
            assert link.gbps > 0
            assert directory.get("decode-0").kv_transports == ["zmq"]
            services = {each["id"]: each for each in router.service.describe_cluster()["services"]}
            assert services["decode-0"]["missing_links"] == []

            answer = await router.complete(prompt=list(range(5, 55)), max_tokens=3)
            assert answer.status_code == 200
            sent = await page(http, prefill.metrics_endpoint)
            received = await page(http, decode.metrics_endpoint)
            for shown, direction, peer in (
                (sent, "sent", "decode-0"),
                (received, "received", "prefill-0"),
            ):
                ok = value(shown, "transfer_segments_total", direction=direction, outcome="ok")
                assert ok is not None and ok > 0
                labels = {"direction": direction, "transport": "zmq", "peer": peer}
                assert value(shown, "transfer_bytes_total", **labels)
                assert value(shown, "links") == 1

    run_async(scenario(), timeout=60)


async def tokens_from(
    record: WorkerRecord, first: int, *helpers: str
) -> tuple[list[int], str | None]:
    """Have a worker answer a prompt; returns the tokens, and which helper computed the prompt.

    Args:
        record: of the worker.
        first: the prompt's first token; prompts with different ones share no cached block.
        helpers: ids of workers that may compute the prompt.
    """
    message = Generate(
        request_id="r",
        prompt_token_ids=list(range(first, first + 70)),
        spec=RequestSpec(max_tokens=8, temperature=1.0, seed=5, ignore_eos=True),
        prefill_workers=list(helpers),
    )
    async with connected(record.endpoint, "router", keys=KEYS) as router:
        assert router.control is not None
        router.control.post(message)

        def outputs() -> list[TokenOutput]:
            batches = [each for each in router.received if isinstance(each, TokenBatch)]
            return [output for batch in batches for output in batch.outputs]

        await eventually(lambda: any(each.finish_reason for each in outputs()), timeout=20)
        tokens = [token for each in outputs() for token in each.token_ids]
        return tokens, outputs()[0].prefill_worker


def test_each_worker_answers_and_computes_prompts_whatever_it_prefers(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Links both ways, which there are not by default, need no more than another rule."""
    monkeypatch.setattr(compose, "offers_link", lambda own, other: own != other)

    async def scenario() -> None:
        async with (
            live_router(redis_server.url) as router,
            worker(redis_server, "prefill") as prefill,
            worker(redis_server, "decode") as decode,
        ):
            records = {name: await record_of(router, f"{name}-0") for name in ("prefill", "decode")}
            for side in (prefill, decode):
                await eventually(lambda: side.kv.sender.links, timeout=20)  # noqa: B023
                await eventually(lambda: [k for k in side.kv.receiver.links if k.is_tested])  # noqa: B023
            prefers_prefill, prefers_decode = records["prefill"], records["decode"]
            for record in records.values():  # before there was any work
                assert record.prices is not None
                assert 3 <= record.prices.prompt_steps < record.prices.steps
            tokens, helper = await tokens_from(prefers_prefill, 5)
            assert (len(tokens), helper) == (8, None)
            assert await tokens_from(prefers_decode, 5) == (tokens, None)
            tokens, helper = await tokens_from(prefers_prefill, 105, "decode-0")
            assert (await tokens_from(prefers_decode, 105), helper) == ((tokens, None), "decode-0")
            tokens, helper = await tokens_from(prefers_decode, 205, "prefill-0")
            assert (await tokens_from(prefers_prefill, 205), helper) == (
                (tokens, None),
                "prefill-0",
            )

            def links() -> dict[str, list[str]]:
                services = router.service.describe_cluster()["services"]
                return {each["id"]: [link["peer"] for link in each["links"]] for each in services}

            both_ways = {"prefill-0": ["decode-0"], "decode-0": ["prefill-0"]}
            await eventually(lambda: links() == both_ways, timeout=20)

    run_async(scenario(), timeout=60)


def test_strangers_and_nonsense_at_the_kv_port_are_counted(redis_server: RedisServer) -> None:
    async def scenario() -> None:
        async with (
            live_router(redis_server.url) as router,
            worker(redis_server, "decode") as runtime,
        ):
            await router.ready()
            endpoint = runtime.kv.receiver.socket.endpoint
            async with raw_peer(endpoint, keys=KEYS) as member:
                member.send(b"noise")
                with _knocking(endpoint):
                    for kind in ("malformed", "denied"):
                        name = f'pagewire_kv_link_faults_total{{kind="{kind}"}} '
                        async with asyncio.timeout(20):
                            while f"{name}0.0" in await _own_page(router):  # noqa: ASYNC110
                                await asyncio.sleep(0.1)
            assert (await router.complete(prompt="Hi", max_tokens=2)).status_code == 200

    run_async(scenario(), timeout=60)


async def _own_page(router: LiveRouter) -> str:
    """The decode worker's metrics, from where the router says they are."""
    [at] = (await router.targets())[0]["targets"]
    text = (await router.http.get(f"http://{at}/metrics")).text
    assert "pagewire_kv_link_faults_total" in text
    return text


@contextmanager
def _knocking(endpoint: str) -> Iterator[None]:
    """Come without the cluster's key."""
    public, secret = zmq.curve_keypair()
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        stranger.curve_serverkey = KEYS.public
        stranger.curve_publickey, stranger.curve_secretkey = public, secret
        stranger.connect(endpoint)
        yield


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_that_ends_leaves_nothing_running(
    redis_server: RedisServer, role: Role, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with live_router(redis_server.url) as router, worker(redis_server, role):
            await record_of(router, f"{role}-0")

    run_async(scenario(), timeout=60)  # which finds errors of callbacks and tasks that are left
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_link_that_is_asked_for_while_a_worker_ends_is_not_opened(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the engine the control server is still there for a moment."""

    async def scenario() -> None:
        async with worker(redis_server, "prefill") as runtime, live_router(redis_server.url) as it:
            await record_of(it, "prefill-0")
            hello = KvHello(
                worker_id="decode-0",
                epoch=1,
                model_identity=runtime.built.model_identity,
                layout=runtime.built.layout,
                link=1,
                token=bytes(16),
                endpoint="tcp://127.0.0.1:9",
                transports={"zmq": b""},
                slot_bytes=1 << 20,
            )
            asked.append(lambda: runtime.gate.on_message("decode-0.1", hello))

    async def close_late(server: ControlServer) -> None:
        for ask in asked:
            ask()
        await close(server)

    asked: list[Callable[[], None]] = []
    close = ControlServer.close
    monkeypatch.setattr(ControlServer, "close", close_late)
    run_async(scenario(), timeout=60)  # which finds tasks that are left
