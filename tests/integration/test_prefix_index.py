import asyncio
import logging
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from typing import Any

import pytest

from pagewire.shared import prefix_index
from pagewire.shared.errors import RedisUnavailableError
from pagewire.shared.kv_cache.block_hash import BlockHash, BlockHasher
from pagewire.shared.prefix_index import (
    BATCH_BLOCKS,
    MAX_LOOKUP_BLOCKS,
    MAX_PENDING,
    IndexPublisher,
    PrefixIndex,
)
from pagewire.shared.redis_client import connect_redis
from pagewire.tests.support.aio import eventually, run_async
from pagewire.tests.support.redis_server import RedisServer

TAG = "0123abcd"
HASHER = BlockHasher("secret", "model", "float32", 4)
EPOCH = 1_790_000_000_000_000_001  # greater than 2**53


def blocks(count: int, start: int = 0) -> list[BlockHash]:
    """The hashes of a prompt's blocks; another start is another prompt."""
    return HASHER.hash_prompt(range(start, start + 4 * count))


def entry_key(block_hash: BlockHash) -> bytes:
    return f"pagewire:{TAG}:b:".encode() + block_hash


@asynccontextmanager
async def index_at(url: str, lookup_timeout_s: float = 1.0) -> AsyncIterator[PrefixIndex]:
    client = await connect_redis(url)
    index = PrefixIndex(client, TAG, lookup_timeout_s)
    try:
        yield index
    finally:
        await index.close()
        await client.aclose()


@asynccontextmanager
async def publishing(
    index: PrefixIndex,
    worker_id: str = "w",
    epoch: int = EPOCH,
    snapshot: Callable[[], Collection[BlockHash]] = tuple,
    **options: Any,
) -> AsyncIterator[IndexPublisher]:
    publisher = IndexPublisher(index, worker_id, epoch, snapshot, flush_interval_s=0.01, **options)
    publisher.start()
    try:
        yield publisher
    finally:
        await publisher.close()


async def until_found(
    index: PrefixIndex, hashes: list[BlockHash], expected: dict[str, int], **epochs: int
) -> None:
    """Wait until a lookup answers so."""
    deadline = time.monotonic() + 8
    while (found := await index.lookup(hashes, epochs or {"w": EPOCH})) != expected:
        assert time.monotonic() < deadline, f"{found} instead of {expected}"
        await asyncio.sleep(0.02)


def test_leading_blocks_of_each_live_worker_are_counted(any_redis_url: str) -> None:
    prompt = blocks(6)
    epochs = {"all": 1, "four": EPOCH, "hole": 3, "tail": 4, "none": 5, "restarted": 7}

    async def scenario() -> None:
        async with index_at(any_redis_url) as index:
            await index.publish("all", 1, prompt, [])
            await index.publish("four", EPOCH, prompt[:4], [])
            await index.publish("hole", 3, prompt[:2] + prompt[3:], [])
            await index.publish("tail", 4, prompt[1:], [])
            await index.publish("restarted", 6, prompt, [])
            await index.publish("unknown", 9, prompt, [])
            found = await index.lookup(prompt, epochs)
            assert found == {"all": 6, "four": 4, "hole": 2}
            assert await index.lookup(prompt[:3], epochs) == {"all": 3, "four": 3, "hole": 2}
            assert await index.lookup(blocks(6, start=1), epochs) == {}
            assert await index.lookup([], epochs) == {}
            assert await index.lookup(prompt, {}) == {}
            assert index.failed_lookups == 0

    run_async(scenario())


def test_lookups_agree_with_a_model_of_the_index(redis_server: RedisServer) -> None:
    dice = random.Random(3)
    prompt = blocks(12)

    async def scenario() -> None:
        async with index_at(redis_server.url) as index:
            cached: dict[str, set[BlockHash]] = {f"w{n}": set() for n in range(4)}
            for _ in range(150):
                worker = dice.choice(list(cached))
                added = set(dice.sample(prompt, dice.randrange(9)))
                removed = set(dice.sample(prompt, dice.randrange(4))) - added
                await index.publish(worker, EPOCH, added, removed)
                cached[worker] = (cached[worker] | added) - removed
                expected = {
                    name: count
                    for name, has in cached.items()
                    if (count := next((n for n, b in enumerate(prompt) if b not in has), 12))
                }
                assert await index.lookup(prompt, dict.fromkeys(cached, EPOCH)) == expected

    run_async(scenario())


def test_a_lookup_is_one_round_trip(redis_server: RedisServer) -> None:
    async def scenario() -> None:
        async with index_at(redis_server.url) as index:
            await index.publish("w", EPOCH, blocks(512), [])
            with redis_server.client() as probe:
                before = probe.info("commandstats")["cmdstat_eval"]["calls"]
                assert await index.lookup(blocks(512), {"w": EPOCH}) == {"w": 512}
                assert probe.info("commandstats")["cmdstat_eval"]["calls"] == before + 1

    run_async(scenario())


def test_very_long_prompts_are_looked_up_to_a_bound(redis_server: RedisServer) -> None:
    prompt = blocks(MAX_LOOKUP_BLOCKS + 10)

    async def scenario() -> None:
        async with index_at(redis_server.url) as index:
            await index.publish("w", EPOCH, prompt, [])
            assert await index.lookup(prompt, {"w": EPOCH}) == {"w": MAX_LOOKUP_BLOCKS}

    run_async(scenario())


def test_entries_expire_unless_published_again(redis_server: RedisServer) -> None:
    async def scenario() -> None:
        async with index_at(redis_server.url) as index:
            await index.publish("w", EPOCH, blocks(1), [])
            with redis_server.client() as probe:
                key = entry_key(blocks(1)[0])
                assert 3500 < probe.ttl(key) <= 3600
                probe.expire(key, 10)
                await index.publish("w", EPOCH, blocks(1), [])
                assert probe.ttl(key) > 3500

    run_async(scenario())


def test_entries_of_dead_workers_are_swept_by_the_living(any_redis_url: str) -> None:
    async def scenario() -> None:
        async with index_at(any_redis_url) as index:
            await index.publish("dead", 1, blocks(2), [])
            await index.publish("other", 1, blocks(2), [])
            await index.withdraw("dead")
            await index.publish("w", EPOCH, blocks(2), [])
            client = await connect_redis(any_redis_url)
            assert set(await client.hkeys(entry_key(blocks(1)[0]))) == {b"w", b"other"}
            await client.aclose()

    run_async(scenario())


def test_garbage_in_the_index_is_no_hit_and_is_overwritten(redis_server: RedisServer) -> None:
    prompt = blocks(8)
    values = [b"", b"x", b"\xff\x00", f"{EPOCH}:".encode(), f"{EPOCH}:soon".encode(), b"9" * 5000]

    async def scenario() -> None:
        async with index_at(redis_server.url) as index:
            with redis_server.client() as probe:
                for value in values:
                    probe.hset(entry_key(prompt[0]), "w", value)
                    assert await index.lookup(prompt, {"w": EPOCH}) == {}
                probe.delete(entry_key(prompt[0]))
                probe.set(entry_key(prompt[0]), "not a hash")
                probe.rpush(entry_key(prompt[1]), "not a hash")
                probe.rpush(f"pagewire:{TAG}:w:w", "not a string")
            assert await index.lookup(prompt, {"w": EPOCH}) == {}
            index.speculate(prompt, "v", 1, ttl_s=0.01)
            await index.publish("w", EPOCH, prompt, [])
            await index.publish("w", EPOCH, [], prompt[7:])
            assert await index.lookup(prompt, {"w": EPOCH}) == {"w": 7}
            assert index.failed_lookups == 0

    run_async(scenario())


def test_a_speculation_counts_here_at_once_and_elsewhere_soon(any_redis_url: str) -> None:
    prompt = blocks(5)

    async def scenario() -> None:
        async with index_at(any_redis_url) as here, index_at(any_redis_url) as elsewhere:
            await here.publish("w", EPOCH, prompt[:2], [])
            here.speculate(prompt, "w", EPOCH, ttl_s=1.0)
            assert await here.lookup(prompt, {"w": EPOCH}) == {"w": 5}
            await until_found(elsewhere, prompt, {"w": 5})
            assert await here.lookup(prompt, {"w": EPOCH + 1}) == {}
            assert await elsewhere.lookup(prompt, {"w": EPOCH + 1}) == {}
            await until_found(here, prompt, {"w": 2})
            await until_found(elsewhere, prompt, {"w": 2})

    run_async(scenario())


def test_a_burst_of_equal_prompts_sees_the_first_placement(redis_server: RedisServer) -> None:
    prompt = blocks(4)

    async def scenario() -> None:
        async with index_at(redis_server.url) as index:

            async def place() -> dict[str, int]:
                found = await index.lookup(prompt, {"a": 1, "b": 1})
                if not found:
                    index.speculate(prompt, "a", 1)
                return found

            found = await asyncio.gather(*(place() for _ in range(16)))
            assert found.count({}) == 1
            assert found.count({"a": 4}) == 15

    run_async(scenario())


def test_a_real_entry_outlives_speculation_and_speculation_does_not_replace_it(
    redis_server: RedisServer,
) -> None:
    prompt = blocks(2)

    async def scenario() -> None:
        async with index_at(redis_server.url) as index, index_at(redis_server.url) as fresh:
            index.speculate(prompt, "w", EPOCH, ttl_s=0.3)
            await until_found(fresh, prompt, {"w": 2})
            await index.publish("w", EPOCH, prompt, [])
            index.speculate(prompt, "w", EPOCH, ttl_s=0.3)
            await asyncio.sleep(0.5)
            assert await fresh.lookup(prompt, {"w": EPOCH}) == {"w": 2}

    run_async(scenario())


def test_speculation_memory_is_bounded() -> None:
    async def scenario(url: str) -> None:
        async with index_at(url) as index:
            for number in range(300):
                hashes = [BlockHash(b"%012d%04d" % (number, n)) for n in range(500)]
                index.speculate(hashes, "w", 1, ttl_s=100)
            assert len(index._recent._entries) <= 1 << 16
            assert await index.lookup(hashes, {"w": 1}) == {"w": 500}

    with RedisServer() as server:
        run_async(scenario(server.url))


@pytest.mark.parametrize("fault", ["frozen", "killed"])
def test_lookups_without_redis_are_empty_and_quick_then_recover(
    redis_server: RedisServer, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = blocks(4)

    async def scenario() -> None:
        async with index_at(redis_server.url, lookup_timeout_s=0.1) as index:
            await index.publish("w", EPOCH, prompt, [])
            assert await index.lookup(prompt, {"w": EPOCH}) == {"w": 4}
            redis_server.freeze() if fault == "frozen" else redis_server.kill()
            start = time.monotonic()
            answers = await asyncio.gather(*(index.lookup(prompt, {"w": EPOCH}) for _ in range(50)))
            assert answers == [{}] * 50
            for _ in range(200):
                assert await index.lookup(prompt, {"w": EPOCH}) == {}
            assert time.monotonic() - start < 1
            index.speculate(prompt, "w", EPOCH, ttl_s=0.3)
            assert await index.lookup(prompt, {"w": EPOCH}) == {"w": 4}
            redis_server.thaw() if fault == "frozen" else redis_server.start()
            if fault == "killed":
                await index.publish("w", EPOCH, prompt, [])
            await asyncio.sleep(0.3)
            await until_found(index, prompt, {"w": 4})
            assert index.failed_lookups > 200

    with caplog.at_level(logging.WARNING):
        run_async(scenario())
    assert caplog.text.count("does not answer") == 1


def test_one_slow_answer_does_not_pause_lookups(redis_server: RedisServer) -> None:
    async def scenario() -> None:
        async with index_at(redis_server.url, lookup_timeout_s=0.2) as index:
            await index.publish("w", EPOCH, blocks(1), [])
            redis_server.freeze()
            assert await index.lookup(blocks(1), {"w": EPOCH}) == {}
            redis_server.thaw()
            assert await index.lookup(blocks(1), {"w": EPOCH}) == {"w": 1}

    run_async(scenario())


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
            await eventually(lambda: publisher.pending == 0)
            await asyncio.sleep(0.05)
            assert await index.lookup(prompt, {"w": EPOCH}) == {"w": 8}
            assert publisher.failed_flushes == 0

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
            await asyncio.sleep(0.1)
            in_index = {h for h in pool if await index.lookup([h], {"w": EPOCH})}
            assert in_index == set(cached)

    run_async(scenario())


@pytest.mark.parametrize("fault", ["flushed", "killed", "frozen"])
def test_the_index_refills_after_redis_lost_it(redis_server: RedisServer, fault: str) -> None:
    prompt = blocks(40)

    async def scenario() -> None:
        async with (
            index_at(redis_server.url) as index,
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
            await asyncio.sleep(0.3)
            redis_server.start()
            await until_found(index, prompt, {"w": 100})
            assert publisher.failed_flushes > 0

    run_async(scenario())


def test_entries_are_renewed_before_they_expire(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_index, "_ENTRY_TTL_S", 2)

    async def scenario() -> None:
        async with (
            index_at(redis_server.url) as index,
            publishing(index, snapshot=lambda: blocks(3), touch_interval_s=0.1),
        ):
            await asyncio.sleep(2.5)
            assert await index.lookup(blocks(3), {"w": EPOCH}) == {"w": 3}

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
            await asyncio.sleep(0.1)

    run_async(scenario())
    assert "index-publisher failed" in caplog.text
