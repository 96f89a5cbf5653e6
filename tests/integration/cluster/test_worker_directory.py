import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from pagewire.shared.cluster.registry import (
    RecordPublisher,
    Registry,
    WorkerLoad,
    WorkerRecord,
)
from pagewire.shared.cluster.worker_directory import WorkerDirectory
from pagewire.shared.control.protocol import PROTOCOL_VERSION
from pagewire.tests.support.aio import eventually, run_async
from pagewire.tests.support.redis_server import RedisServer
from pagewire.tests.support.worker_records import ids, record, registry_at


class Watched:
    """A directory and what it reported to its listeners."""

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
        async with registry_at(redis_server.url, lease_s=60) as registry:
            await registry.publish(record("a"))
            async with watching(registry) as watched:
                assert watched.ids() == ["a"]
                assert watched.directory.redis_ok
                await registry.publish(record("p", role="prefill"))
                await registry.publish(record("a", epoch=2))
                await eventually(lambda: ("join", "a", 2) in watched.events)
                assert ids(watched.directory.workers("prefill")) == ["p"]
                assert ids(watched.directory.workers("decode")) == ["a"]
                assert watched.directory.get("a") == record("a", epoch=2)
                await registry.publish(record("a", epoch=1))  # a zombie
                await watched.directory.refresh()
                assert watched.directory.get("a") == record("a", epoch=2)
                await registry.publish(record("a", epoch=2))
                await watched.directory.refresh()
                registry.lease_s = 0.4  # from here on nobody renews them
                for each in (record("p", role="prefill"), record("a", epoch=2)):
                    await registry.publish(each)
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


def test_a_worker_that_goes_on_with_another_release_leaves_at_once(
    redis_server: RedisServer,
) -> None:
    async def scenario() -> None:
        async with registry_at(redis_server.url, lease_s=5.0) as registry:
            await registry.publish(record("a"))
            async with watching(registry) as watched:
                await registry.publish(record("a", epoch=2, protocol=PROTOCOL_VERSION + 1))
                await eventually(lambda: watched.events == [("join", "a", 1), ("leave", "a", 1)])
                [other] = watched.directory.others
                assert (other.worker_id, other.protocol) == ("a", PROTOCOL_VERSION + 1)
                assert watched.ids() == []
                await registry.publish(record("a", epoch=3))
                await eventually(lambda: watched.ids() == ["a"])
                assert watched.directory.others == ()
                zombie = record("a", epoch=2, protocol=PROTOCOL_VERSION + 1)
                await registry.publish(zombie)
                await watched.directory.refresh()
                assert watched.ids() == ["a"]
                assert watched.directory.others == ()

    run_async(scenario())


def test_the_directory_sees_changed_loads(redis_server: RedisServer) -> None:
    async def scenario() -> None:
        async with registry_at(redis_server.url) as registry:
            await registry.publish(record("a"))
            async with watching(registry) as watched:
                busy = record("a", load=WorkerLoad(running=7))
                await registry.publish(busy)
                await eventually(lambda: watched.directory.workers() == (busy,))
                assert watched.events == [("join", "a", 1)]

    run_async(scenario())


def test_a_flushed_redis_costs_no_worker(redis_server: RedisServer) -> None:
    async def scenario() -> None:
        async with registry_at(redis_server.url, lease_s=1.0) as registry:
            publisher = RecordPublisher(registry, lambda: record("a"), heartbeat_s=0.2)
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
            await registry.publish(record("a"))
            async with watching(registry, grace_s=60) as watched:
                redis_server.freeze() if fault == "frozen" else redis_server.kill()
                await eventually(lambda: not watched.directory.redis_ok)
                await watched.directory.refresh()
                assert watched.ids() == ["a"]
                watched.directory._grace_s = 0.5
                await eventually(lambda: watched.ids() == [])
                redis_server.thaw() if fault == "frozen" else redis_server.start()
                await registry.publish(record("a", epoch=2))
                await eventually(lambda: watched.ids() == ["a"])
                assert watched.directory.redis_ok
                assert watched.events == [("join", "a", 1), ("leave", "a", 1), ("join", "a", 2)]

    run_async(scenario())


@pytest.mark.parametrize("is_there", [True, False])
def test_redis_answers_again_only_if_it_had_not_answered(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture, is_there: bool
) -> None:
    async def scenario() -> None:
        async with registry_at(redis_server.url) as registry:
            if not is_there:
                redis_server.kill()
            async with watching(registry) as watched:
                if not is_there:
                    assert caplog.text.count("Redis does not answer") == 1
                    redis_server.start()
                    await eventually(lambda: watched.directory.redis_ok)
                await watched.directory.refresh()

    with caplog.at_level(logging.INFO):
        run_async(scenario())
    assert caplog.text.count("Redis answers again") == (not is_there)


def test_a_failing_listener_does_not_stop_the_directory(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: WorkerRecord) -> None:
        raise RuntimeError("a bug in a listener")

    async def scenario() -> None:
        async with registry_at(redis_server.url) as registry:
            directory = WorkerDirectory(registry, poll_s=0.05, on_join=fail)
            await registry.publish(record("a"))
            await directory.start()
            await registry.publish(record("b"))
            await eventually(lambda: ids(directory.workers()) == ["a", "b"])
            await directory.close()

    run_async(scenario())
    assert caplog.text.count("a listener of the worker directory failed") == 2


@pytest.mark.parametrize("has_own", [False, True])
def test_workers_with_another_secret_alone_are_worth_a_warning(
    any_redis_url: str, caplog: pytest.LogCaptureFixture, has_own: bool
) -> None:
    async def scenario() -> None:
        async with (
            registry_at(any_redis_url) as registry,
            registry_at(any_redis_url, secret="of another cluster") as other,
        ):
            await other.publish(record("theirs"))
            async with watching(registry, explain_after_s=0.1) as watched:
                if has_own:
                    await registry.publish(record("ours"))
                if not has_own:
                    await eventually(lambda: warning in caplog.text)
                await asyncio.sleep(0.6)  # no second one
                assert watched.ids() == (["ours"] if has_own else [])

    warning = "need the same PAGEWIRE_CLUSTER_SECRET"
    run_async(scenario())
    assert caplog.text.count(warning) == (not has_own)


def test_a_worker_does_not_take_itself_for_its_cluster(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with (
            registry_at(redis_server.url) as registry,
            registry_at(redis_server.url, secret="of another cluster") as other,
        ):
            await other.publish(record("theirs"))
            await registry.publish(record("alone"))
            async with watching(registry, explain_after_s=0.1, own_id="alone"):
                await eventually(lambda: "there is no other worker with this" in caplog.text)

    run_async(scenario())
