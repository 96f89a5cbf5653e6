"""How transports end, and what they cost while nothing moves; each test runs on each of them."""

import asyncio
import time
from collections.abc import Callable

import pytest
import uvloop

from pagewire.shared.errors import TransferError
from pagewire.tests.support.aio import eventually, run_async
from pagewire.tests.support.transports import KINDS, PATIENCE_S, network

KIB, MIB = 1 << 10, 1 << 20

pytestmark = [pytest.mark.parametrize("kind", KINDS), pytest.mark.timeout(60)]


def test_close_is_idempotent_and_drops_what_nobody_took(kind: str) -> None:
    async def scenario() -> None:
        async with network(kind) as net:
            a, b = await net.pair(2)
            sends = [asyncio.create_task(a.send("b", i, 1000, timeout=2)) for i in range(4)]
            await eventually(lambda: b.num_free == 0)
            await asyncio.gather(b.transport.close(), b.transport.close())
            await b.transport.close()
            b.staging.check_integrity(all_free=True)
            await asyncio.wait(sends)
            assert sum(isinstance(task.exception(), TransferError) for task in sends) >= 2
            with pytest.raises(TransferError, match="not open"):
                await b.transport.connect("a", a.address, PATIENCE_S)
            with pytest.raises(TransferError, match="started once"):
                await b.transport.start(PATIENCE_S)

    run_async(scenario())


def test_peer_that_closes_is_not_taken_for_broken(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with network(kind) as net:
            a, b = await net.pair()
            await asyncio.gather(a.send("b", 1, 100), b.take_all(1))
            await b.transport.close()
            with pytest.raises(TransferError, match=r"disconnected|took no piece"):
                await a.send("b", 2, 100, timeout=0.3)
            assert a.transport.stats.broken == 0

    run_async(scenario())
    assert [each for each in caplog.messages if not each.startswith("UCX listens")] == []


def test_close_before_start(kind: str) -> None:
    async def scenario() -> None:
        async with network(kind) as net:
            a = await net.open("a")
            unused = net.create("unused", a.staging)
            with pytest.raises(TransferError, match="not open"):
                await unused.connect("a", a.address, PATIENCE_S)
            await unused.close()

    run_async(scenario())


def test_close_fails_pending_sends(kind: str) -> None:
    async def scenario() -> None:
        async with network(kind) as net:
            a, _ = await net.pair(1)
            sends = [asyncio.create_task(a.send("b", i, 1000)) for i in range(3)]
            await asyncio.sleep(0.2)
            await a.transport.close()
            await asyncio.wait(sends, timeout=1)
            errors = [task.exception() for task in sends]
            assert sum(isinstance(error, TransferError) for error in errors) == 2

    run_async(scenario())


@pytest.mark.parametrize(
    "loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"]
)
def test_one_event_loop_after_the_other(
    kind: str, loop_factory: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def scenario() -> None:
        async with network(kind) as net:
            a, b = await net.pair(2, MIB)
            await asyncio.gather(a.send("b", 1, MIB), b.send("a", 2, 10), b.take_all(1))
            assert await a.take_all(1) == [2]

    for _ in range(3):
        run_async(scenario(), loop_factory=loop_factory)


def test_idle_transport_leaves_the_processor_alone(kind: str) -> None:
    async def scenario() -> float:
        async with network(kind) as net:
            a, b = await net.pair()
            await asyncio.gather(a.send("b", 1, 100), b.take_all(1))
            waiting = asyncio.create_task(b.transport.recv())
            started = time.thread_time()
            await asyncio.sleep(0.5)
            used = time.thread_time() - started
            waiting.cancel()
            await asyncio.wait({waiting})
            return used

    assert run_async(scenario()) < 0.05
