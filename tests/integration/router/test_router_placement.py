"""Where requests go: by cached prefix, load and policy, with Redis and without."""

import asyncio
import itertools
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import httpx
import msgspec
import pytest

from pagewire.services.router.placement.worker_selector import WAKE_INTERVAL_S
from pagewire.shared.cluster.redis_client import cluster_tag, connect_redis
from pagewire.shared.cluster.registry import WorkerLoad
from pagewire.shared.control.protocol import LoadReport
from pagewire.shared.costs.load import Load
from pagewire.shared.index.prefix_index import PrefixIndex
from pagewire.shared.kv.block_hash import BlockHasher
from pagewire.shared.model.config import config_digest
from pagewire.shared.model.demo import demo_model_path
from pagewire.shared.request.sampling import RequestSpec
from pagewire.tests.support.aio import eventually, run_async
from pagewire.tests.support.fake_decode_worker import (
    HEARTBEAT_S,
    FakeDecodeWorker,
    fake_prefill_worker,
)
from pagewire.tests.support.live_router import MODEL, SECRET, LiveRouter, live_router
from pagewire.tests.support.placing_cluster import PlacingCluster, with_cluster
from pagewire.tests.support.redis_server import RedisServer
from pagewire.tests.support.worker_records import IDENTITY

HASHER = BlockHasher(SECRET, IDENTITY)
LONG = [7] * 200
OTHER_MODEL = msgspec.structs.replace(IDENTITY, fingerprint="another")
OTHER_BLOCKS = msgspec.structs.replace(IDENTITY, block_size=32)


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


async def publish(
    redis: RedisServer, worker_id: str, tokens: list[int], epoch: int = 1, salt: str = ""
) -> None:
    """Write to the index, as a worker does, that it has cached a prompt."""
    client = await connect_redis(redis.url)
    index = PrefixIndex(client, cluster_tag(SECRET))
    await index.publish(worker_id, epoch, HASHER.hash_prompt(tokens, salt.encode()), [])
    await client.aclose()


def test_a_prompt_goes_where_its_prefix_is_cached(redis):
    async def scenario(cluster: PlacingCluster) -> None:
        for number in range(6):
            prompt = [number + 10] * 200
            decode, prefill = f"decode-{number % 2}", f"prefill-{number // 2 % 2}"
            await publish(redis, decode, prompt)
            await publish(redis, prefill, prompt)
            chosen, prefills = await cluster.ask(prompt)
            assert (chosen, prefills[0]) == (decode, prefill)
            assert len(prefills) == 2

    with_cluster(redis, scenario)


def test_idle_prefill_workers_are_woken_as_soon_as_a_request_begins_to_arrive(redis):
    async def scenario(cluster: PlacingCluster) -> None:
        (busy, idle), url = cluster.prefills, httpx.URL(cluster.router.url)
        await eventually(lambda: busy.num_routers == idle.num_routers == 1)
        busy.put_record(load=WorkerLoad(queued_prefill_tokens=60))
        directory = cluster.router.service.members.directory
        await eventually(lambda: directory.get("prefill-0").load.queued_prefill_tokens == 60)
        for number in range(1, 4):
            _, writer = await asyncio.open_connection(url.host, url.port)
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{"
            )
            await eventually(lambda: idle.times_woken == number)  # noqa: B023
            writer.close()
            await writer.wait_closed()
            await asyncio.sleep(WAKE_INTERVAL_S)
        assert busy.times_woken == 0
        await idle.die()
        assert (await cluster.ask(LONG))[1]  # it could not be woken, and the request goes on

    with_cluster(redis, scenario)


def test_a_burst_of_requests_wakes_a_prefill_worker_once(redis):
    async def scenario(cluster: PlacingCluster) -> None:
        await eventually(lambda: all(each.num_routers == 1 for each in cluster.prefills))
        for _ in range(1000):
            cluster.router.service.selector.wake_idle()
        await asyncio.sleep(0.3)
        assert 1 <= cluster.prefills[0].times_woken < 100

    with_cluster(redis, scenario)


def test_a_salted_prompt_goes_where_it_is_cached_with_its_salt(redis):
    async def scenario(cluster: PlacingCluster) -> None:
        salts = {"prefill-0": "", "prefill-1": "one", "prefill-2": "two"}
        for number in range(4):
            prompt = [number + 10] * 200
            for worker_id, salt in salts.items():
                await publish(redis, worker_id, prompt, salt=salt)
            for worker_id, salt in salts.items():
                _, prefills = await cluster.ask(prompt, cache_salt=salt or None)
                assert prefills[0] == worker_id

    with_cluster(redis, scenario, prefills=3)


def test_entries_of_an_earlier_run_do_not_count(redis):
    async def scenario(cluster: PlacingCluster) -> None:
        await publish(redis, "prefill-0", LONG, epoch=99)
        await publish(redis, "prefill-1", LONG[:32], epoch=1)
        assert (await cluster.ask(LONG))[1][0] == "prefill-1"

    with_cluster(redis, scenario)


def test_the_second_of_two_equal_prompts_follows_the_first(redis):
    async def scenario(cluster: PlacingCluster) -> None:
        for number in range(8):
            prompt = [number + 10] * 1000
            first = await cluster.ask(prompt)
            second = await cluster.ask(prompt)
            assert first[1][0] == second[1][0]
            assert first[0] == second[0]

    with_cluster(redis, scenario)


def test_a_burst_of_different_prompts_spreads(redis):
    async def scenario(cluster: PlacingCluster) -> None:
        for decode in cluster.decodes:
            decode.hold.clear()
        pending = [
            asyncio.create_task(cluster.router.complete(prompt=[n + 10] * 160, max_tokens=1))
            for n in range(12)
        ]
        await eventually(lambda: sum(d.active for d in cluster.decodes) == 12)
        assert [d.active for d in cluster.decodes] == [6, 6]
        firsts = [g.prefill_workers[0] for d in cluster.decodes for g in d.generated]
        assert firsts.count("prefill-0") == firsts.count("prefill-1") == 6
        for decode in cluster.decodes:
            decode.hold.set()
        assert {r.status_code for r in await asyncio.gather(*pending)} == {200}

    with_cluster(redis, scenario)


def test_a_session_has_its_worker_until_that_one_is_busier(redis):
    async def scenario(cluster: PlacingCluster) -> None:
        contents = itertools.count(10)

        async def home(**named: Any) -> str:
            return (await cluster.ask([next(contents)] * 40, **named))[0]

        homes = {f"s{each}": await home(session_id=f"s{each}") for each in range(8)}
        assert {*homes.values()} == {"decode-0", "decode-1"}
        for name, first in homes.items():
            assert await home(session_id=name) == first
            assert await home(prompt_cache_key=name) == first
            cluster.router.http.headers["X-Session-Id"] = name
            assert await home() == first
            assert await home(session_id="s0") == homes["s0"]
            del cluster.router.http.headers["X-Session-Id"]
        busy, _ = cluster.decodes
        busy.put_record(load=WorkerLoad(used_blocks=60, total_blocks=64))
        directory = cluster.router.service.members.directory
        await eventually(lambda: directory.get("decode-0").load.used_blocks == 60)
        for name in homes:
            assert await home(session_id=name) == "decode-1"

    with_cluster(redis, scenario)


def test_a_session_has_a_home_from_its_second_turn_on(redis):
    async def scenario(cluster: PlacingCluster) -> None:
        selector = cluster.router.service.selector
        for has_home in (False, True, True):
            placement, prompt = await selector.place([1] * 40, frozenset(), RequestSpec(), 5)
            assert prompt.has_home is has_home
            selector.record_sent(prompt, {placement.decode_workers[0]})
        _, prompt = await selector.place([1] * 40, frozenset(), RequestSpec(), 6)
        assert not prompt.has_home

    with_cluster(redis, scenario)


def test_a_session_keeps_its_worker_without_redis(redis):
    async def scenario(cluster: PlacingCluster) -> None:
        redis.kill()
        directory = cluster.router.service.members.directory
        await eventually(lambda: not directory.redis_ok)
        for number in range(8):
            found = [(await cluster.ask([n] * 200, session_id=f"s{number}"))[0] for n in range(3)]
            assert len({*found}) == 1

    with_cluster(redis, scenario)


def test_load_in_the_records_counts(redis):
    async def scenario(cluster: PlacingCluster) -> None:
        busy, idle = cluster.decodes
        busy.put_record(load=WorkerLoad(used_blocks=60, total_blocks=64))
        directory = cluster.router.service.members.directory
        await eventually(lambda: directory.get("decode-0").load.used_blocks == 60)
        for number in range(5):
            assert (await cluster.ask([number + 10] * 40))[0] == idle.record.worker_id

    with_cluster(redis, scenario)


def test_round_robin_takes_workers_in_turn(redis):
    async def scenario(cluster: PlacingCluster) -> None:
        await publish(redis, "decode-0", LONG)
        chosen = [(await cluster.ask(LONG))[0] for _ in range(4)]
        assert chosen == ["decode-0", "decode-1"] * 2

    with_cluster(redis, scenario, policy="round_robin")


def test_without_prefill_workers_the_decode_worker_is_given_none(redis):
    async def scenario(cluster: PlacingCluster) -> None:
        assert (await cluster.ask(LONG))[1] == []

    with_cluster(redis, scenario, prefills=0)


def test_draining_prefill_workers_are_not_named(redis):
    async def scenario(cluster: PlacingCluster) -> None:
        async with fake_prefill_worker(redis.url, SECRET, "prefill-9", state="draining"):
            directory = cluster.router.service.members.directory
            await eventually(lambda: directory.get("prefill-9") is not None)
            assert "prefill-9" not in (await cluster.ask(LONG))[1]

    with_cluster(redis, scenario)


@pytest.mark.parametrize("trouble", ["killed", "frozen"])
def test_without_redis_requests_answer_by_load_alone(redis, trouble):
    async def scenario(cluster: PlacingCluster) -> None:
        await cluster.ask(LONG)
        if trouble == "killed":
            redis.kill()
        else:
            redis.freeze()
        service = cluster.router.service
        await eventually(lambda: not service.members.directory.redis_ok)
        for decode in cluster.decodes:
            decode.hold.clear()
        async with asyncio.timeout(15):
            pending = [
                asyncio.create_task(cluster.router.complete(prompt=[n + 10] * 200, max_tokens=1))
                for n in range(20)
            ]
            await eventually(lambda: sum(d.active for d in cluster.decodes) == 20)
            assert [d.active for d in cluster.decodes] == [10, 10]
            for decode in cluster.decodes:
                decode.hold.set()
            assert {r.status_code for r in await asyncio.gather(*pending)} == {200}
        health = await cluster.router.cluster()
        assert (health.status_code, health.json()["redis"]) == (200, "down")
        # Longer than any lease: the control channel says that they are alive.
        await asyncio.sleep(1.5)
        assert (await cluster.router.complete(prompt=LONG, max_tokens=1)).status_code == 200
        if trouble == "killed":
            redis.start()
        else:
            redis.thaw()
        await eventually(lambda: service.members.directory.redis_ok)
        assert (await cluster.router.complete(prompt=LONG, max_tokens=1)).status_code == 200

    with_cluster(redis, scenario)


def test_a_dead_worker_is_noticed_without_redis(redis):
    async def scenario(cluster: PlacingCluster) -> None:
        redis.kill()
        dead, alive = cluster.decodes
        await dead.die()
        await cluster.router.ready(1)
        assert (await cluster.ask(LONG))[0] == alive.record.worker_id

    with_cluster(redis, scenario)


def test_a_flushed_or_garbled_redis_costs_only_hits(redis):
    async def scenario(cluster: PlacingCluster) -> None:
        with redis.client() as client:
            tag = cluster_tag(SECRET)
            for corrupt in (
                client.flushall,
                lambda: client.set(f"pagewire:{tag}:workers", b"\x00garbage"),
                lambda: client.set(f"pagewire:{tag}:worker:decode-0", b"\xff" * 100),
                lambda: client.sadd(f"pagewire:{tag}:workers", "nobody", b"\xff\xfe"),
            ):
                corrupt()
                for _ in range(5):
                    response = await cluster.router.complete(prompt=LONG, max_tokens=1)
                    assert response.status_code == 200
                    await asyncio.sleep(0.05)

    with_cluster(redis, scenario)


def test_workers_of_another_model_or_block_size_get_nothing_while_the_first_ones_live(
    redis, caplog
):
    async def main() -> None:
        async with live_router(redis.url) as router, AsyncExitStack() as stack:
            workers = []
            for number, model in enumerate((IDENTITY, OTHER_MODEL, IDENTITY, OTHER_BLOCKS)):
                name = f"decode-{number}"
                worker = FakeDecodeWorker(redis.url, SECRET, name, model_identity=model)
                workers.append(await stack.enter_async_context(worker))
                await eventually(lambda n=number: reachable(router) == n + 1)
            for number in range(8):
                response = await router.complete(prompt=[number] * 40, max_tokens=1)
                assert response.status_code == 200, response.text
            assert [bool(worker.generated) for worker in workers] == [True, False, True, False]
            for worker in (workers[0], workers[2]):
                await worker.die()
            await eventually(lambda: reachable(router) == 2)
            response = await router.complete(prompt=[9] * 40, max_tokens=1)
            assert response.status_code == 200, response.text
            assert [len(workers[number].generated) for number in (1, 3)] == [1, 0]

    run_async(main())
    said = [record.message for record in caplog.records]
    for number, field, model in ((1, "fingerprint", OTHER_MODEL), (3, "block_size", OTHER_BLOCKS)):
        values = (
            f"it has {field} {getattr(model, field)}, the served model {getattr(IDENTITY, field)}"
        )
        assert any(f"decode-{number} gets no requests: {values}" in text for text in said)


def test_a_worker_with_another_config_never_gets_requests(redis, caplog):
    own = config_digest(demo_model_path())

    async def main() -> None:
        async with AsyncExitStack() as stack:
            strays = [
                FakeDecodeWorker(
                    redis.url, SECRET, f"{role}-9", role=role, config_digest="another", **stray
                )
                for role, stray in (("decode", {}), ("prefill", {"model_identity": OTHER_MODEL}))
            ]
            for stray in strays:
                await stack.enter_async_context(stray)
            async with live_router(redis.url) as router:  # it finds the strays first
                await eventually(lambda: all(stray.num_routers == 1 for stray in strays))
                for epoch in (1, 2):  # the right worker restarts
                    assert (await router.http.get("/ready")).status_code == 503
                    early = asyncio.create_task(router.complete(prompt="Hi", max_tokens=1))
                    await asyncio.sleep(2 * HEARTBEAT_S)
                    assert not early.done()  # it waits for the right worker
                    async with FakeDecodeWorker(
                        redis.url, SECRET, epoch=epoch, config_digest=own
                    ) as right:
                        await router.ready()
                        assert (await early).status_code == 200
                        for _ in range(4):
                            response = await router.complete(prompt="Hi", max_tokens=1)
                            assert response.status_code == 200, response.text
                        embedding = {"model": MODEL, "input": "Hi"}
                        response = await router.http.post("/v1/embeddings", json=embedding)
                        assert response.status_code == 200, response.text
                        assert (len(right.generated), len(right.embedded)) == (5, 1)
                        services = (await router.cluster()).json()["services"]
                        states = {each["id"]: each["state"] for each in services}
                        other = dict.fromkeys(("decode-9", "prefill-9"), "another model")
                        assert states == {"decode-0": "ready", **other}
                        label = 'state="another_model",worker_role="decode"'
                        assert await router.metric(f"pagewire_workers{{{label}}}") == 1
                    await router.ready(0)
            assert not any(stray.generated or stray.embedded for stray in strays)

    run_async(main())
    why = "its model's config.json is not that of this router's --model"
    for role in ("decode", "prefill"):
        assert f"{role}-9 gets no requests: {why}" in caplog.messages


def reachable(router: LiveRouter) -> int:
    """Workers that the router has a connection to."""
    return sum(
        service["state"] != "unreachable"
        for service in router.service.describe_cluster()["services"]
    )


def test_loads_that_come_with_tokens_replace_those_of_older_records(redis):
    async def scenario(cluster: PlacingCluster) -> None:
        for worker, amount in zip(cluster.decodes, (1000, 0), strict=True):
            worker.load = LoadReport(1, 10, Load(blocks=amount))
            worker.prefilled_by = (
                f"prefill-{amount // 1000}",
                LoadReport(1, 10, Load(tokens=50 * amount)),
            )
        seen: set[str] = set()
        number = itertools.count(10)
        while len(seen) < 2:  # ties are placed at random
            decode, _ = await cluster.ask([next(number)] * 200)
            seen.add(decode)
        for _ in range(8):
            decode, prefills = await cluster.ask([next(number)] * 200)
            assert (decode, prefills[0]) == ("decode-1", "prefill-0")

    with_cluster(redis, scenario)
