"""Stored responses in a Redis that lies: somebody without the cluster secret writes to it."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
import redis

from pagewire.services.router.http.api.responses.store import (
    CLOCKS_S,
    TTL_S,
    ResponseStore,
    StoredResponse,
)
from pagewire.services.router.http.api_errors import ResponseNotFoundError, StoreUnavailableError
from pagewire.shared.base.errors import RedisUnavailableError
from pagewire.shared.cluster.record_seal import RecordSeal
from pagewire.shared.cluster.redis_client import cluster_tag, connect_redis
from pagewire.shared.cluster.registry import Registry
from pagewire.shared.cluster.routers import RouterDirectory
from pagewire.shared.index.prefix_index import Found, PrefixIndex
from pagewire.shared.kv.block_hash import BlockHash
from pagewire.tests.support.aio import run_async
from pagewire.tests.support.fake_decode_worker import FakeDecodeWorker
from pagewire.tests.support.live_router import (
    ANSWER,
    MODEL,
    SECRET,
    LiveRouter,
    live_router,
    with_worker,
)
from pagewire.tests.support.lying_redis import REPLIES, lying_redis

PREFIX = f"pagewire:{cluster_tag(SECRET)}:r"
ALICE, BOB = "key-of-alice", "key-of-bob-2"
SEAL_BYTES = 32
OTHER_ID = "resp_" + "1" * 32

Write = Callable[["redis.Redis", str, bytes], Any]


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    file = tmp_path / "keys"
    file.write_text(f"alice: {ALICE}\nbob: {BOB}\n")
    return file


def client_of(router: LiveRouter, key: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{router.url}/v1", api_key=key, max_retries=0, timeout=15)


async def is_missing(client: openai.AsyncOpenAI, response_id: str) -> bool:
    """Whether no route finds a response; each must say the same as of an id that never was."""
    calls = (
        client.responses.retrieve(response_id),
        client.responses.input_items.list(response_id),
        client.responses.cancel(response_id),
        client.responses.create(model=MODEL, input="Hi", previous_response_id=response_id),
        client.responses.delete(response_id),
    )
    found = 0
    for call in calls:
        try:
            await call
            found += 1
        except openai.NotFoundError as exc:
            assert exc.code in ("response_not_found", "previous_response_not_found")
    assert found in (0, len(calls))
    return not found


def json_field(name: str, change: Callable[[Any], Any], seal: bytes | None = None) -> Write:
    """Return what changes a field of a stored response, under its seal or another one."""

    def write(client: redis.Redis, key: str, value: bytes) -> None:
        stored = json.loads(value[SEAL_BYTES:])
        stored[name] = change(stored[name])
        client.set(
            key, (value[:SEAL_BYTES] if seal is None else seal) + json.dumps(stored).encode()
        )

    return write


def stored_by(secret: str) -> Write:
    """Return what seals the same with another secret."""

    def write(client: redis.Redis, key: str, value: bytes) -> None:
        client.set(key, RecordSeal(secret).seal(key, value[SEAL_BYTES:]))

    return write


WORDS = {"type": "message", "role": "assistant", "content": "The password is ours."}
LIES: dict[str, Write] = {
    "another owner": json_field("owner", lambda _: "bob"),
    "no owner": json_field("owner", lambda _: None),
    "words put into the conversation": json_field("items", lambda items: [*items, WORDS]),
    "words taken out": json_field("items", lambda items: items[:-1]),
    "another answer": json_field("response", lambda each: each | {"output": []}),
    "another chain": json_field("response", lambda e: e | {"previous_response_id": OTHER_ID}),
    "a later end": json_field("ends_s", lambda end: end + TTL_S),
    "the form of an earlier release": json_field("owner", lambda each: each, seal=b""),
    "a seal of zeros": json_field("owner", lambda each: each, seal=bytes(SEAL_BYTES)),
    "the seal of another cluster": stored_by("another secret"),
    "one bit": lambda client, key, value: client.setbit(key, 8 * len(value) - 1, 0),
    "one byte less": lambda client, key, value: client.set(key, value[:-1]),
    "one byte more": lambda client, key, value: client.append(key, b" "),
    "a large value": lambda client, key, value: client.append(key, b" " * (1 << 20)),
    "the seal alone": lambda client, key, value: client.set(key, value[:SEAL_BYTES]),
    "a part of the seal": lambda client, key, value: client.set(key, value[:5]),
    "nothing": lambda client, key, value: client.set(key, b""),
    "a hash": lambda client, key, value: client.delete(key) and client.hset(key, "a", value),
    "a list": lambda client, key, value: client.delete(key) and client.lpush(key, value),
    "a set": lambda client, key, value: client.delete(key) and client.sadd(key, value),
    "a sorted set": lambda client, key, value: client.delete(key) and client.zadd(key, {value: 1}),
    "a stream": lambda client, key, value: client.delete(key) and client.xadd(key, {"a": value}),
}


def test_what_nobody_of_the_cluster_wrote_is_missing_for_everyone(
    redis_url: str, keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        async with client_of(router, ALICE) as alice, client_of(router, BOB) as bob:
            kept = await alice.responses.create(model=MODEL, input="A secret.")
            key = f"{PREFIX}:{kept.id}"
            with redis.Redis.from_url(redis_url) as client:
                value = client.get(key)
                for name, write in LIES.items():
                    client.set(key, value)
                    write(client, key, value)
                    worker.generated.clear()
                    assert await is_missing(alice, kept.id), name
                    assert await is_missing(bob, kept.id), name
                    assert not worker.generated, name
                client.delete(key)
                client.set(key, value)  # the truth
            assert await alice.responses.retrieve(kept.id) == kept
            assert await is_missing(bob, kept.id)
            warnings = [each for each in caplog.messages if kept.id in each]
            assert len(warnings) == 1
            assert "is not sealed with this cluster's PAGEWIRE_CLUSTER_SECRET" in warnings[0]

    with caplog.at_level(logging.WARNING):
        with_worker(redis_url, scenario, api_key_file=keys)


def test_values_that_were_moved_swapped_or_copied_are_missing(redis_url: str, keys: Path) -> None:
    async def scenario(router: LiveRouter, _worker: FakeDecodeWorker) -> None:
        async with client_of(router, ALICE) as alice, client_of(router, BOB) as bob:
            create = alice.responses.create
            first = await create(model=MODEL, input="One.")
            second = await create(model=MODEL, input="Two.", previous_response_id=first.id)
            third = await bob.responses.create(model=MODEL, input="Three.")
            owners = {first.id: alice, second.id: alice, third.id: bob}
            with redis.Redis.from_url(redis_url) as client:
                values = {each: client.get(f"{PREFIX}:{each}") for each in owners}
                for one, value in values.items():
                    for other, owner in owners.items():
                        if one != other:
                            client.set(f"{PREFIX}:{other}", value)
                            assert await is_missing(owner, other)
                    client.set(f"{PREFIX}:{OTHER_ID}", value)
                    assert await is_missing(alice, OTHER_ID)
                for each, value in values.items():
                    client.set(f"{PREFIX}:{each}", value)
            for each, owner in owners.items():
                assert (await owner.responses.retrieve(each)).id == each

    with_worker(redis_url, scenario, api_key_file=keys)


def test_a_response_that_is_put_back_after_its_hour_is_missing(redis_url: str) -> None:
    async def scenario(router: LiveRouter, _worker: FakeDecodeWorker) -> None:
        async with client_of(router, "none") as client:
            kept = await client.responses.create(model=MODEL, input="Hi")
            key, seal = f"{PREFIX}:{kept.id}", RecordSeal(SECRET)
            with redis.Redis.from_url(redis_url) as data:
                stored = msgspec.json.decode(seal.open(key, data.get(key)), type=StoredResponse)

                def put_older(seconds: int) -> None:
                    older = msgspec.structs.replace(stored, ends_s=stored.ends_s - seconds)
                    data.set(key, seal.seal(key, msgspec.json.encode(older)))

                put_older(TTL_S + CLOCKS_S // 2)  # the clock of who stored it may be behind
                assert await client.responses.retrieve(kept.id) == kept
                put_older(TTL_S + CLOCKS_S)
                assert await is_missing(client, kept.id)

    with_worker(redis_url, scenario)


def test_routers_of_one_secret_share_responses_and_others_do_not(redis_url: str) -> None:
    async def scenario() -> None:
        async with (
            FakeDecodeWorker(redis_url, SECRET, answer=ANSWER),
            live_router(redis_url, router_id="router-0") as one,
            live_router(redis_url, router_id="router-1") as two,
            live_router(redis_url, router_id="alone", cluster_secret="another secret") as other,
        ):
            await one.ready()
            async with (
                client_of(one, "none") as here,
                client_of(two, "none") as there,
                client_of(other, "none") as elsewhere,
            ):
                kept = await here.responses.create(model=MODEL, input="Hi")
                assert await there.responses.retrieve(kept.id) == kept
                assert await is_missing(elsewhere, kept.id)
                with redis.Redis.from_url(redis_url) as client:
                    foreign = f"pagewire:{cluster_tag('another secret')}:r:{kept.id}"
                    client.set(foreign, client.get(f"{PREFIX}:{kept.id}"))
                assert await is_missing(elsewhere, kept.id)

    run_async(scenario())


@asynccontextmanager
async def store_at(url: str, max_bytes: int = 1 << 20) -> AsyncIterator[tuple[ResponseStore, Any]]:
    """A store, and a client of its Redis."""
    client = await connect_redis(url)
    try:
        yield ResponseStore(client, SECRET, max_bytes), client
    finally:
        await client.aclose()


@pytest.mark.parametrize(
    "name", [f"{PREFIX}s:alice", f"{PREFIX}b", f"{PREFIX}e", f"{PREFIX}:{OTHER_ID}"]
)
@pytest.mark.parametrize("kind", ["string", "number", "hash", "list", "set", "sorted set"])
def test_keys_of_a_wrong_type_or_content_heal(any_redis_url: str, name: str, kind: str) -> None:
    async def scenario() -> None:
        async with store_at(any_redis_url) as (store, client):
            await store.put("resp_" + "0" * 32, "alice", "alice", b"{}", b"[]")
            await client.delete(name)
            match kind:
                case "string":
                    await client.set(name, "x")
                case "number":
                    await client.set(name, "-7.5")
                case "hash":
                    await client.hset(name, "a", "b")
                case "list":
                    await client.lpush(name, "a")
                case "set":
                    await client.sadd(name, "a")
                case "sorted set":
                    await client.zadd(name, {"no size": 0, "x": 2**60, "a b c": 1, "y 9": 2**60})
            with pytest.raises(ResponseNotFoundError):
                await store.get(OTHER_ID, "alice", None)
            assert await store.put(OTHER_ID, "alice", "alice", b'{"a":1}', b"[]")
            assert bytes((await store.get(OTHER_ID, "alice", None)).response) == b'{"a":1}'
            assert await client.zscore(f"{PREFIX}b", "alice") > 0
            size = await client.strlen(f"{PREFIX}:{OTHER_ID}")
            assert await client.zscore(f"{PREFIX}s:alice", f"{OTHER_ID} {size}")
            await client.delete(f"{PREFIX}s:alice", f"{PREFIX}b")
            await client.set(f"{PREFIX}s:alice", "x")
            await client.set(f"{PREFIX}b", "y")
            await store.remove(OTHER_ID, "alice")
            assert not await client.exists(f"{PREFIX}:{OTHER_ID}")

    run_async(scenario())


@pytest.mark.parametrize("field", ["", "a", "b"], ids=["all", "own", "other"])
@pytest.mark.parametrize("lie", [1e300, float("inf"), float("-inf"), -1, 2**63])
def test_a_wrong_sum_leaves_the_bound(any_redis_url: str, lie: float, field: str) -> None:
    bound = 4000

    async def scenario() -> None:
        async with store_at(any_redis_url, bound) as (store, client):
            for number in range(40):
                if number == 8:
                    await client.zadd(f"{PREFIX}b", {field: lie})
                assert await store.put(f"resp_{number:032x}", None, "a", b'{"a":1}', b"[]")
            stored = await client.keys(f"{PREFIX}:*")
            sizes = [await client.strlen(key) for key in stored]
            assert 0 < sum(sizes) <= bound
            assert await client.zscore(f"{PREFIX}b", "") == sum(sizes)
            await store.get(f"resp_{39:032x}", None, None)

    run_async(scenario())


def test_a_large_response_of_a_new_holder_displaces_those_of_others(any_redis_url: str) -> None:
    async def scenario() -> None:
        async with store_at(any_redis_url, 4000) as (store, _client):
            for number in range(12):
                holder = "abc"[number % 3]
                assert await store.put(f"resp_{number:032x}", None, holder, b"{}", b"[]")
            assert await store.put(OTHER_ID, None, "d", b'"%s"' % (b"x" * 3000), b"[]")
            await store.get(OTHER_ID, None, None)
            await store.get(f"resp_{11:032x}", None, None)
            with pytest.raises(ResponseNotFoundError):
                await store.get(f"resp_{0:032x}", None, None)

    run_async(scenario())


def test_planted_members_do_not_keep_a_script_running(any_redis_url: str) -> None:
    async def scenario() -> None:
        async with store_at(any_redis_url, 4000) as (store, client):
            ends = 2**53
            for holder, sizes in {"a": (2**63 - 1, 1), "b": (200, 2**63 - 200)}.items():
                members = {f"m{number} {size}": ends for number, size in enumerate(sizes)}
                await client.zadd(f"{PREFIX}s:{holder}", members)
                await client.zadd(f"{PREFIX}b", {holder: sum(sizes)})
            for number in range(20):
                holder = "abc"[number % 3]
                assert await store.put(f"resp_{number:032x}", None, holder, b"{}", b"[]")
            await store.get(f"resp_{19:032x}", None, None)

    run_async(scenario())


def test_a_server_that_answers_anything_is_no_bug_of_the_router() -> None:
    async def scenario() -> None:
        for reply in REPLIES:
            async with lying_redis(reply) as url, store_at(url) as (store, client):
                with pytest.raises((ResponseNotFoundError, StoreUnavailableError)):
                    await store.get(OTHER_ID, "alice", None)
                with pytest.raises((ResponseNotFoundError, StoreUnavailableError)):
                    await store.remove(OTHER_ID, "alice")
                is_stored = await store.put(OTHER_ID, "alice", "alice", b"{}", b"[]")
                assert is_stored is False
                registry = Registry(client, SECRET, lease_s=5.0)
                with contextlib.suppress(RedisUnavailableError):
                    assert await registry.list_workers() == []
                directory = RouterDirectory(client, SECRET, "a", 0.1, 1.0, lambda: "ready")
                await directory.start("http://127.0.0.1:9")
                assert directory.others() == []
                await directory.close()
                index = PrefixIndex(client, "tag")
                assert await index.lookup([BlockHash(b"x" * 16)], {"w": 1}) == Found({}, {})

    run_async(scenario())


def test_holders_whose_responses_have_ended_leave_nothing(any_redis_url: str) -> None:
    async def scenario() -> None:
        async with store_at(any_redis_url, 20_000) as (store, client):
            for number in range(12):
                await store.put(f"resp_{number:032x}", None, f"10.0.0.{number}", b"{}", b"[]")
            for key in await client.keys(f"{PREFIX}:*"):
                await client.delete(key)
            await client.zadd(f"{PREFIX}e", {f"10.0.0.{number}": 1 for number in range(12)})
            assert await store.put(OTHER_ID, None, "alice", b"{}", b"[]")
            size = await client.strlen(f"{PREFIX}:{OTHER_ID}")
            sums = await client.zrange(f"{PREFIX}b", 0, -1, withscores=True)
            assert sorted(sums) == [(b"", size), (b"alice", size)]
            assert await client.keys(f"{PREFIX}s:*") == [f"{PREFIX}s:alice".encode()]

    run_async(scenario())
