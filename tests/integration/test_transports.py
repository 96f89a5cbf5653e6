"""What all KV transports have in common; each test runs on each of them."""

import asyncio

import msgspec
import pytest
import torch

from pagewire.shared.errors import TransferError, TransferTimeoutError
from pagewire.shared.transfer.wire import decode_address, encode_address
from pagewire.tests.support.aio import eventually, run_async
from pagewire.tests.support.transfer_child import piece_bytes, piece_header
from pagewire.tests.support.transports import KINDS, PATIENCE_S, network

KIB, MIB = 1 << 10, 1 << 20

pytestmark = [pytest.mark.parametrize("kind", KINDS), pytest.mark.timeout(60)]


@pytest.mark.parametrize(
    ("nbytes", "slot_bytes"),
    [(1, MIB), (4, MIB), (64 * KIB, MIB), (MIB, MIB), (16 * MIB, 16 * MIB), (MIB + 1, 2 * MIB)],
    ids=["1B", "4B", "64KiB", "whole slot", "16MiB", "odd"],
)
def test_piece_arrives_with_its_header(kind: str, nbytes: int, slot_bytes: int) -> None:
    async def scenario() -> None:
        async with network(kind) as net:
            a, b = await net.pair(2, slot_bytes)
            for piece in range(3):
                sending = asyncio.create_task(a.send("b", piece, nbytes))
                received = await b.take()
                await sending
                assert received.peer_id == "a"
                assert received.header.piece == piece
                received.slot.release()

    run_async(scenario())


def test_pieces_of_all_sizes_at_once_keep_their_headers(kind: str) -> None:
    sizes = [1, 100 * KIB, 5, MIB, 8191, 8192, 8193, 3 * MIB, 2, 64 * KIB]

    async def scenario() -> None:
        async with network(kind) as net:
            a, b = await net.pair(len(sizes) + 2, 3 * MIB)  # two may be held for later pieces
            sends = asyncio.gather(*(a.send("b", i, n) for i, n in enumerate(sizes)))
            received = [await b.take() for _ in sizes]
            await sends
            assert sorted((r.header.piece, r.header.nbytes) for r in received) == list(
                enumerate(sizes)
            )
            for piece in received:
                piece.slot.release()

    run_async(scenario())


def test_many_pieces_in_flight_in_both_directions(kind: str) -> None:
    count = 48

    async def scenario() -> None:
        async with network(kind) as net:
            a, b = await net.pair(3, 256 * KIB)
            sends = [a.send("b", i, 256 * KIB) for i in range(count)]
            sends += [b.send("a", i, 200 * KIB) for i in range(count)]
            results = await asyncio.gather(a.take_all(count), b.take_all(count), *sends)
            assert sorted(results[0]) == sorted(results[1]) == list(range(count))

    run_async(scenario())


def test_several_senders_share_few_slots(kind: str) -> None:
    async def scenario() -> None:
        async with network(kind) as net:
            sink = await net.open("sink", num_slots=2)
            sources = []
            for number in range(3):
                source = await net.open(f"source {number}")
                await source.transport.connect("sink", sink.address, PATIENCE_S)
                await sink.transport.connect(f"source {number}", source.address, PATIENCE_S)
                sources.append(source)
            sends = asyncio.gather(
                *(s.send("sink", 100 * n + i, 999) for n, s in enumerate(sources) for i in range(8))
            )
            await asyncio.sleep(0.3)  # all of them are in line now
            arrived = await sink.take_all(24)
            await sends
            for number in range(3):
                mine = [piece for piece in arrived if piece // 100 == number]
                assert len(mine) == 8
                # Nobody waits until another has sent all of theirs.
                assert arrived.index(mine[-1]) > 12

    run_async(scenario())


@pytest.mark.parametrize("num_slots", [1, 2])
def test_sender_waits_for_a_free_slot(kind: str, num_slots: int) -> None:
    async def scenario() -> None:
        async with network(kind) as net:
            a, b = await net.pair(num_slots)
            sends = [asyncio.create_task(a.send("b", i, 60_000)) for i in range(10)]
            held = [await b.take() for _ in range(num_slots)]
            await asyncio.sleep(0.2)
            assert b.num_free == 0
            assert sum(task.done() for task in sends) == num_slots
            numbers = [piece.header.piece for piece in held]
            for piece in held:
                piece.slot.release()
            numbers += await b.take_all(10 - num_slots)
            await asyncio.gather(*sends)
            assert sorted(numbers) == list(range(10))

    run_async(scenario())


@pytest.mark.parametrize("end", ["time-out", "cancellation"])
def test_send_given_up_in_line_does_no_harm(kind: str, end: str) -> None:
    async def scenario() -> None:
        async with network(kind) as net:
            a, b = await net.pair(1)
            await a.send("b", 0, 1000)
            if end == "time-out":
                with pytest.raises(TransferTimeoutError, match="'b' took no piece in time"):
                    await a.send("b", 1, 1000, timeout=0.2)
            else:
                sending = asyncio.create_task(a.send("b", 1, 1000))
                await asyncio.sleep(0.2)
                sending.cancel()
                await asyncio.wait({sending})
                assert sending.cancelled()
            waiting = asyncio.create_task(a.send("b", 2, 1000))
            assert await b.take_all(2) == [0, 2]
            await waiting
            assert b.transport.stats.strays == b.transport.stats.malformed == 0

    run_async(scenario())


def test_nothing_is_sent_before_both_sides_have_connected(kind: str) -> None:
    async def scenario() -> None:
        async with network(kind) as net:
            a, b = await net.open("a"), await net.open("b")
            await a.transport.connect("b", b.address, PATIENCE_S)
            with pytest.raises(TransferTimeoutError):
                await a.send("b", 0, 1000, timeout=0.2)
            early = asyncio.create_task(a.send("b", 1, 1000))
            await asyncio.sleep(0.1)
            await b.transport.connect("a", a.address, PATIENCE_S)
            assert await b.take_all(1) == [1]
            await early

    run_async(scenario())


@pytest.mark.parametrize("who", ["receiver", "sender"])
def test_disconnect_ends_sends_and_frees_slots(kind: str, who: str) -> None:
    async def scenario() -> None:
        async with network(kind) as net:
            a, b = await net.pair(3, 2 * MIB)
            sends = [asyncio.create_task(a.send("b", i, 2 * MIB)) for i in range(12)]
            held = await b.take()
            if who == "receiver":
                await b.transport.disconnect("a")
                assert b.num_free == 2  # all but ours
            else:
                await a.transport.disconnect("b")
            await asyncio.wait(sends, timeout=5)
            outcomes = [task.exception() for task in sends if task.done()]
            assert len(outcomes) == 12
            assert any(isinstance(error, TransferError) for error in outcomes)
            assert all(error is None or isinstance(error, TransferError) for error in outcomes)
            held.slot.release()
            await b.transport.disconnect("a")
            await eventually(lambda: b.num_free == 3)

    run_async(scenario())


def test_disconnect_of_an_unknown_peer_is_fine(kind: str) -> None:
    async def scenario() -> None:
        async with network(kind) as net:
            a = await net.open("a")
            await a.transport.disconnect("nobody")
            with pytest.raises(TransferError, match="no peer 'nobody'"):
                await a.send("nobody", 0, 1000)

    run_async(scenario())


def test_restarted_peer_takes_the_place_of_its_predecessor(kind: str) -> None:
    async def scenario() -> None:
        async with network(kind) as net:
            a, old = await net.pair(2, MIB)
            await old.send("a", 0, MIB)  # nobody takes it before the restart
            await old.transport.close()
            new = await net.open("b", 2, MIB)
            await asyncio.gather(
                a.transport.connect("b", new.address, PATIENCE_S),
                new.transport.connect("a", a.address, PATIENCE_S),
            )
            for piece in (1, 2):
                await asyncio.gather(a.send("b", piece, MIB), new.send("a", -piece + 9, MIB))
                assert await new.take_all(1) == [piece]
                assert await a.take_all(1) == [-piece + 9]

    run_async(scenario())


@pytest.mark.parametrize("who", ["one side", "both sides", "one side again and again"])
def test_reconnecting_to_the_same_peer(kind: str, who: str) -> None:
    async def scenario() -> None:
        async with network(kind) as net:
            a, b = await net.pair(2, MIB)
            for turn in range(3):
                if turn % 2 == 0:  # connect replaces; disconnecting before is the same
                    await a.transport.disconnect("b")
                for _ in range(3 if who.endswith("again") else 1):
                    await a.transport.connect("b", b.address, PATIENCE_S)
                if who == "both sides":
                    await b.transport.connect("a", a.address, PATIENCE_S)
                await asyncio.gather(a.send("b", turn, MIB), b.take_all(1))
                await asyncio.gather(b.send("a", turn, MIB), a.take_all(1))

    run_async(scenario())


def test_wrong_sizes_are_refused(kind: str) -> None:
    async def scenario() -> None:
        async with network(kind) as net:
            a, b = await net.pair(1, 1000)
            with pytest.raises(TransferError, match="header says 5 bytes, the payload is 6"):
                await a.transport.send("b", piece_header(0, 5), piece_bytes(0, 6), PATIENCE_S)
            with pytest.raises(TransferError, match="header says 0 bytes"):
                await a.transport.send("b", piece_header(0, 0), piece_bytes(0, 0), PATIENCE_S)
            floats = torch.zeros(10)
            with pytest.raises(TransferError, match=r"torch\.float32"):
                await a.transport.send("b", piece_header(0, 40), floats, PATIENCE_S)
            with pytest.raises(TransferError, match="1001 bytes do not fit a slot of 1000"):
                await a.send("b", 0, 1001)
            await a.send("b", 1, 1000)
            assert await b.take_all(1) == [1]

    run_async(scenario())


def test_large_header_crosses(kind: str) -> None:
    async def scenario() -> None:
        async with network(kind) as net:
            a, b = await net.pair()
            numbers = [2**39 - i for i in range(4096)]
            header = msgspec.structs.replace(piece_header(0, 10), positions=numbers)
            await a.transport.send("b", header, piece_bytes(0, 10), PATIENCE_S)
            piece = await b.transport.recv()
            assert piece.header == header
            piece.slot.release()

    run_async(scenario())


def test_bad_addresses_are_refused(kind: str) -> None:
    async def scenario() -> None:
        async with network(kind) as net:
            a, b = await net.pair()
            name = a.transport.name
            good = decode_address(b.address, name)
            bad = {
                b"": "not a transport address",
                b"\xff garbage": "not a transport address",
                b"\x94\xa1\xff": "not a transport address",
                b.address[:-1]: "not a transport address",
                b.address[:-1] + bytes([b.address[-1] ^ 1]): "damaged",
                encode_address("other", good.nonce, good.endpoint): "one of 'other'",
                a.address: "its own|this transport's own",
            }
            for address, message in bad.items():
                with pytest.raises(TransferError, match=message):
                    await a.transport.connect("x", address, PATIENCE_S)
            await a.send("b", 1, 100)
            assert await b.take_all(1) == [1]

    run_async(scenario())


def test_malformed_messages_are_dropped_and_counted(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    garbage = [b"", b"\x00", b"garbage" * 100, b"\x93\xa5Grant\x01\xff", b"\xdd\xff\xff\xff\xff"]

    async def scenario() -> None:
        async with network(kind) as net:
            a, b = await net.pair()
            for data in garbage:
                b.transport._on_message(data)
            assert b.transport.stats.malformed == len(garbage)
            await a.send("b", 1, 100)
            assert await b.take_all(1) == [1]

    run_async(scenario())
    assert len([r for r in caplog.records if "malformed" in r.message]) == 1  # the others: debug


def test_header_that_makes_no_sense_is_refused_at_once(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with network(kind) as net:
            a, b = await net.pair()
            with monkeypatch.context() as patch:
                patch.setattr(
                    "pagewire.shared.transfer.departures.encode_header", lambda header: b"nonsense"
                )
                with pytest.raises(
                    TransferError, match="'b' refused the piece: not a piece header"
                ):
                    await a.send("b", 0, 1000)
            await a.send("b", 1, 100)
            assert await b.take_all(1) == [1]
            assert b.transport.stats.malformed == 1

    run_async(scenario())
