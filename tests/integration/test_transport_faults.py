"""KV transports when payloads are lost, stall or are damaged, and when processes die or hang."""

import asyncio
import signal
import time

import pytest
import torch

from pagewire.shared.errors import TransferError, TransferTimeoutError
from pagewire.shared.transfer.loopback import Fault
from pagewire.tests.support.aio import eventually, run_async
from pagewire.tests.support.transfer_child import TOTAL_BYTES, piece_bytes
from pagewire.tests.support.transfer_parent import child_of
from pagewire.tests.support.transports import PATIENCE_S, Network, Node, network

MIB = 1 << 20
PIECE_BYTES = 4 * MIB

pytestmark = pytest.mark.timeout(90)
across_processes = pytest.mark.parametrize("kind", ["zmq", "ucx"])


async def parent_of(net: Network) -> Node:
    return await net.open("parent", 4, PIECE_BYTES)


@across_processes
def test_pieces_of_another_process(kind: str) -> None:
    async def scenario() -> None:
        async with network(kind) as net:
            node = await parent_of(net)
            async with child_of(node, "send") as child:
                count = TOTAL_BYTES // PIECE_BYTES
                assert sorted(await node.take_all(count)) == list(range(count))
                child.tell("done")
                assert await child.exit_code() == 0

    run_async(scenario(), timeout=60)


@across_processes
def test_sender_killed_in_mid_transfer(kind: str) -> None:
    async def scenario() -> None:
        async with network(kind) as net:
            node = await parent_of(net)
            for _ in range(2):  # restarted under the same name, and killed again
                async with child_of(node, "flood") as child:
                    for _ in range(6):
                        piece = await node.transport.recv()
                        piece.slot.release()
                    held = await node.transport.recv()
                    await child.kill()
                    await asyncio.sleep(0.1)
                    started = time.monotonic()
                    await node.transport.disconnect("child")
                    assert time.monotonic() - started < 2
                    assert node.num_free == node.staging.num_slots - 1
                    held.slot.release()
            node.staging.check_integrity(all_free=True)

    run_async(scenario(), timeout=60)


@across_processes
def test_receiver_killed_in_mid_transfer(kind: str) -> None:
    async def scenario() -> None:
        async with network(kind) as net:
            node = await parent_of(net)
            async with child_of(node, "receive") as child:
                await node.send("child", 0, PIECE_BYTES)
                sends = [
                    asyncio.create_task(node.send("child", i, PIECE_BYTES, timeout=5))
                    for i in range(8)
                ]
                await asyncio.wait(sends, return_when=asyncio.FIRST_COMPLETED)
                await child.kill()
                started = time.monotonic()
                await node.transport.disconnect("child")
                await asyncio.wait(sends)
                assert time.monotonic() - started < 2
                errors = [task.exception() for task in sends]
                assert all(e is None or isinstance(e, TransferError) for e in errors)

    run_async(scenario(), timeout=60)


@across_processes
def test_death_of_one_peer_does_not_disturb_another(kind: str) -> None:
    async def scenario() -> None:
        async with network(kind) as net:
            node, other = await parent_of(net), await net.open("other", 2, PIECE_BYTES)
            await other.transport.connect("parent", node.address, PATIENCE_S)
            await node.transport.connect("other", other.address, PATIENCE_S)
            async with child_of(node, "flood") as child:
                (await node.transport.recv()).slot.release()
                await child.kill()
            # Nobody has told the node yet; slots granted to the dead may be among the four.
            await asyncio.gather(node.send("other", 7, PIECE_BYTES), other.take_all(1))
            await node.transport.disconnect("child")
            while node.num_free < node.staging.num_slots:
                (await node.transport.recv()).slot.release()
            await asyncio.gather(other.send("parent", 8, PIECE_BYTES), node.take_all(1))

    run_async(scenario(), timeout=60)


@across_processes
def test_hanging_receiver_ends_no_send_late_and_recovers(kind: str) -> None:
    """Whether it stops before or after its grant: a send ends in time, and later ones succeed."""

    async def scenario() -> None:
        async with network(kind) as net:
            node = await parent_of(net)
            async with child_of(node, "receive") as child:
                await node.send("child", 0, PIECE_BYTES)
                sends = [
                    asyncio.create_task(node.send("child", i, PIECE_BYTES, timeout=0.5))
                    for i in range(8)
                ]
                await asyncio.sleep(0.005)
                child.process.send_signal(signal.SIGSTOP)
                started = time.monotonic()
                await asyncio.wait(sends)
                assert time.monotonic() - started < 1.5
                errors = [task.exception() for task in sends]
                assert all(e is None or isinstance(e, TransferError) for e in errors)
                child.process.send_signal(signal.SIGCONT)
                for _ in range(4):
                    await node.send("child", 9, PIECE_BYTES)

    run_async(scenario(), timeout=60)


def test_stalled_payload_breaks_the_connection_which_recovers() -> None:
    async def scenario() -> None:
        async with network("loopback") as net:
            a, b = await net.pair()
            net.hub.faults[0] = Fault(delay_s=60)
            with pytest.raises(TransferTimeoutError, match="the payload to 'b' stalled"):
                await a.send("b", 0, 1000, timeout=0.2)
            await asyncio.gather(a.send("b", 1, 1000), b.take_all(1))
            await asyncio.gather(b.send("a", 2, 1000), a.take_all(1))
            assert a.transport.stats.broken == 1
            await eventually(lambda: b.num_free == 4)

    run_async(scenario())


def test_cancelled_send_of_a_moving_payload_lets_it_arrive() -> None:
    async def scenario() -> None:
        async with network("loopback") as net:
            a, b = await net.pair()
            net.hub.faults[0] = Fault(delay_s=0.3)
            sending = asyncio.create_task(a.send("b", 0, 1000))
            await eventually(lambda: net.hub.num_payloads == 1)
            sending.cancel()
            await asyncio.wait({sending})
            assert sending.cancelled()
            assert await b.take_all(1) == [0]  # whole, though its memory has been overwritten
            assert a.transport.stats.broken == 0

    run_async(scenario())


def test_slot_of_a_lost_payload_comes_back() -> None:
    async def scenario() -> None:
        async with network("loopback") as net:
            a, b = await net.pair(1)
            net.hub.faults[0] = Fault(drop=True)
            await a.send("b", 0, 1000, timeout=0.2)  # for all that the sender knows, it left
            assert b.num_free == 0
            sending = asyncio.create_task(a.send("b", 1, 1000))
            assert await b.take_all(1) == [1]
            await sending
            assert b.transport.stats.expired == 1

    run_async(scenario())


def test_doubled_payload_arrives_once() -> None:
    async def scenario() -> None:
        async with network("loopback") as net:
            a, b = await net.pair()
            net.hub.faults[0] = Fault(copies=2)
            await a.send("b", 0, 1000)
            await a.send("b", 1, 1000)
            assert await b.take_all(2) == [0, 1]
            assert b.transport.stats.strays == 1
            assert b.num_free == 4

    run_async(scenario())


def test_damaged_byte_is_for_the_receiver_to_find() -> None:
    async def scenario() -> None:
        async with network("loopback") as net:
            a, b = await net.pair()
            net.hub.faults[0] = Fault(corrupt_byte=500)
            await a.send("b", 0, 1000)
            piece = await b.transport.recv()
            wrong = torch.nonzero(piece.slot.buffer[:1000] != piece_bytes(0, 1000))
            assert wrong.tolist() == [[500]]
            piece.slot.release()

    run_async(scenario())


def test_later_pieces_overtake_a_delayed_one() -> None:
    async def scenario() -> None:
        async with network("loopback") as net:
            a, b = await net.pair()
            net.hub.faults[0] = Fault(delay_s=0.2)
            sends = [asyncio.create_task(a.send("b", i, 1000)) for i in range(3)]
            assert await b.take_all(3) == [1, 2, 0]
            await asyncio.gather(*sends)

    run_async(scenario())
