import asyncio
import logging
import time

import msgspec
import pytest

from pagewire.shared.errors import RedisUnavailableError
from pagewire.shared.redis_client import cluster_tag
from pagewire.shared.registry import (
    CardPublisher,
    LinkInfo,
    Registry,
    WorkerLoad,
)
from pagewire.tests.support.aio import run_async
from pagewire.tests.support.cards import TAG, card, client_of, ids, registry_at
from pagewire.tests.support.redis_server import RedisServer


def test_cards_are_listed_as_published_until_withdrawn(any_redis_url: str) -> None:
    full = card(
        "prefill-0",
        role="prefill",
        state="draining",
        kv_transports=["ucx", "zmq"],
        load=WorkerLoad(running=3, steps=2**40, total_blocks=100),
        links=[LinkInfo(peer="decode-0", transport="ucx", lane="cuda_ipc", gbps=350.5)],
    )

    async def scenario() -> None:
        async with registry_at(any_redis_url) as registry:
            assert await registry.list_workers() == []
            await registry.publish(card())
            await registry.publish(full)
            listed = {c.worker_id: c for c in await registry.list_workers()}
            assert listed == {"decode-0": card(), "prefill-0": full}
            await registry.publish(card(state="draining"))
            await registry.withdraw("prefill-0")
            assert await registry.list_workers() == [card(state="draining")]

    run_async(scenario())


def test_a_card_that_is_not_renewed_is_gone_and_its_id_swept(any_redis_url: str) -> None:
    async def scenario() -> None:
        async with (
            registry_at(any_redis_url, lease_s=0.2) as registry,
            client_of(any_redis_url) as client,
        ):
            await registry.publish(card())
            await asyncio.sleep(0.3)
            assert await registry.list_workers() == []
            assert await client.smembers(f"pagewire:{TAG}:workers") == set()

    run_async(scenario())


def test_two_clusters_on_one_redis_never_mix(any_redis_url: str) -> None:
    async def scenario() -> None:
        async with client_of(any_redis_url) as client:
            ours = Registry(client, cluster_tag("ours"), 5.0)
            theirs = Registry(client, cluster_tag("theirs"), 5.0)
            await ours.publish(card("a"))
            await theirs.publish(card("b"))
            assert ids(await ours.list_workers()) == ["a"]
            assert ids(await theirs.list_workers()) == ["b"]

    run_async(scenario())


def garbage() -> dict[str, bytes]:
    good = msgspec.msgpack.encode(card("wrong-id"))
    unknown = msgspec.to_builtins(card("unknown-field")) | {"extra": 1}
    return {
        "noise": b"\xc1\x00\xff",
        "empty": b"",
        "wrong-id": msgspec.msgpack.encode(card("somebody-else")),
        "truncated": good[:-3],
        "unknown-field": msgspec.msgpack.encode(unknown),
        "no-utf8": b"\x81\xa2\xff\xfe\x01",
        "deep": b"\x91" * 5000,
        "huge": bytes(1 << 20),
    }


def test_garbage_is_ignored_counted_and_logged_once(
    any_redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> int:
        async with registry_at(any_redis_url) as registry, client_of(any_redis_url) as client:
            await registry.publish(card())
            for worker_id, value in garbage().items():
                await client.set(f"pagewire:{TAG}:worker:{worker_id}", value)
                await client.sadd(f"pagewire:{TAG}:workers", worker_id)
            await client.lpush(f"pagewire:{TAG}:worker:a-list", "x")
            await client.sadd(f"pagewire:{TAG}:workers", "a-list", b"\xff\xfe")
            for _ in range(3):
                assert await registry.list_workers() == [card()]
            return registry.malformed_cards

    with caplog.at_level(logging.WARNING):
        assert run_async(scenario()) == 3 * len(garbage())
    assert caplog.text.count("malformed worker card") == len(garbage())


def test_a_publisher_repairs_keys_of_a_wrong_type(redis_server: RedisServer) -> None:
    async def scenario() -> None:
        async with registry_at(redis_server.url) as registry, client_of(redis_server.url) as client:
            await client.set(f"pagewire:{TAG}:workers", "not a set")
            await client.lpush(f"pagewire:{TAG}:worker:decode-0", "not a card")
            with pytest.raises(RedisUnavailableError, match="WRONGTYPE"):
                await registry.list_workers()
            await registry.publish(card())
            assert await registry.list_workers() == [card()]

    run_async(scenario())


def test_epochs_grow_even_if_the_clock_is_set_back(any_redis_url: str) -> None:
    async def scenario() -> None:
        async with registry_at(any_redis_url) as registry:
            first = await registry.new_epoch("decode-0")
            assert abs(first - time.time_ns()) < 60e9
            future = first + 10**18
            await registry.publish(card(epoch=future))
            assert await registry.new_epoch("decode-0") == future + 1
            assert await registry.new_epoch("another") > first

    run_async(scenario())


def test_without_redis_calls_fail_in_time_and_epochs_come_from_the_clock(
    redis_server: RedisServer,
) -> None:
    async def scenario() -> None:
        async with registry_at(redis_server.url) as registry:
            redis_server.freeze()
            start = time.monotonic()
            with pytest.raises(RedisUnavailableError):
                await registry.publish(card())
            with pytest.raises(RedisUnavailableError):
                await registry.list_workers()
            assert await registry.new_epoch("decode-0") > 0
            assert time.monotonic() - start < 3
            redis_server.thaw()
            await registry.publish(card())
            assert await registry.list_workers() == [card()]
            redis_server.kill()
            with pytest.raises(RedisUnavailableError):
                await registry.publish(card())
            redis_server.start()
            await registry.publish(card())
            assert await registry.list_workers() == [card()]

    run_async(scenario())


def test_a_publisher_keeps_a_card_alive_and_removes_it_at_the_end(any_redis_url: str) -> None:
    async def scenario() -> None:
        async with registry_at(any_redis_url, lease_s=0.4) as registry:
            state = {"state": "ready"}
            publisher = CardPublisher(registry, lambda: card(**state), heartbeat_s=0.1)
            await publisher.start()
            await asyncio.sleep(0.8)
            assert await registry.list_workers() == [card()]
            await publisher.close()
            assert await registry.list_workers() == []
            await publisher.close()

    run_async(scenario())


def test_a_change_of_state_is_published_at_once(redis_server: RedisServer) -> None:
    async def scenario() -> None:
        async with registry_at(redis_server.url) as registry:
            state = {"state": "ready"}
            publisher = CardPublisher(registry, lambda: card(**state), heartbeat_s=60)
            await publisher.start()
            state["state"] = "draining"
            publisher.renew_now()
            await asyncio.sleep(0.1)
            assert await registry.list_workers() == [card(state="draining")]
            await publisher.close()

    run_async(scenario())


def test_a_publisher_outlives_redis(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with registry_at(redis_server.url) as registry:
            publisher = CardPublisher(registry, card, heartbeat_s=0.05)
            await publisher.start()
            redis_server.kill()
            await asyncio.sleep(0.3)
            redis_server.start()
            await asyncio.sleep(0.3)
            assert await registry.list_workers() == [card()]
            redis_server.kill()
            await publisher.close()

    with caplog.at_level(logging.WARNING):
        run_async(scenario())
    assert 1 <= caplog.text.count("cannot be renewed") <= 2


def test_a_bug_in_making_a_card_is_logged(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    cards = iter([card()])

    async def scenario() -> None:
        async with registry_at(redis_server.url) as registry:
            publisher = CardPublisher(registry, lambda: next(cards), heartbeat_s=0.05)
            await publisher.start()
            await asyncio.sleep(0.2)
            await publisher.close()

    run_async(scenario())
    assert "card-publisher failed" in caplog.text
