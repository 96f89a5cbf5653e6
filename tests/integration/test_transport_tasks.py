"""Transports when their own tasks fail, or when what they wait for does not end."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from pagewire.shared.errors import TransferError, TransferTimeoutError
from pagewire.shared.protocol import encode_header
from pagewire.shared.transfer import loopback, session
from pagewire.shared.transfer.wire import Grant, Offer
from pagewire.tests.support.aio import eventually, run_async
from pagewire.tests.support.transfer_child import piece_header
from pagewire.tests.support.transports import PATIENCE_S, Node, network


@asynccontextmanager
async def pair() -> AsyncIterator[tuple[Node, Node]]:
    """Two transports that know each other as "a" and "b"."""
    async with network("loopback") as net:
        yield await net.pair()


async def assert_works(a: Node, b: Node) -> None:
    await asyncio.gather(a.send("b", 1, 1000), b.take_all(1))


def test_repeated_offers_are_counted_and_hold_one_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with pair() as (_, b):
            peer = b.transport._peers["a"]
            await eventually(lambda: peer.settled.is_set())
            # A sender that never offered would decline it.
            monkeypatch.setattr(b.transport._arrivals, "_post", lambda peer, grant: None)
            offer = Offer(peer.channel, 7, 100, encode_header(piece_header(0, 1000)))
            b.transport._arrivals.on_offer(peer, offer)
            b.transport._arrivals.on_offer(peer, offer)  # while it is in line
            await eventually(lambda: 7 in peer.landings)
            b.transport._arrivals.on_offer(peer, offer)  # while its slot is held
            await asyncio.sleep(0.05)
            assert b.num_free == b.staging.num_slots - 1
            assert b.transport.stats.malformed == 2
            await eventually(lambda: b.num_free == b.staging.num_slots)
            assert b.transport.stats.expired == 1

    run_async(scenario())


async def fail(*_: object) -> None:
    raise RuntimeError("a bug")


def failing_once(function: Callable[..., None], kind: type) -> Callable[..., None]:
    """Raise what nobody expects for the first message of a kind."""
    failed = False

    def call(peer: object, message: object) -> None:
        nonlocal failed
        if isinstance(message, kind) and not failed:
            failed = True
            raise RuntimeError("a bug")
        function(peer, message)

    return call


def test_a_granter_that_fails_breaks_the_connection_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with pair() as (a, b):
            arrivals = b.transport._arrivals
            monkeypatch.setattr(arrivals, "_post", failing_once(arrivals._post, Grant))
            slots = [b.staging.try_acquire() for _ in range(b.staging.num_slots)]
            started = time.monotonic()
            sending = asyncio.create_task(a.send("b", 0, 1000))
            await eventually(lambda: b.transport._peers["a"].offers)
            for slot in slots:
                if slot is not None:
                    slot.release()
            with pytest.raises(TransferError, match="'b' has connected anew"):
                await sending
            assert time.monotonic() - started < PATIENCE_S / 2
            await assert_works(a, b)
            assert b.transport.stats.broken == 1

    run_async(scenario())
    assert "granting pieces of a failed" in caplog.text


def test_a_repair_that_fails_is_told_to_senders(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with pair() as (a, b):
            await assert_works(a, b)
            with monkeypatch.context() as patch:
                patch.setattr(a.transport, "_link", fail)
                a.transport._break(a.transport._peers["b"], "for the test")
                with pytest.raises(TransferError, match="no way to 'b'"):
                    await a.send("b", 0, 1000)
            await a.transport.connect("b", b.address, PATIENCE_S)
            await assert_works(a, b)

    run_async(scenario())
    assert "way to b failed" in caplog.text


def test_an_arrival_that_fails_gives_its_slot_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with pair() as (a, b):
            with monkeypatch.context() as patch:
                patch.setattr(loopback, "_fill", fail)
                await a.send("b", 0, 1000)
                await eventually(lambda: "failed" in caplog.text)
            assert b.num_free == b.staging.num_slots
            await assert_works(a, b)

    run_async(scenario())
    assert "a piece of a failed" in caplog.text


def test_a_push_that_fails_late_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with pair() as (a, b):
            await assert_works(a, b)

            async def push_on() -> None:
                await asyncio.sleep(0.3)
                await fail()

            def push(*_: object) -> asyncio.Future[None]:
                return asyncio.create_task(push_on())

            with monkeypatch.context() as patch:
                patch.setattr(a.transport, "_push", push)
                with pytest.raises(TransferTimeoutError):
                    await a.send("b", 0, 1000, timeout=0.1)

    run_async(scenario())
    assert "a bug" in caplog.text


class _Stuck:
    """A payload that keeps moving until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.let_go = asyncio.Event()
        monkeypatch.setattr(loopback, "_fill", self.fill)
        monkeypatch.setattr(session, "_ARRIVAL_GRACE_S", 0.05)

    async def fill(self, landing: object, payload: object) -> None:
        await self.let_go.wait()


def test_a_payload_that_never_ends_holds_no_disconnect_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(session, "_ARRIVAL_END_S", 0.2)

    async def scenario() -> None:
        async with pair() as (a, b):
            stuck = _Stuck(monkeypatch)
            await a.send("b", 0, 1000)
            async with asyncio.timeout(2):
                await b.transport.disconnect("a")
            assert b.num_free == b.staging.num_slots - 1  # it is still written to
            stuck.let_go.set()
            await eventually(lambda: b.num_free == b.staging.num_slots)

    run_async(scenario())
    assert "still arriving" in caplog.text


def test_connecting_anew_waits_for_the_old_connection_within_its_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session, "_ARRIVAL_END_S", 60)

    async def scenario() -> None:
        async with pair() as (a, b):
            stuck = _Stuck(monkeypatch)
            await a.send("b", 0, 1000)
            started = time.monotonic()
            with pytest.raises(TransferTimeoutError):
                await b.transport.connect("a", a.address, 0.3)
            assert time.monotonic() - started < 2
            stuck.let_go.set()
            await b.transport.connect("a", a.address, PATIENCE_S)

    run_async(scenario())
