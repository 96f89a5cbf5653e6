"""Several routers of one cluster: they find one another, and list the metrics of all."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from functools import partial

import msgspec
import pytest

from pagewire.shared.cluster.record_seal import RecordSeal
from pagewire.shared.cluster.redis_client import cluster_tag, connect_redis
from pagewire.shared.cluster.routers import RouterDirectory, RouterRecord, RouterState
from pagewire.tests.support.aio import eventually, run_async
from pagewire.tests.support.fake_decode_worker import HEARTBEAT_S, LEASE_S, FakeDecodeWorker
from pagewire.tests.support.live_router import ANSWER, MODEL, SECRET, live_router
from pagewire.tests.support.redis_server import RedisServer

OTHER = "another cluster's secret"


def key_of(secret: str) -> str:
    return f"pagewire:{cluster_tag(secret)}:routers"


KEY = key_of(SECRET)


def ready() -> RouterState:
    return "ready"


def clock(ahead_s: float) -> float:
    return time.time() + ahead_s


def sees(directory: RouterDirectory, routers: int) -> bool:
    return len(directory.others()) == routers


@pytest.fixture
def redis_server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


def test_each_shows_its_own_metrics_and_lists_all(redis_server: RedisServer) -> None:
    async def main() -> None:
        url = redis_server.url
        async with (
            FakeDecodeWorker(url, SECRET, answer=ANSWER),
            live_router(url, router_id="router-0") as first,
            live_router(url, router_id="router-1") as second,
        ):
            await first.ready()
            await second.ready()
            await eventually(lambda: first.service.members.routers.others())
            await eventually(lambda: second.service.members.routers.others())
            assert (await first.complete(prompt="Hi", max_tokens=3)).status_code == 200
            assert (await second.complete(prompt="Hi", max_tokens=5)).status_code == 200
            name = f'vllm:generation_tokens_total{{model_name="{MODEL}"}}'
            assert [await each.metric(name) for each in (first, second)] == [3.0, 5.0]
            targets = await first.targets()
            assert targets == await second.targets()
            names = [each["labels"]["instance"] for each in targets]
            assert names == ["decode-0", "router-0", "router-1"]
            [at] = targets[2]["targets"]
            assert f"http://{at}" == second.service.pages.metrics_endpoint
            routers = (await first.cluster()).json()["routers"]
            assert [each["id"] for each in routers] == ["router-0", "router-1"]
            assert [each["state"] for each in routers] == ["ready", "ready"]
            assert routers[1]["epoch"] == second.service.members.routers.own().epoch

    run_async(main())


def test_the_start_of_one_ends_whoever_is_asked(redis_server: RedisServer) -> None:
    async def main() -> None:
        url = redis_server.url

        def states() -> list[str]:
            return [each["state"] for each in first.service.describe_cluster()["routers"]]

        async with (
            live_router(url, router_id="router-0") as first,
            live_router(url, router_id="router-1", expected_workers=("decode-0",)),
        ):
            await eventually(lambda: states() == ["ready", "starting"])
            async with FakeDecodeWorker(url, SECRET, answer=ANSWER):
                await eventually(lambda: states() == ["ready", "ready"])
            await eventually(lambda: not first.service.members.directory.workers())
            assert states() == ["ready", "ready"]

    run_async(main())


PATIENT = {"heartbeat_s": 2.5, "lease_s": 5.0}  # what was placed counts for long


async def counts_by_worker(url: str, routers: int, workers: int, requests: int) -> list[int]:
    """Have requests placed by routers in turn; returns how many each worker got."""
    async with AsyncExitStack() as stack:
        fakes = [
            await stack.enter_async_context(
                FakeDecodeWorker(url, SECRET, f"d{number}", answer=ANSWER, lease_s=10)
            )
            for number in range(workers)
        ]
        lives = [
            await stack.enter_async_context(live_router(url, **PATIENT)) for _ in range(routers)
        ]
        for fake in fakes:
            fake.hold.clear()
        for live in lives:
            await live.ready(workers)
        asked = []
        for number in range(requests):
            prompt = [1000 + number] * 64
            request = lives[number % routers].complete(prompt=prompt, max_tokens=2)
            asked.append(asyncio.create_task(request))
            await eventually(lambda: sum(len(fake.generated) for fake in fakes) > number)  # noqa: B023
            await eventually(lambda: not any(live.service._index._writes for live in lives))
        for fake in fakes:
            fake.hold.set()
        assert {each.status_code for each in await asyncio.gather(*asked)} == {200}
        return [len(fake.generated) for fake in fakes]


@pytest.mark.parametrize(("routers", "workers", "requests"), [(2, 8, 8), (4, 8, 8), (2, 2, 16)])
def test_they_spread_requests_as_evenly_as_one(
    redis_server: RedisServer, routers: int, workers: int, requests: int
) -> None:
    counts = run_async(counts_by_worker(redis_server.url, routers, workers, requests))
    assert counts == [requests // workers] * workers


def test_a_burst_of_64_through_two_is_about_as_even_as_through_one(
    redis_server: RedisServer,
) -> None:
    async def main() -> list[int]:
        url = redis_server.url
        async with (
            FakeDecodeWorker(url, SECRET, "d0", answer=ANSWER, lease_s=10) as one,
            FakeDecodeWorker(url, SECRET, "d1", answer=ANSWER, lease_s=10) as two,
            live_router(url, **PATIENT) as first,
            live_router(url, **PATIENT) as second,
        ):
            await first.ready(2)
            await second.ready(2)
            prompts = [[1000 + number] * 64 for number in range(64)]
            asked = [
                (first, second)[number % 2].complete(prompt=prompt, max_tokens=2)
                for number, prompt in enumerate(prompts)
            ]
            assert {each.status_code for each in await asyncio.gather(*asked)} == {200}
            return [len(one.generated), len(two.generated)]

    counts = run_async(main())
    assert sum(counts) == 64
    assert max(counts) - min(counts) <= 8, counts


def test_one_that_ends_is_known_to_have_gone(redis_server: RedisServer) -> None:
    async def main() -> None:
        async with live_router(redis_server.url, router_id="router-0") as first:
            async with live_router(redis_server.url, router_id="router-1"):
                await eventually(lambda: first.service.members.routers.others())
            await eventually(lambda: not first.service.members.routers.others(), timeout=LEASE_S)
            names = [each["labels"]["instance"] for each in await first.targets()]
            assert names == ["router-0"]

    run_async(main())


def test_records_of_the_dead_and_of_strangers_are_not_taken_and_swept(
    redis_server: RedisServer,
) -> None:
    async def main() -> None:
        redis = await connect_redis(redis_server.url)
        record = RouterRecord(
            router_id="evil", epoch=1, metrics_endpoint="http://127.0.0.1:9", expires_ms=2**62
        )
        raw = msgspec.msgpack.encode(record)
        dead = RouterDirectory(redis, SECRET, "dead", HEARTBEAT_S, 0.001, ready)
        await dead.start("http://127.0.0.1:9")
        sealed = await redis.hget(KEY, "dead")
        others = RouterDirectory(redis, SECRET, "sound", HEARTBEAT_S, LEASE_S, ready)
        stranger = RouterDirectory(redis, OTHER, "evil-3", HEARTBEAT_S, LEASE_S, ready)
        await stranger.start("http://127.0.0.1:9")
        for field, value in {
            "evil": raw,
            "evil-2": b"\0" * 32 + raw,
            "evil-3": await redis.hget(key_of(OTHER), "evil-3"),
            "copied": sealed,
            "short": b"",
        }.items():
            await redis.hset(KEY, field, value)
        await others.start("http://127.0.0.1:9")
        assert others.others() == []
        assert await redis.hkeys(KEY) == [b"sound"]
        assert others.expired_records == 1
        for directory in (dead, stranger, others):
            await directory.close()
        assert await redis.hkeys(KEY) == []
        await redis.aclose()

    run_async(main())


def test_without_redis_they_serve_on_and_find_one_another_again(redis_server: RedisServer) -> None:
    async def main() -> None:
        url = redis_server.url
        async with live_router(url, router_id="a") as first, live_router(url, router_id="b"):
            await eventually(lambda: first.service.members.routers.others())
            redis_server.kill()
            await asyncio.sleep(3 * LEASE_S)  # nobody can say who is alive: the last view stays
            assert [each["id"] for each in (await first.cluster()).json()["routers"]] == ["a", "b"]
            redis_server.start()
            await eventually(lambda: first.service.members.routers.others(), timeout=10)

    run_async(main())


@pytest.mark.parametrize("kind", ["set", "sadd", "rpush"])
def test_a_key_of_a_wrong_type_heals(redis_server: RedisServer, kind: str) -> None:
    async def main() -> None:
        redis = await connect_redis(redis_server.url)
        directories = [
            RouterDirectory(redis, SECRET, name, HEARTBEAT_S, LEASE_S, ready) for name in "ab"
        ]
        await redis.execute_command(kind, KEY, "x")
        for directory in directories:
            await directory.start("http://127.0.0.1:9")
        for directory in directories:
            await eventually(partial(sees, directory, 1))
        for directory in directories:
            await directory.close()
        await redis.aclose()

    run_async(main())


def test_hosts_whose_clocks_differ_see_one_another(redis_server: RedisServer) -> None:
    async def main() -> None:
        redis = await connect_redis(redis_server.url)
        directories = [
            RouterDirectory(
                redis, SECRET, name, HEARTBEAT_S, LEASE_S, ready, partial(clock, ahead_s)
            )
            for name, ahead_s in (("right", 0.0), ("fast", 3600.0), ("slow", -3600.0))
        ]
        for directory in directories:
            await directory.start("http://127.0.0.1:9")
        for directory in directories:
            await eventually(partial(sees, directory, 2))
        for directory in directories:
            await directory.close()
        await redis.aclose()

    run_async(main())


def test_a_record_of_another_release_is_left_to_it(redis_server: RedisServer) -> None:
    async def main() -> None:
        redis = await connect_redis(redis_server.url)
        later = RecordSeal(SECRET).seal(f"{KEY}:later", msgspec.msgpack.encode({"new": 1}))
        await redis.hset(KEY, "later", later)
        directory = RouterDirectory(redis, SECRET, "this", HEARTBEAT_S, LEASE_S, ready)
        await directory.start("http://127.0.0.1:9")
        assert directory.others() == []
        assert sorted(await redis.hkeys(KEY)) == [b"later", b"this"]
        await directory.close()
        await redis.delete(KEY)
        await redis.aclose()

    run_async(main())
