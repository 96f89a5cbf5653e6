"""Slots that a receiver holds for its peers, so that their pieces wait for no grant."""

import asyncio
from collections.abc import Callable

import pytest

from pagewire.shared.errors import TransferTimeoutError
from pagewire.shared.protocol import encode_header
from pagewire.shared.transfer.departures import Departures
from pagewire.shared.transfer.peer import Landing, Peer
from pagewire.shared.transfer.wire import Offer, Refusal, SessionMessage, encode_message
from pagewire.tests.support.aio import eventually, run_async
from pagewire.tests.support.transfer_child import piece_header
from pagewire.tests.support.transports import PATIENCE_S, crediting, credits_of, network

KIB = 1 << 10

pytestmark = [
    pytest.mark.parametrize("kind", ["loopback", "zmq", "ucx"]),
    pytest.mark.timeout(60),
]


def note_grants(monkeypatch: pytest.MonkeyPatch, granted: list[int]) -> None:
    """From now on, note the pieces for which a sender is granted a slot."""
    on_grant = Departures.on_grant

    def noting(departures: Departures, peer: Peer, seq: int) -> None:
        granted.append(seq)
        on_grant(departures, peer, seq)

    monkeypatch.setattr(Departures, "on_grant", noting)


def test_held_slots_let_the_next_pieces_come_without_a_grant(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    granted: list[int] = []

    async def scenario() -> None:
        async with crediting(kind, 12) as (a, b):
            note_grants(monkeypatch, granted)
            for piece in range(1, 9, 2):
                sends = [a.send("b", piece, 60 * KIB), a.send("b", piece + 1, 7)]
                results = await asyncio.gather(b.take_all(2), *sends)
                assert sorted(results[0]) == [piece, piece + 1]
                await credits_of(a, 2)
            assert granted == []
            assert b.num_free == 12

    run_async(scenario())


@pytest.mark.parametrize("num_slots", [1, 2, 3, 5])
def test_half_of_few_slots_stay_free(kind: str, num_slots: int) -> None:
    async def scenario() -> None:
        async with network(kind) as net:
            a, b = await net.pair(num_slots, 64 * KIB)
            b.transport.hold_slots(num_slots)
            for piece in range(4):
                await asyncio.gather(a.send("b", piece, 1000), b.take_all(1))
                assert 2 * b.staging.num_free >= num_slots

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
        async with crediting(kind) as (a, b):
            b.transport._break(b.transport._peers["a"], "the test says so")
            assert b.staging.num_free == 8
            await credits_of(a, 0)
            await asyncio.gather(a.send("b", 1, 1000), b.take_all(1))
            await credits_of(a, 2)

    run_async(scenario())


@pytest.mark.parametrize("breaker", ["receiver", "sender"])
def test_what_comes_late_from_an_earlier_connection_neither_gives_nor_takes_a_credit(
    kind: str, breaker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    early: dict[str, bytes] = {}

    def watching(post: Callable[[Peer, SessionMessage], None]) -> Callable[..., None]:
        def watched(peer: Peer, message: SessionMessage) -> None:
            early[type(message).__name__] = encode_message(message)
            post(peer, message)

        return watched

    async def scenario() -> None:
        async with network(kind) as net:
            a, b = await net.pair(8, 64 * KIB)
            b.transport.hold_slots(2)
            for half in (a.transport._departures, b.transport._arrivals):
                monkeypatch.setattr(half, "_post", watching(half._post))
            for piece in range(2):
                await asyncio.gather(a.send("b", piece, 1000), b.take_all(1))
                await credits_of(a, 2)
            broken, peer = (a, "b") if breaker == "sender" else (b, "a")
            broken.transport._break(broken.transport._peers[peer], "the test says so")
            await credits_of(a, 0)
            monkeypatch.undo()
            await asyncio.gather(a.send("b", 2, 1000), b.take_all(1))
            await credits_of(a, 2)
            a.transport._on_message(early["Credit"])
            b.transport._on_message(early["Offer"])
            assert a.transport._peers["b"].credits == 2 == b.transport.num_held
            assert not b.transport._peers["a"].landings

    run_async(scenario())


def test_no_credit_is_spent_on_a_piece_whose_time_is_over(kind: str) -> None:
    async def scenario() -> None:
        async with crediting(kind, slot_bytes=16 * KIB * KIB) as (a, b):
            with pytest.raises(TransferTimeoutError, match="took no piece in time"):
                await a.send("b", 1, 16 * KIB * KIB, timeout=0)
            await asyncio.gather(a.send("b", 2, 1000), b.take_all(1))
            assert a.transport.stats.broken == 0

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
        async with crediting(kind) as (a, b):
            peer = a.transport._peers["b"]
            a.transport._post(peer, Offer(peer.out, 1, 1000, b"garbage", peer.channel))
            await eventually(lambda: b.transport.stats.malformed == 1)
            assert b.num_free == 8
            assert b.transport.num_held == 2  # another one in its place
            await asyncio.gather(a.send("b", 2, 1000), b.take_all(1))

    run_async(scenario())


def test_slots_that_come_free_are_held_for_those_who_have_too_few(kind: str) -> None:
    async def scenario() -> None:
        async with network(kind) as net:
            a, b = await net.pair(4, 64 * KIB)
            b.transport.hold_slots(2)
            taken = []
            for number in range(3):  # more than half
                _, piece = await asyncio.gather(a.send("b", number, 1000), b.take())
                taken.append(piece)
            await credits_of(a, 0)
            for piece in taken:
                piece.slot.release()
            await credits_of(a, 2)
            assert b.transport.num_held == 2

    run_async(scenario())


def test_a_piece_by_credit_that_never_comes_costs_no_held_slot(kind: str) -> None:
    async def scenario() -> None:
        async with crediting(kind) as (a, b):
            peer = a.transport._peers["b"]
            header = encode_header(piece_header(1, 1000))
            a.transport._post(peer, Offer(peer.out, 1, 1, header, peer.channel))
            await eventually(lambda: b.transport.stats.expired == 1)
            assert b.transport.num_held == 2

    run_async(scenario())


def test_a_payload_on_its_way_is_let_in_before_the_next_slot_is_held(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    async def scenario() -> None:
        async with crediting(kind) as (a, b):
            arrivals = b.transport._arrivals
            claim, post = arrivals.claim, arrivals._post

            def claiming(peer: Peer, seq: int, nbytes: int) -> Landing | None:
                events.append("payload")
                return claim(peer, seq, nbytes)

            def posting(peer: Peer, message: SessionMessage) -> None:
                events.append(type(message).__name__)
                post(peer, message)

            monkeypatch.setattr(arrivals, "claim", claiming)
            monkeypatch.setattr(arrivals, "_post", posting)
            await asyncio.gather(a.send("b", 1, 1000), b.take_all(1))
            await credits_of(a, 2)

    run_async(scenario())
    assert events == ["payload", "Credit"]


def test_to_refuse_a_piece_by_credit_may_break_the_connection(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        failures: list[str] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: failures.append(str(context)))
        async with crediting(kind) as (a, b):
            arrivals = b.transport._arrivals
            post = arrivals._post

            def posting(peer: Peer, message: SessionMessage) -> None:
                if isinstance(message, Refusal):  # as carriers do that cannot send
                    b.transport._break(peer, "the test says so")
                post(peer, message)

            monkeypatch.setattr(arrivals, "_post", posting)
            peer = a.transport._peers["b"]
            a.transport._post(peer, Offer(peer.out, 1, 1000, b"garbage", peer.channel))
            await eventually(lambda: b.transport.stats.broken == 1)
            await credits_of(a, 0)
            await asyncio.gather(a.send("b", 2, 1000), b.take_all(1))
            assert failures == []

    run_async(scenario())


def test_a_payload_of_another_length_costs_no_held_slot(kind: str) -> None:
    async def scenario() -> None:
        async with crediting(kind) as (a, b):
            peer = b.transport._peers["a"]
            header = encode_header(piece_header(1, 1000))
            out = a.transport._peers["b"]
            a.transport._post(out, Offer(out.out, 1, 1000, header, out.channel))
            await eventually(lambda: 1 in peer.landings)
            assert b.transport._arrivals.claim(peer, 1, 999) is None
            assert b.transport.num_held == 2

    run_async(scenario())


def test_who_has_long_been_idle_takes_no_slots_from_who_sends(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    granted: list[int] = []

    async def scenario() -> None:
        async with network(kind) as net:
            receiver = await net.open("receiver", 8)
            receiver.transport.hold_slots(2)  # of which three peers cannot have two each
            senders = [await net.open(name) for name in ("busy", "idle", "idler")]
            for node in senders:
                name = node.transport.worker_id
                await node.transport.connect("receiver", receiver.address, PATIENCE_S)
                await receiver.transport.connect(name, node.address, PATIENCE_S)
                await asyncio.gather(node.send("receiver", 0, 1000), receiver.take_all(1))
            busy = senders[0]
            note_grants(monkeypatch, granted)
            for number in range(10):
                await eventually(lambda: busy.transport._peers["receiver"].credits > 0)
                await asyncio.gather(busy.send("receiver", number, 1000), receiver.take_all(1))

    run_async(scenario())
    assert granted == []


def test_a_slot_that_comes_free_is_held_for_who_sent_last(kind: str) -> None:
    async def scenario() -> None:
        async with network(kind) as net:
            receiver = await net.open("receiver", 4)
            receiver.transport.hold_slots(1)
            taken = [await receiver.staging.acquire() for _ in range(2)]  # none can be held
            credits = {}
            for name in ("idle", "busy"):
                node = await net.open(name)
                await node.transport.connect("receiver", receiver.address, PATIENCE_S)
                await receiver.transport.connect(name, node.address, PATIENCE_S)
                await asyncio.gather(node.send("receiver", 0, 1000), receiver.take_all(1))
                credits[name] = node.transport._peers["receiver"]
            await asyncio.sleep(0.05)  # what the last slot's coming free has asked for
            taken.pop().release()
            await eventually(lambda: receiver.transport.num_held == 1)
            await eventually(lambda: credits["busy"].credits == 1)
            assert credits["idle"].credits == 0
            taken.pop().release()

    run_async(scenario())
