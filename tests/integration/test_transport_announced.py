"""Pieces that are offered while they are packed."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from pagewire.shared.errors import TransferError, TransferTimeoutError
from pagewire.tests.support.aio import eventually, run_async
from pagewire.tests.support.transfer_child import piece_bytes, piece_header
from pagewire.tests.support.transports import PATIENCE_S, Node, crediting, credits_of, network

pytestmark = [
    pytest.mark.parametrize("kind", ["loopback", "zmq", "ucx"]),
    pytest.mark.timeout(60),
]
NBYTES = 1000


class Packing:
    """A piece's payload, which is there once `done` is set, or never if `error` is."""

    def __init__(self, piece: int = 1) -> None:
        self.header = piece_header(piece, NBYTES)
        self.payload = piece_bytes(piece, NBYTES)
        self.done = asyncio.Event()
        self.error: Exception | None = None

    async def until_packed(self) -> None:
        await self.done.wait()
        if self.error is not None:
            raise self.error

    def send(self, sender: Node, timeout: float = PATIENCE_S) -> asyncio.Task[None]:
        return asyncio.create_task(
            sender.transport.send("b", self.header, self.payload, timeout, self.until_packed)
        )


def landings_at(receiver: Node) -> int:
    return len(receiver.transport._peers["a"].landings)


def test_a_piece_is_offered_while_it_is_packed_and_comes_when_it_is(kind: str) -> None:
    async def scenario() -> None:
        async with crediting(kind) as (a, b):
            packing = Packing()
            sending = packing.send(a)
            await eventually(lambda: landings_at(b) == 1)
            await asyncio.gather(a.send("b", 2, NBYTES), b.take_all(1))  # it waits for no other
            assert not sending.done()
            packing.done.set()
            assert await b.take_all(1) == [1]
            await sending
            await credits_of(a, 2)

    run_async(scenario())


def ends_in_error(packing: Packing, sending: asyncio.Task[None]) -> type[BaseException]:
    packing.error = ValueError("not packed")
    packing.done.set()
    return ValueError


def is_cancelled(packing: Packing, sending: asyncio.Task[None]) -> type[BaseException]:
    sending.cancel()
    return asyncio.CancelledError


def takes_too_long(packing: Packing, sending: asyncio.Task[None]) -> type[BaseException]:
    return TransferTimeoutError


@pytest.mark.parametrize("end", [ends_in_error, is_cancelled, takes_too_long])
def test_what_is_never_packed_is_withdrawn_and_costs_no_held_slot(
    kind: str, end: Callable[[Packing, asyncio.Task[None]], type[BaseException]]
) -> None:
    async def scenario() -> None:
        async with crediting(kind) as (a, b):
            packing = Packing()
            sending = packing.send(a, 1.0 if end is takes_too_long else PATIENCE_S)
            await eventually(lambda: landings_at(b) == 1)
            with pytest.raises(end(packing, sending)):
                await sending
            await eventually(lambda: landings_at(b) == 0)
            await credits_of(a, 2)
            assert b.num_free == 8
            assert b.transport.stats.expired == 0
            await asyncio.gather(a.send("b", 2, NBYTES), b.take_all(1))

    run_async(scenario())


def test_without_a_held_slot_nothing_is_offered_before_it_is_packed(kind: str) -> None:
    async def scenario() -> None:
        async with network(kind) as net:
            a, b = await net.pair(num_slots=1)
            packing = Packing()
            sending = packing.send(a)
            await asyncio.gather(a.send("b", 2, NBYTES), b.take_all(1))
            assert (b.num_free, landings_at(b)) == (1, 0)
            packing.done.set()
            assert await b.take_all(1) == [1]
            await sending

    run_async(scenario())


def test_without_a_held_slot_patience_may_end_before_the_offer(kind: str) -> None:
    async def scenario() -> None:
        async with network(kind) as net:
            a, b = await net.pair()
            with pytest.raises(TransferTimeoutError, match="not packed in time"):
                await Packing().send(a, 0.1)
            await asyncio.gather(a.send("b", 2, NBYTES), b.take_all(1))
            assert b.transport.stats.malformed == b.transport.stats.strays == 0

    run_async(scenario())


def test_time_in_which_nothing_was_offered_does_not_count(kind: str) -> None:
    async def scenario() -> None:
        async with network(kind) as net:
            a, b = await net.pair(num_slots=1)
            slot = await b.staging.acquire()
            packing = Packing()
            sending = packing.send(a, 0.5)
            await asyncio.sleep(0.35)
            packing.done.set()
            await asyncio.sleep(0.3)
            slot.release()
            assert await b.take_all(1) == [1]
            await sending

    run_async(scenario())


def test_half_of_the_time_is_for_the_payload(kind: str) -> None:
    async def scenario() -> None:
        async with crediting(kind) as (a, b):
            loop = asyncio.get_running_loop()
            packing, began = Packing(), loop.time()
            with pytest.raises(TransferTimeoutError, match="not packed in time"):
                await packing.send(a, 1.0)
            assert 0.5 <= loop.time() - began < 1.0
            await credits_of(a, 2)
            assert b.transport.stats.broken == 0

    run_async(scenario())


def test_a_connection_that_the_offer_breaks_fails_the_piece(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with crediting(kind) as (a, b):
            departures, peer = a.transport._departures, a.transport._peers["b"]
            packing = Packing()
            with monkeypatch.context() as patch:
                patch.setattr(
                    departures, "_post", lambda *_: a.transport._break(peer, "the test says so")
                )
                sending = packing.send(a)
                await eventually(lambda: peer.num_resets > 0)
            await eventually(peer.settled.is_set)
            packing.done.set()
            with pytest.raises(TransferError, match="broke"):
                await sending
            await asyncio.gather(a.send("b", 2, NBYTES), b.take_all(1))
            assert b.transport.stats.strays == 0

    run_async(scenario())


@pytest.mark.parametrize("breaker", ["sender", "receiver"])
def test_a_connection_that_breaks_meanwhile_fails_the_piece(kind: str, breaker: str) -> None:
    async def scenario() -> None:
        async with crediting(kind) as (a, b):
            packing = Packing()
            sending = packing.send(a)
            await eventually(lambda: landings_at(b) == 1)
            node, other = (a, "b") if breaker == "sender" else (b, "a")
            peer = a.transport._peers["b"]
            node.transport._break(node.transport._peers[other], "the test says so")
            await eventually(lambda: peer.num_resets > 0 and peer.settled.is_set())
            packing.done.set()
            with pytest.raises(TransferError, match="broke"):
                await sending
            await asyncio.gather(a.send("b", 2, NBYTES), b.take_all(1))
            await credits_of(a, 2)
            assert b.num_free == 8

    run_async(scenario())


def test_a_payload_never_leaves_in_the_turn_of_its_offer(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns: list[int] = []

    async def scenario() -> None:
        loop, turn = asyncio.get_running_loop(), 0

        def count() -> None:
            nonlocal turn
            turn += 1
            loop.call_soon(count)

        async with crediting(kind) as (a, b):
            post, push = a.transport._post, a.transport._push

            def noting(method: Callable[..., Any]) -> Callable[..., Any]:
                def call(*args: Any) -> Any:
                    turns.append(turn)
                    return method(*args)

                return call

            count()
            with monkeypatch.context() as patch:
                patch.setattr(a.transport, "_push", noting(push))
                patch.setattr(a.transport._departures, "_post", noting(post))
                packing = Packing()
                packing.done.set()
                await asyncio.gather(packing.send(a), b.take_all(1))
                await asyncio.gather(a.send("b", 2, NBYTES), b.take_all(1))

    run_async(scenario())
    offers, payloads = turns[::2], turns[1::2]
    assert len(offers) == len(payloads) == 2
    assert all(payload > offer for offer, payload in zip(offers, payloads, strict=True))


def test_who_is_cancelled_between_offer_and_payload_withdraws(kind: str) -> None:
    async def scenario() -> None:
        async with crediting(kind) as (a, b):
            sending = asyncio.create_task(a.send("b", 1, NBYTES))
            peer = a.transport._peers["b"]
            while peer.credits == 2:  # noqa: ASYNC110 - the very turn counts
                await asyncio.sleep(0)
            sending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sending
            await credits_of(a, 2)
            assert (b.num_free, b.transport.stats.expired) == (8, 0)

    run_async(scenario())
