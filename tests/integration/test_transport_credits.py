"""Slots that a receiver holds for its peers, so that their pieces wait for no grant."""

import asyncio

import pytest

from pagewire.shared.transfer.departures import Departures
from pagewire.shared.transfer.peer import Peer
from pagewire.shared.transfer.wire import Offer
from pagewire.tests.support.aio import eventually, run_async
from pagewire.tests.support.transports import Node, network

KIB = 1 << 10

pytestmark = [
    pytest.mark.parametrize("kind", ["loopback", "zmq", "ucx"]),
    pytest.mark.timeout(60),
]


async def credits_of(sender: Node, count: int) -> None:
    peer = sender.transport._peers["b"]
    await eventually(lambda: peer.credits == count)


def test_held_slots_let_the_next_pieces_come_without_a_grant(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    granted = []
    on_grant = Departures.on_grant

    def counting(departures: Departures, peer: Peer, seq: int) -> None:
        granted.append(seq)
        on_grant(departures, peer, seq)

    async def scenario() -> None:
        async with network(kind) as net:
            a, b = await net.pair(12, 64 * KIB)
            b.transport.hold_slots(2)
            await asyncio.gather(a.send("b", 0, 1000), b.take_all(1))
            await credits_of(a, 2)
            monkeypatch.setattr(Departures, "on_grant", counting)
            for piece in range(1, 9, 2):
                sends = [a.send("b", piece, 60 * KIB), a.send("b", piece + 1, 7)]
                results = await asyncio.gather(b.take_all(2), *sends)
                assert sorted(results[0]) == [piece, piece + 1]
                await credits_of(a, 2)
            assert granted == []
            assert b.num_free == 12

    run_async(scenario())


def test_slots_are_held_only_while_half_of_all_are_free(kind: str) -> None:
    async def scenario() -> None:
        async with network(kind) as net:
            a, b = await net.pair(4, 64 * KIB)
            b.transport.hold_slots(4)
            await asyncio.gather(*(a.send("b", piece, 1000) for piece in range(2)))
            taken = [await b.take() for _ in range(2)]
            for piece in taken:
                piece.slot.release()
            for number in range(2, 6):
                await asyncio.gather(a.send("b", number, 1000), b.take_all(1))
                assert b.staging.num_free >= 2
            assert 1 <= b.transport.num_held <= 2
            await b.transport.disconnect("a")
            assert b.staging.num_free == 4

    run_async(scenario())


def test_a_broken_connection_forgets_credits_and_held_slots(kind: str) -> None:
    async def scenario() -> None:
        async with network(kind) as net:
            a, b = await net.pair(8, 64 * KIB)
            b.transport.hold_slots(2)
            await asyncio.gather(a.send("b", 0, 1000), b.take_all(1))
            await credits_of(a, 2)
            b.transport._break(b.transport._peers["a"], "the test says so")
            assert b.staging.num_free == 8
            await credits_of(a, 0)
            await asyncio.gather(a.send("b", 1, 1000), b.take_all(1))
            await credits_of(a, 2)

    run_async(scenario())


def test_a_piece_by_credit_that_nobody_gave_is_dropped(kind: str) -> None:
    async def scenario() -> None:
        async with network(kind) as net:
            a, b = await net.pair(8, 64 * KIB)
            a.transport._peers["b"].credits = 1
            await a.send("b", 0, 1000)
            await eventually(lambda: b.transport.stats.malformed and b.transport.stats.strays)
            await asyncio.gather(a.send("b", 1, 1000), b.take_all(1))
            assert b.staging.num_free == 8 - b.transport.num_held

    run_async(scenario())


def test_a_piece_by_credit_that_makes_no_sense_frees_its_slot(kind: str) -> None:
    async def scenario() -> None:
        async with network(kind) as net:
            a, b = await net.pair(8, 64 * KIB)
            b.transport.hold_slots(2)
            await asyncio.gather(a.send("b", 0, 1000), b.take_all(1))
            await credits_of(a, 2)
            peer = a.transport._peers["b"]
            a.transport._post(peer, Offer(peer.out, 1, 1000, b"garbage", by_credit=True))
            await eventually(lambda: b.transport.stats.malformed == 1)
            assert b.num_free == 8
            await asyncio.gather(a.send("b", 2, 1000), b.take_all(1))

    run_async(scenario())
