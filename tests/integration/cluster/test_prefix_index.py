import asyncio
import logging
import random
import time

import pytest

from pagewire.shared.cluster.redis_client import connect_redis
from pagewire.shared.costs.load import NO_LOAD, Load
from pagewire.shared.index.optimistic import MAX_BLOCKS
from pagewire.shared.index.prefix_index import (
    MAX_LOOKUP_BLOCKS,
)
from pagewire.shared.kv.block_hash import BlockHash
from pagewire.tests.support.aio import run_async
from pagewire.tests.support.prefix import (
    EPOCH,
    TAG,
    blocks,
    entry_key,
    index_at,
    until_found,
    until_reserved,
)
from pagewire.tests.support.redis_server import RedisServer


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
            found = (await index.lookup(prompt, epochs)).hits
            assert found == {"all": 6, "four": 4, "hole": 2}
            assert (await index.lookup(prompt[:3], epochs)).hits == {"all": 3, "four": 3, "hole": 2}
            assert (await index.lookup(blocks(6, start=1), epochs)).hits == {}
            assert (await index.lookup([], epochs)).hits == {}
            assert (await index.lookup(prompt, {})).hits == {}
            assert index.failed_lookups == 0

    run_async(scenario())


def test_with_windows_the_last_blocks_of_a_prefix_are_enough(any_redis_url: str) -> None:
    prompt = blocks(8)
    cached = {"all": prompt, "begin": prompt[:1], "end": prompt[5:], "hole": prompt[2:4]}

    async def scenario() -> None:
        async with index_at(any_redis_url) as index:
            for worker, hashes in cached.items():
                await index.publish(worker, EPOCH, hashes, [])
            epochs = dict.fromkeys(cached, EPOCH)
            assert (await index.lookup(prompt, epochs, 2)).hits == {
                **{"all": 8, "begin": 1, "end": 8, "hole": 4}
            }
            assert (await index.lookup(prompt[:6], epochs, 2)).hits == {
                **{"all": 6, "begin": 1, "hole": 4}
            }
            assert (await index.lookup(prompt, epochs)).hits == {"all": 8, "begin": 1}

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
                assert (await index.lookup(prompt, dict.fromkeys(cached, EPOCH))).hits == expected

    run_async(scenario())


def test_a_lookup_is_one_round_trip(redis_server: RedisServer) -> None:
    async def scenario() -> None:
        async with index_at(redis_server.url) as index:
            await index.publish("w", EPOCH, blocks(512), [])
            with redis_server.client() as probe:
                before = probe.info("commandstats")["cmdstat_eval"]["calls"]
                assert (await index.lookup(blocks(512), {"w": EPOCH})).hits == {"w": 512}
                assert probe.info("commandstats")["cmdstat_eval"]["calls"] == before + 1

    run_async(scenario())


def test_very_long_prompts_are_looked_up_to_a_bound(redis_server: RedisServer) -> None:
    prompt = blocks(MAX_LOOKUP_BLOCKS + 10)

    async def scenario() -> None:
        async with index_at(redis_server.url) as index:
            await index.publish("w", EPOCH, prompt, [])
            assert (await index.lookup(prompt, {"w": EPOCH})).hits == {"w": MAX_LOOKUP_BLOCKS}

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
                    assert (await index.lookup(prompt, {"w": EPOCH})).hits == {}
                probe.delete(entry_key(prompt[0]))
                probe.set(entry_key(prompt[0]), "not a hash")
                probe.rpush(entry_key(prompt[1]), "not a hash")
                probe.rpush(f"pagewire:{TAG}:w:w", "not a string")
            assert (await index.lookup(prompt, {"w": EPOCH})).hits == {}
            index.add_optimistic(prompt, {"v": 1}, ttl_s=0.01)
            await index.publish("w", EPOCH, prompt, [])
            await index.publish("w", EPOCH, [], prompt[7:])
            assert (await index.lookup(prompt, {"w": EPOCH})).hits == {"w": 7}
            assert index.failed_lookups == 0

    run_async(scenario())


def test_an_optimistic_entry_counts_here_at_once_and_elsewhere_soon(any_redis_url: str) -> None:
    prompt = blocks(5)

    async def scenario() -> None:
        async with index_at(any_redis_url) as here, index_at(any_redis_url) as elsewhere:
            await here.publish("w", EPOCH, prompt[:2], [])
            here.add_optimistic(prompt, {"w": EPOCH}, ttl_s=1.0)
            assert (await here.lookup(prompt, {"w": EPOCH})).hits == {"w": 5}
            await until_found(elsewhere, prompt, {"w": 5})
            assert (await here.lookup(prompt, {"w": EPOCH + 1})).hits == {}
            assert (await elsewhere.lookup(prompt, {"w": EPOCH + 1})).hits == {}
            await until_found(here, prompt, {"w": 2})
            await until_found(elsewhere, prompt, {"w": 2})

    run_async(scenario())


def test_what_other_routers_reserve_comes_with_the_lookup(redis_server: RedisServer) -> None:
    async def scenario() -> None:
        url = redis_server.url
        epochs, other = {"v": 1, "w": 2}, Load(5, 9, 0.25, 2)
        async with (
            index_at(url, router_id="a") as first,
            index_at(url, router_id="b") as second,
            index_at(url, lookup_timeout_s=1.0, router_id="c") as third,
        ):
            first.add_optimistic(blocks(2), {"w": 2}, {"w": (Load(10, 20, 0.5, 1), 60.0)})
            second.add_optimistic([], {"w": 2, "v": 1}, {"w": (other, 60.0), "v": (Load(7), 0.5)})
            await until_reserved(third, epochs, {"v": Load(7), "w": Load(15, 29, 0.75, 3)})
            assert (await first.lookup(blocks(2), epochs)).reserved == {"v": Load(7), "w": other}
            assert (await third.lookup(blocks(2), epochs)).hits == {"w": 2}
            first.add_optimistic([], {}, {"w": (NO_LOAD, 60.0)})
            await until_reserved(third, epochs, {"w": other})  # v's is over by itself
            redis_server.freeze()
            assert (await third.lookup(blocks(2), epochs)).reserved == {}
            redis_server.thaw()

    run_async(scenario())


def test_garbage_in_a_workers_reservations_is_none(redis_server: RedisServer) -> None:
    async def scenario() -> None:
        redis = await connect_redis(redis_server.url)
        async with index_at(redis_server.url, router_id="a") as index:
            index.add_optimistic([], {}, {"w": (Load(3), 60.0)})
            async with index_at(redis_server.url, router_id="b") as other:
                await until_reserved(other, {"w": 1}, {"w": Load(3)})
                [key] = await redis.keys("pagewire:*:l:w")
                await redis.hset(key, "c", "much")
                assert (await other.lookup([], {"w": 1})).reserved == {"w": Load(3)}
                for place in range(4):  # a number that no float holds
                    planted = ["0"] * 4
                    planted[place] = "9" * 400
                    await redis.hset(key, "c", ",".join(planted) + ":9999999999999999")
                    (load,) = (await other.lookup([], {"w": 1})).reserved.values()
                    assert load != Load(3)
                await redis.set(key, "no hash")
                assert (await other.lookup([], {"w": 1})).reserved == {}
                index.add_optimistic([], {}, {"w": (Load(4), 60.0)})
                await asyncio.sleep(0.1)
                assert (await other.lookup([], {"w": 1})).reserved == {}
        await redis.aclose()

    run_async(scenario())


def test_a_burst_of_equal_prompts_sees_the_first_placement(redis_server: RedisServer) -> None:
    prompt = blocks(4)

    async def scenario() -> None:
        async with index_at(redis_server.url) as index:

            async def place():
                found = (await index.lookup(prompt, {"a": 1, "b": 1})).hits
                if not found:
                    index.add_optimistic(prompt, {"a": 1})
                return found

            found = await asyncio.gather(*(place() for _ in range(16)))
            assert found.count({}) == 1
            assert found.count({"a": 4}) == 15

    run_async(scenario())


def test_a_real_entry_outlives_an_optimistic_one_which_does_not_replace_it(
    redis_server: RedisServer,
) -> None:
    prompt = blocks(2)

    async def scenario() -> None:
        async with index_at(redis_server.url) as index, index_at(redis_server.url) as fresh:
            index.add_optimistic(prompt, {"w": EPOCH}, ttl_s=1.5)
            await until_found(fresh, prompt, {"w": 2})
            await index.publish("w", EPOCH, prompt, [])
            index.add_optimistic(prompt, {"w": EPOCH}, ttl_s=0.3)
            await asyncio.sleep(1.6)
            assert (await fresh.lookup(prompt, {"w": EPOCH})).hits == {"w": 2}

    run_async(scenario())


def test_optimistic_memory_is_bounded() -> None:
    async def scenario(url: str) -> None:
        async with index_at(url) as index:
            for number in range(300):
                hashes = [BlockHash(b"%012d%04d" % (number, n)) for n in range(1000)]
                index.add_optimistic(hashes, {"w": 1}, ttl_s=100)
            assert MAX_BLOCKS - 1000 < len(index._recent) <= MAX_BLOCKS
            assert (await index.lookup(hashes, {"w": 1})).hits == {"w": 1000}

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
            assert (await index.lookup(prompt, {"w": EPOCH})).hits == {"w": 4}
            redis_server.freeze() if fault == "frozen" else redis_server.kill()
            start = time.monotonic()
            answers = await asyncio.gather(*(index.lookup(prompt, {"w": EPOCH}) for _ in range(50)))
            assert [answer.hits for answer in answers] == [{}] * 50
            for _ in range(200):
                assert (await index.lookup(prompt, {"w": EPOCH})).hits == {}
            assert time.monotonic() - start < 10  # one after the other, 200 would take 20 s
            index.add_optimistic(prompt, {"w": EPOCH}, ttl_s=1.5)
            assert (await index.lookup(prompt, {"w": EPOCH})).hits == {"w": 4}
            redis_server.thaw() if fault == "frozen" else redis_server.start()
            if fault == "killed":
                await index.publish("w", EPOCH, prompt, [])
            await asyncio.sleep(1.6)
            await until_found(index, prompt, {"w": 4})
            assert index.failed_lookups > 200

    with caplog.at_level(logging.WARNING):
        run_async(scenario())
    assert caplog.text.count("cannot look up cached prefixes") == 1


def test_one_slow_answer_does_not_pause_lookups(redis_server: RedisServer) -> None:
    async def scenario() -> None:
        async with index_at(redis_server.url, lookup_timeout_s=1.0) as index:
            await index.publish("w", EPOCH, blocks(1), [])
            redis_server.freeze()
            assert (await index.lookup(blocks(1), {"w": EPOCH})).hits == {}
            redis_server.thaw()
            assert (await index.lookup(blocks(1), {"w": EPOCH})).hits == {"w": 1}

    run_async(scenario())
