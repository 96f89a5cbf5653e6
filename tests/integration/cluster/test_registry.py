import asyncio
import logging
import time
from typing import Any

import msgspec
import pytest
from redis.asyncio import Redis

from pagewire.shared.base.errors import RedisUnavailableError
from pagewire.shared.cluster.registry import (
    LinkInfo,
    OtherVersion,
    RecordPublisher,
    Registry,
    WorkerLoad,
    WorkerRecord,
)
from pagewire.shared.control.protocol import MAX_EPOCH, PROTOCOL_VERSION
from pagewire.shared.costs.step_prices import StepPrices
from pagewire.tests.support.aio import eventually, run_async, until_returns
from pagewire.tests.support.redis_server import RedisServer
from pagewire.tests.support.worker_records import (
    TAG,
    client_of,
    ids,
    put_bytes,
    record,
    registry_at,
    sealed,
)


def test_records_are_listed_as_published_until_withdrawn(any_redis_url: str) -> None:
    full = record(
        "prefill-0",
        role="prefill",
        state="draining",
        kv_transports=["ucx", "zmq"],
        load=WorkerLoad(running=3, iterations=2**40, total_blocks=100),
        links=[LinkInfo(peer="decode-0", transport="ucx", gbps=350.5, latency_s=1e-3)],
        block_bytes=1 << 21,
        prices=StepPrices(fixed=0.004, per_token=(1e-5, 2e-5), error=0.03, steps=2**33),
    )

    async def scenario() -> None:
        async with registry_at(any_redis_url) as registry:
            assert await registry.list_workers() == []
            await registry.publish(record())
            await registry.publish(full)
            listed = {c.worker_id: c for c in await registry.list_workers()}
            assert listed == {"decode-0": record(), "prefill-0": full}
            await registry.publish(record(state="draining"))
            await registry.withdraw("prefill-0")
            assert await registry.list_workers() == [record(state="draining")]

    run_async(scenario())


def test_a_record_that_is_not_renewed_is_gone_and_its_id_swept(any_redis_url: str) -> None:
    async def scenario() -> None:
        async with (
            registry_at(any_redis_url, lease_s=0.2) as registry,
            client_of(any_redis_url) as client,
        ):
            await registry.publish(record())
            await asyncio.sleep(0.3)
            assert await registry.list_workers() == []
            assert await client.smembers(f"pagewire:{TAG}:workers") == set()

    run_async(scenario())


def test_only_a_record_that_expires_is_counted_as_lost_and_once(any_redis_url: str) -> None:
    async def scenario() -> None:
        async with (
            registry_at(any_redis_url, lease_s=0.2) as registry,
            registry_at(any_redis_url, lease_s=0.2) as other,
        ):
            for name in ("stopped", "killed"):
                await registry.publish(record(name))
            await registry.withdraw("stopped")
            assert ids(await registry.list_workers()) == ["killed"]
            assert registry.expired_records == 0
            await asyncio.sleep(0.3)
            for reader in (registry, other, registry):
                assert await reader.list_workers() == []
            assert (registry.expired_records, other.expired_records) == (1, 0)

    run_async(scenario())


def test_two_clusters_on_one_redis_never_mix(any_redis_url: str) -> None:
    async def scenario() -> None:
        async with client_of(any_redis_url) as client:
            ours = Registry(client, "our secret", 5.0)
            theirs = Registry(client, "their secret", 5.0)
            await ours.publish(record("a"))
            await theirs.publish(record("b"))
            assert ids(await ours.list_workers()) == ["a"]
            assert ids(await theirs.list_workers()) == ["b"]

    run_async(scenario())


def garbage() -> dict[str, bytes]:
    good = msgspec.msgpack.encode(record("wrong-id"))
    wrong_type = msgspec.to_builtins(record("wrong-type")) | {"role": 7}
    return {
        "noise": b"\xc1\x00\xff",
        "empty": b"",
        "wrong-id": msgspec.msgpack.encode(record("somebody-else")),
        "truncated": good[:-3],
        "wrong-type": msgspec.msgpack.encode(wrong_type),
        "no-utf8": b"\x81\xa2\xff\xfe\x01",
        "deep": b"\x91" * 5000,
        "huge": bytes(1 << 20),
    }


def test_garbage_is_ignored_counted_and_logged_once(
    any_redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> int:
        async with registry_at(any_redis_url) as registry, client_of(any_redis_url) as client:
            await registry.publish(record())
            for worker_id, value in garbage().items():
                await put_bytes(client, worker_id, sealed(worker_id, value))
            await client.lpush(f"pagewire:{TAG}:worker:a-list", "x")
            await client.sadd(f"pagewire:{TAG}:workers", "a-list", b"\xff\xfe")
            for _ in range(3):
                assert await registry.list_workers() == [record()]
            return registry.malformed_records

    with caplog.at_level(logging.WARNING):
        assert run_async(scenario()) == 3 * len(garbage())
    assert caplog.text.count("malformed worker record") == len(garbage())


def unsealed() -> dict[str, bytes]:
    """What somebody who may write to Redis, but has not the secret, could put there."""
    plain = msgspec.msgpack.encode(record("plain"))
    changed = bytearray(sealed("changed", msgspec.msgpack.encode(record("changed"))))
    changed[-1] ^= 1
    return {
        "plain": plain,  # as releases before the seal wrote it
        "nothing": b"",
        "short": sealed("short", b"")[:31],
        "changed": bytes(changed),
        "copied": sealed("decode-0", msgspec.msgpack.encode(record("decode-0"))),
        "strange": sealed("strange", msgspec.msgpack.encode(record("strange")), "another secret"),
        "later": msgspec.msgpack.encode(record("later", protocol=PROTOCOL_VERSION + 1)),
    }


def test_records_without_the_clusters_seal_are_ignored_counted_and_logged_once(
    any_redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> tuple[int, int]:
        async with registry_at(any_redis_url) as registry, client_of(any_redis_url) as client:
            await registry.publish(record())
            for worker_id, value in unsealed().items():
                await put_bytes(client, worker_id, value)
            for _ in range(3):
                assert await registry.list_workers() == [record()]
            return registry.unsealed_records, registry.malformed_records

    with caplog.at_level(logging.WARNING):
        assert run_async(scenario()) == (3 * len(unsealed()), 0)
    assert caplog.text.count("it is not sealed with this cluster's") == len(unsealed())


def test_an_epoch_without_the_clusters_seal_counts_for_nothing(any_redis_url: str) -> None:
    future = time.time_ns() + 10**18

    async def scenario() -> None:
        async with registry_at(any_redis_url) as registry, client_of(any_redis_url) as client:
            await put_bytes(client, "w", msgspec.msgpack.encode(record("w", epoch=future)))
            assert 0 < await registry.new_epoch("w") < future

    run_async(scenario())


async def put_raw(client: Redis, worker_id: str, record: dict[str, Any]) -> None:
    """Publish what another release might."""
    await put_bytes(client, worker_id, sealed(worker_id, msgspec.msgpack.encode(record)))


def raw_record(worker_id: str, **changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(record(worker_id))
    return fields | changes


def test_fields_that_this_release_does_not_know_are_passed_over(any_redis_url: str) -> None:
    extended = raw_record("decode-0", zone="eu", parts=[1, {2: 3}])
    extended["load"] |= {"temperature": 60.5}
    extended["model_identity"] |= {"adapter": "a"}
    extended["links"] = [{"peer": "prefill-0", "transport": "zmq", "hops": 3}]

    async def scenario() -> None:
        async with registry_at(any_redis_url) as registry, client_of(any_redis_url) as client:
            await put_raw(client, "decode-0", extended)
            link = LinkInfo(peer="prefill-0", transport="zmq")
            assert await registry.list_workers() == [record(links=[link])]
            assert (registry.malformed_records, registry.other_version_records) == (0, 0)

    run_async(scenario())


LATER = PROTOCOL_VERSION + 1
HEAD = ("worker_id", "protocol", "epoch", "role", "metrics_endpoint")
AT = {"metrics_endpoint": record().metrics_endpoint}
_RECORDS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (
        "further fields",
        raw_record("w", protocol=LATER, zone="eu"),
        {"epoch": 1, "role": "decode"} | AT,
    ),
    (
        "an unknown role",
        raw_record("w", protocol=LATER, role="encode"),
        {"epoch": 1, "role": "encode"} | AT,
    ),
    (
        "an unknown state",
        raw_record("w", protocol=LATER, state="asleep"),
        {"epoch": 1, "role": "decode"} | AT,
    ),
    (
        "another identity",
        raw_record("w", protocol=LATER, model_identity=[1, [2]]),
        {"epoch": 1, "role": "decode"} | AT,
    ),
    (
        "larger lists",
        raw_record("w", protocol=LATER, kv_transports=["t"] * 50_000),
        {"epoch": 1, "role": "decode"} | AT,
    ),
    (
        "other types",
        raw_record("w", protocol=LATER, epoch="7-b", role=["decode"], load=3, links={}),
        AT,
    ),
    (
        "another address",
        raw_record("w", protocol=LATER, metrics_endpoint=7, epoch=[], role=1),
        {},
    ),
    ("almost nothing", {}, {}),
    (
        "a named version",
        raw_record("w", protocol="6.1"),
        {"protocol": "6.1", "epoch": 1, "role": "decode"} | AT,
    ),
    (
        "a version of two lines",
        raw_record("w", protocol="6\nERROR: all is lost"),
        {"protocol": "6\nERROR: all is lost", "epoch": 1, "role": "decode"} | AT,
    ),
    (
        "an old release",
        raw_record("w", protocol=0, epoch=9),
        {"protocol": 0, "epoch": 9, "role": "decode"} | AT,
    ),
]
OTHER_RELEASES: dict[str, tuple[dict[str, Any], OtherVersion]] = {
    name: (
        {"worker_id": "w", "protocol": LATER} | fields,
        OtherVersion(**(dict.fromkeys(HEAD) | {"worker_id": "w", "protocol": LATER} | seen)),
    )
    for name, fields, seen in _RECORDS
}


@pytest.mark.parametrize("name", OTHER_RELEASES)
def test_a_record_of_another_release_is_not_malformed(
    any_redis_url: str, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    written, seen = OTHER_RELEASES[name]

    async def scenario() -> None:
        async with registry_at(any_redis_url) as registry, client_of(any_redis_url) as client:
            await put_raw(client, "w", written)
            for _ in range(3):
                assert await registry.list_workers() == [seen]
            assert (registry.malformed_records, registry.other_version_records) == (0, 3)

    with caplog.at_level(logging.WARNING):
        run_async(scenario())
    [warning] = caplog.messages
    assert (
        f"'w', which speaks protocol version {seen.protocol!r}, this side {PROTOCOL_VERSION}"
        in warning
    )


@pytest.mark.parametrize(
    "written", [raw_record("w", role="encode"), raw_record("w", protocol=LATER)]
)
def test_epochs_grow_whichever_release_wrote_the_earlier_one(
    any_redis_url: str, written: dict[str, Any]
) -> None:
    future = time.time_ns() + 10**18

    async def scenario() -> None:
        async with registry_at(any_redis_url) as registry, client_of(any_redis_url) as client:
            for epoch, expected in ((future, future + 1), (MAX_EPOCH, None), ("x", None)):
                await put_raw(client, "w", written | {"epoch": epoch})
                given = await registry.new_epoch("w")
                assert given == expected or (expected is None and 0 < given < future)

    run_async(scenario())


def test_a_publisher_repairs_keys_of_a_wrong_type(redis_server: RedisServer) -> None:
    async def scenario() -> None:
        async with registry_at(redis_server.url) as registry, client_of(redis_server.url) as client:
            await client.set(f"pagewire:{TAG}:workers", "not a set")
            await client.lpush(f"pagewire:{TAG}:worker:decode-0", "not a record")
            with pytest.raises(RedisUnavailableError, match="WRONGTYPE"):
                await registry.list_workers()
            await registry.publish(record())
            assert await registry.list_workers() == [record()]

    run_async(scenario())


def test_epochs_grow_even_if_the_clock_is_set_back(any_redis_url: str) -> None:
    async def scenario() -> None:
        async with registry_at(any_redis_url) as registry:
            first = await registry.new_epoch("decode-0")
            assert abs(first - time.time_ns()) < 60e9
            future = first + 10**18
            await registry.publish(record(epoch=future))
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
                await registry.publish(record())
            with pytest.raises(RedisUnavailableError):
                await registry.list_workers()
            assert await registry.new_epoch("decode-0") > 0
            assert time.monotonic() - start < 10  # each has 1 s
            redis_server.thaw()
            await registry.publish(record())
            assert await registry.list_workers() == [record()]
            redis_server.kill()
            with pytest.raises(RedisUnavailableError):
                await registry.publish(record())
            redis_server.start()
            await registry.publish(record())
            assert await registry.list_workers() == [record()]

    run_async(scenario())


def test_a_publisher_keeps_a_record_alive_and_removes_it_at_the_end(any_redis_url: str) -> None:
    async def scenario() -> None:
        made: list[WorkerRecord] = []

        def make() -> WorkerRecord:
            made.append(record())
            return made[-1]

        async with registry_at(any_redis_url, lease_s=1.0) as registry:
            publisher = RecordPublisher(registry, make, heartbeat_s=0.1)
            await publisher.start()
            await eventually(lambda: len(made) == 15)  # which takes longer than a lease
            assert await registry.list_workers() == [record()]
            await publisher.close()
            assert await registry.list_workers() == []
            await publisher.close()

    run_async(scenario())


def test_a_change_of_state_is_published_at_once(redis_server: RedisServer) -> None:
    async def scenario() -> None:
        async with registry_at(redis_server.url) as registry:
            state = {"state": "ready"}
            publisher = RecordPublisher(registry, lambda: record(**state), heartbeat_s=60)
            await publisher.start()
            state["state"] = "draining"
            publisher.renew_now()
            await until_returns(registry.list_workers, [record(state="draining")])
            await publisher.close()

    run_async(scenario())


def test_a_publisher_outlives_redis(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with registry_at(redis_server.url) as registry:
            publisher = RecordPublisher(registry, record, heartbeat_s=0.05)
            await publisher.start()
            redis_server.kill()
            await eventually(lambda: publisher.failed_renewals > 1)
            redis_server.start()
            await until_returns(registry.list_workers, [record()])
            redis_server.kill()
            await publisher.close()

    with caplog.at_level(logging.WARNING):
        run_async(scenario())
    assert 1 <= caplog.text.count("cannot renew the worker record") <= 2


def test_a_bug_in_making_a_record_is_logged(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    records = iter([record()])

    async def scenario() -> None:
        async with registry_at(redis_server.url) as registry:
            publisher = RecordPublisher(registry, lambda: next(records), heartbeat_s=0.05)
            await publisher.start()
            await eventually(lambda: "record-publisher failed" in caplog.text)
            await publisher.close()

    run_async(scenario())
