import asyncio
import logging
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from redis.asyncio import Redis

from pagewire.shared.errors import RedisSetupError, RedisUnavailableError
from pagewire.shared.protocol import BlockLayout
from pagewire.shared.redis_client import cluster_tag, connect_redis
from pagewire.shared.registry import (
    CardPublisher,
    LinkInfo,
    Registry,
    WorkerCard,
    WorkerDirectory,
    WorkerLoad,
)
from pagewire.tests.support.aio import eventually, run_async
from pagewire.tests.support.redis_server import RedisServer

TAG = cluster_tag("the cluster's secret")
LAYOUT = BlockLayout(
    fingerprint="f",
    dtype="float32",
    block_size=16,
    num_layers=2,
    num_kv_heads=2,
    head_dim=16,
    block_bytes=8192,
)


def card(worker_id: str = "decode-0", epoch: int = 1, **changes: Any) -> WorkerCard:
    fields: dict[str, Any] = {
        "role": "decode",
        "endpoint": "tcp://127.0.0.1:1",
        "metrics_endpoint": "http://127.0.0.1:2",
        "model": "demo",
        "layout": LAYOUT,
        "max_model_len": 2048,
    }
    return WorkerCard(worker_id=worker_id, epoch=epoch, **(fields | changes))


@asynccontextmanager
async def client_of(url: str, timeout: float = 2.0) -> AsyncIterator[Redis]:
    client = await connect_redis(url, timeout)
    try:
        yield client
    finally:
        await client.aclose()


@asynccontextmanager
async def registry_at(url: str, lease_s: float = 5.0) -> AsyncIterator[Registry]:
    async with client_of(url) as client:
        yield Registry(client, TAG, lease_s, timeout_s=0.5)


def ids(cards: Any) -> list[str]:
    return sorted(c.worker_id for c in cards)


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


def test_replies_to_abandoned_calls_reach_nobody_else(redis_server: RedisServer) -> None:
    async def scenario() -> None:
        async with client_of(redis_server.url) as client:
            for number in range(20):
                await client.set(f"key-{number}", number)
            redis_server.freeze()
            calls = [asyncio.create_task(client.get(f"key-{n}")) for n in range(10)]
            await asyncio.sleep(0.05)
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
            redis_server.thaw()
            answers = await asyncio.gather(*(client.get(f"key-{n}") for n in range(10, 20)))
            assert answers == [str(n).encode() for n in range(10, 20)]

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


class Watched:
    """A directory and what it told its listeners."""

    def __init__(self, registry: Registry, **options: Any) -> None:
        self.events: list[tuple[str, str, int]] = []
        self.directory = WorkerDirectory(
            registry,
            poll_s=0.05,
            on_join=lambda c: self.events.append(("join", c.worker_id, c.epoch)),
            on_leave=lambda c: self.events.append(("leave", c.worker_id, c.epoch)),
            **options,
        )

    def ids(self) -> list[str]:
        return ids(self.directory.workers())


@asynccontextmanager
async def watching(registry: Registry, **options: Any) -> AsyncIterator[Watched]:
    watched = Watched(registry, **options)
    await watched.directory.start()
    try:
        yield watched
    finally:
        await watched.directory.close()


def test_the_directory_follows_joins_restarts_and_deaths(redis_server: RedisServer) -> None:
    async def scenario() -> None:
        async with registry_at(redis_server.url, lease_s=0.4) as registry:
            await registry.publish(card("a"))
            async with watching(registry) as watched:
                assert watched.ids() == ["a"]
                assert watched.directory.redis_ok
                await registry.publish(card("p", role="prefill"))
                await registry.publish(card("a", epoch=2))
                await eventually(lambda: ("join", "a", 2) in watched.events)
                assert ids(watched.directory.workers("prefill")) == ["p"]
                assert ids(watched.directory.workers("decode")) == ["a"]
                assert watched.directory.get("a") == card("a", epoch=2)
                await registry.publish(card("a", epoch=1))  # a zombie
                await asyncio.sleep(0.15)
                assert watched.directory.get("a") == card("a", epoch=2)
                await eventually(lambda: watched.ids() == [])
                assert watched.directory.get("a") is None
                assert watched.events[:3] == [("join", "a", 1), *watched.events[1:3]]
                assert sorted(watched.events[1:]) == [
                    ("join", "a", 2),
                    ("join", "p", 1),
                    ("leave", "a", 1),
                    ("leave", "a", 2),
                    ("leave", "p", 1),
                ]

    run_async(scenario())


def test_the_directory_sees_changed_loads(redis_server: RedisServer) -> None:
    async def scenario() -> None:
        async with registry_at(redis_server.url) as registry:
            await registry.publish(card("a"))
            async with watching(registry) as watched:
                busy = card("a", load=WorkerLoad(running=7))
                await registry.publish(busy)
                await eventually(lambda: watched.directory.workers() == (busy,))
                assert watched.events == [("join", "a", 1)]

    run_async(scenario())


def test_a_flushed_redis_costs_no_worker(redis_server: RedisServer) -> None:
    async def scenario() -> None:
        async with registry_at(redis_server.url, lease_s=1.0) as registry:
            publisher = CardPublisher(registry, lambda: card("a"), heartbeat_s=0.2)
            await publisher.start()
            async with watching(registry) as watched:
                for _ in range(3):
                    await asyncio.to_thread(redis_server.client().flushall)
                    await asyncio.sleep(0.3)
                    assert watched.ids() == ["a"]
                assert watched.events == [("join", "a", 1)]
            await publisher.close()

    run_async(scenario())


@pytest.mark.parametrize("fault", ["frozen", "killed"])
def test_without_redis_the_last_view_stays_for_the_grace_time(
    redis_server: RedisServer, fault: str
) -> None:
    async def scenario() -> None:
        async with registry_at(redis_server.url, lease_s=0.5) as registry:
            await registry.publish(card("a"))
            async with watching(registry, grace_s=1.5) as watched:
                redis_server.freeze() if fault == "frozen" else redis_server.kill()
                await eventually(lambda: not watched.directory.redis_ok)
                await asyncio.sleep(0.3)
                assert watched.ids() == ["a"]
                await eventually(lambda: watched.ids() == [])
                redis_server.thaw() if fault == "frozen" else redis_server.start()
                await registry.publish(card("a", epoch=2))
                await eventually(lambda: watched.ids() == ["a"])
                assert watched.directory.redis_ok
                assert watched.events == [("join", "a", 1), ("leave", "a", 1), ("join", "a", 2)]

    run_async(scenario())


def test_a_failing_listener_does_not_stop_the_directory(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: WorkerCard) -> None:
        raise RuntimeError("a bug in a listener")

    async def scenario() -> None:
        async with registry_at(redis_server.url) as registry:
            directory = WorkerDirectory(registry, poll_s=0.05, on_join=fail)
            await registry.publish(card("a"))
            await directory.start()
            await registry.publish(card("b"))
            await eventually(lambda: ids(directory.workers()) == ["a", "b"])
            await directory.close()

    run_async(scenario())
    assert caplog.text.count("a listener of the worker directory failed") == 2


def test_a_wrong_or_missing_password_is_told_in_one_line() -> None:
    with RedisServer(password="right-one") as server:
        for url in (
            server.url.replace("right-one", "wrong-one"),
            server.url.replace(":right-one@", ""),
        ):
            with pytest.raises(RedisSetupError, match="password") as caught:
                run_async(connect_redis(url, 2.0))
            assert "\n" not in str(caught.value)
            assert "wrong-one" not in str(caught.value)

        async def scenario() -> None:
            async with client_of(server.url) as client:
                assert await client.ping()

        run_async(scenario())


@pytest.mark.parametrize(
    "url",
    ["redis://:hidden-pw@127.0.0.1:1/0", "unix://:hidden-pw@/nonexistent/redis.sock"],
    ids=["port", "socket"],
)
def test_a_redis_that_is_not_there_is_told_in_one_line(url: str) -> None:
    with pytest.raises(RedisSetupError, match="PAGEWIRE_REDIS_URL") as caught:
        run_async(connect_redis(url, 2.0))
    assert "\n" not in str(caught.value)
    assert "hidden-pw" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:6379", "nonsense", "", "redis://127.0.0.1:port/0", "redis://h:1/db"]
)
def test_urls_that_make_no_sense_are_told_in_one_line(url: str) -> None:
    with pytest.raises(RedisSetupError) as caught:
        run_async(connect_redis(url, 2.0))
    assert "\n" not in str(caught.value)


def test_a_redis_that_does_not_answer_times_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        start = time.monotonic()
        with pytest.raises(RedisSetupError, match="answer"):
            run_async(connect_redis(f"redis://127.0.0.1:{mute.getsockname()[1]}/0", 0.3))
        assert time.monotonic() - start < 3


def test_a_server_that_is_no_redis_is_told() -> None:
    async def scenario() -> None:
        async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            with pytest.raises(RedisSetupError, match="cannot be reached"):
                await connect_redis(f"redis://127.0.0.1:{port}/0", 1.0)

    run_async(scenario())


def test_cluster_tags_tell_secrets_apart_and_do_not_reveal_them() -> None:
    assert cluster_tag("a") == cluster_tag("a") != cluster_tag("b")
    assert len(cluster_tag("a")) == 8
