import asyncio
import random
import threading

import pytest

from pagewire.shared.base.errors import RedisUnavailableError
from pagewire.shared.index import prefix_index, publisher
from pagewire.shared.index.publisher import BATCH_BLOCKS, MAX_PENDING, IndexPublisher
from pagewire.shared.kv.block_hash import BlockHash
from pagewire.tests.support.aio import eventually, run_async, until_returns
from pagewire.tests.support.prefix import (
    EPOCH,
    TAG,
    blocks,
    index_at,
    publishing,
    until_found,
)
from pagewire.tests.support.redis_server import RedisServer


def test_changes_of_a_worker_reach_the_index(any_redis_url: str) -> None:
    prompt = blocks(2 * BATCH_BLOCKS + 7)

    async def scenario() -> None:
        async with index_at(any_redis_url) as index, publishing(index) as publisher:
            publisher.added(prompt)
            await until_found(index, prompt, {"w": len(prompt)})
            publisher.removed(prompt[10:])
            await until_found(index, prompt, {"w": 10})
            publisher.removed(prompt[5:])
            publisher.added(prompt[5:8])
            await until_found(index, prompt, {"w": 8})
            publisher.added(prompt[8:12])
            publisher.removed(prompt[8:12])
            later = blocks(3, start=1)
            publisher.added(later)
            await until_found(index, later, {"w": 3})
            await until_found(index, prompt, {"w": 8})

    run_async(scenario())


def test_changes_from_the_engines_thread_end_in_the_right_state(redis_server: RedisServer) -> None:
    cached: dict[BlockHash, None] = {}
    pool = blocks(300)

    def engine(publisher: IndexPublisher) -> None:
        dice = random.Random(5)
        for _ in range(3000):
            chosen = dice.sample(pool, 5)
            if dice.random() < 0.6:
                cached.update(dict.fromkeys(chosen))
                publisher.added(chosen)
            else:
                for block_hash in chosen:
                    cached.pop(block_hash, None)
                publisher.removed(chosen)

    async def scenario() -> None:
        async with (
            index_at(redis_server.url) as index,
            publishing(index, snapshot=lambda: list(cached)) as publisher,
        ):
            thread = threading.Thread(target=engine, args=(publisher,))
            thread.start()
            for _ in range(5):
                await asyncio.sleep(0.02)
                publisher.resync()
            await asyncio.to_thread(thread.join)
            publisher.resync()
            await eventually(lambda: publisher.resyncs >= 2 and publisher.pending == 0)

            async def in_index() -> set[BlockHash]:
                return {h for h in pool if (await index.lookup([h], {"w": EPOCH})).hits}

            await until_returns(in_index, set(cached))

    run_async(scenario())


@pytest.mark.parametrize("fault", ["flushed", "killed", "frozen"])
def test_the_index_refills_after_redis_lost_it(redis_server: RedisServer, fault: str) -> None:
    prompt = blocks(40)

    async def scenario() -> None:
        async with (
            index_at(redis_server.url, write_timeout_s=1.0) as index,
            publishing(index, snapshot=lambda: prompt, touch_interval_s=0.1) as publisher,
        ):
            await until_found(index, prompt, {"w": 40})
            if fault == "flushed":
                with redis_server.client() as probe:
                    probe.flushall()
            elif fault == "killed":
                redis_server.kill()
                publisher.removed(prompt[30:])
                publisher.added(prompt[30:])
                await asyncio.sleep(0.5)
                redis_server.start()
            else:
                redis_server.freeze()
                publisher.removed(prompt[30:])
                publisher.added(prompt[30:])
                await asyncio.sleep(1.5)
                redis_server.thaw()
            await until_found(index, prompt, {"w": 40})

    run_async(scenario())


def test_memory_is_bounded_while_redis_is_away_and_the_snapshot_makes_up(
    redis_server: RedisServer,
) -> None:
    prompt = blocks(100)

    async def scenario() -> None:
        async with (
            index_at(redis_server.url) as index,
            publishing(index, snapshot=lambda: prompt) as publisher,
        ):
            await until_found(index, prompt, {"w": 100})
            redis_server.kill()
            for number in range(3 * MAX_PENDING // 1000):
                publisher.added([BlockHash(b"%08d%08d" % (number, n)) for n in range(1000)])
                assert publisher.pending <= MAX_PENDING
            await eventually(lambda: publisher.failed_flushes > 0)
            redis_server.start()
            await until_found(index, prompt, {"w": 100})

    run_async(scenario())


def test_entries_are_renewed_before_they_expire(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (prefix_index, publisher):
        monkeypatch.setattr(module, "ENTRY_TTL_S", 2)

    async def scenario() -> None:
        async with (
            index_at(redis_server.url) as index,
            publishing(index, snapshot=lambda: blocks(3), touch_interval_s=0.1),
        ):
            await asyncio.sleep(2.5)
            assert (await index.lookup(blocks(3), {"w": EPOCH})).hits == {"w": 3}

    run_async(scenario())


def test_changes_before_the_start_are_kept(redis_server: RedisServer) -> None:
    async def scenario() -> None:
        async with index_at(redis_server.url) as index:
            cached = blocks(3)
            publisher = IndexPublisher(index, "w", EPOCH, lambda: cached)
            publisher.added(cached)
            publisher.start()
            await until_found(index, cached, {"w": 3})
            await publisher.close()
            publisher.added(cached)
            await publisher.close()

    run_async(scenario())


def test_closing_takes_back_the_sign_of_life_and_works_without_redis(
    redis_server: RedisServer,
) -> None:
    async def scenario() -> None:
        async with index_at(redis_server.url) as index:
            async with publishing(index, snapshot=lambda: blocks(1)):
                await until_found(index, blocks(1), {"w": 1})
            with redis_server.client() as probe:
                assert not probe.exists(f"pagewire:{TAG}:w:w")
            async with publishing(index):
                redis_server.kill()
            with pytest.raises(RedisUnavailableError):
                await index.publish("w", EPOCH, [], [])

    run_async(scenario())


def test_a_bug_in_the_snapshot_is_logged(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    def snapshot() -> list[BlockHash]:
        raise RuntimeError("a bug in the pool")

    async def scenario() -> None:
        async with index_at(redis_server.url) as index, publishing(index, snapshot=snapshot):
            await eventually(lambda: "index-publisher failed" in caplog.text)

    run_async(scenario())
