"""What is particular to one KV transport or another, and the choice between them."""

import asyncio
import contextlib
import os
import sys
from typing import Any

import pytest
import torch
import zmq

from pagewire.shared.channel_auth import ClusterKeys
from pagewire.shared.errors import ConfigError, TransferError
from pagewire.shared.transfer import (
    StagingPool,
    create_transport,
    ucx_port,
)
from pagewire.shared.kv.carriers.ucx_port import UcxPort
from pagewire.shared.kv.carriers.ucx_settings import ucx_settings
from pagewire.shared.transfer.wire import (
    Bye,
    Grant,
    Hello,
    Offer,
    Payload,
    decode_address,
    encode_message,
)
from pagewire.shared.transfer.zmq import ZmqTransport
from pagewire.tests.support.aio import eventually, run_async
from pagewire.tests.support.transports import PATIENCE_S, Node, network

pytestmark = pytest.mark.timeout(60)

GARBAGE = [
    b"",
    b"garbage",
    os.urandom(5000),
    b"\x92\xa1\xff\x01",  # msgpack, but its tag is no UTF-8
    encode_message(Hello(b"x" * 16, b"y" * 16, 1, 0, 1)),  # for another incarnation
    encode_message(Offer(12345, 1, 1000, b"header")),  # on a channel that nobody has
    encode_message(Grant(12345, 1)),
    encode_message(Bye(12345)),
    encode_message(Payload(12345, 1)),
]


def endpoint_of(node: Node) -> bytes:
    return decode_address(node.address, node.transport.name).endpoint


async def assert_works(a: Node, b: Node) -> None:
    for piece in range(2):
        await asyncio.gather(a.send("b", piece, 50_000), b.take_all(1))
        await asyncio.gather(b.send("a", piece, 50_000), a.take_all(1))


def test_zmq_survives_garbage_of_members_of_the_cluster() -> None:
    async def scenario() -> None:
        async with network("zmq") as net:
            a, b = await net.pair()
            context = zmq.Context()
            stranger = context.socket(zmq.DEALER)
            stranger.linger = 1000
            stranger.connect(endpoint_of(b).decode())
            for data in GARBAGE:
                stranger.send(data)
                stranger.send_multipart([data, b"payload"])
                stranger.send_multipart([b"", data, b"payload", b"more"])
            stranger.send(b"x" * (1 << 20))  # more than any message may have: cut off by libzmq
            stats = b.transport.stats
            await eventually(lambda: stats.malformed >= 2 * len(GARBAGE))
            await assert_works(a, b)
            stranger.close(linger=0)
            context.term()

    run_async(scenario())


def test_zmq_survives_bytes_that_are_no_zeromq() -> None:
    async def scenario() -> None:
        async with network("zmq-curve") as net:
            a, b = await net.pair()
            port = int(endpoint_of(b).decode().rsplit(":", 1)[1])
            for data in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), b"\xff" * 10):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(data)
                await asyncio.sleep(0.02)
                writer.close()
                with contextlib.suppress(ConnectionError):  # cut off, as it should be
                    await writer.wait_closed()
            await assert_works(a, b)

    run_async(scenario())


@pytest.mark.parametrize("key", ["none", "another"])
def test_zmq_stranger_gets_nothing_in(key: str) -> None:
    async def scenario() -> None:
        async with network("zmq-curve") as net:
            a, b = await net.pair()
            context = zmq.Context()
            stranger = context.socket(zmq.DEALER)
            stranger.linger = 0
            if key == "another":
                own_public, own_secret = zmq.curve_keypair()
                stranger.curve_publickey, stranger.curve_secretkey = own_public, own_secret
                stranger.curve_serverkey = ClusterKeys.derive("the cluster's secret").public
            stranger.connect(endpoint_of(b).decode())
            for data in GARBAGE:
                stranger.send(data)
            await asyncio.sleep(0.3)
            await assert_works(a, b)
            assert b.transport.stats.malformed == b.transport.stats.strays == 0
            stranger.close()
            context.term()

    run_async(scenario())


@pytest.mark.parametrize("ours", ["none", "other secret"])
def test_zmq_transport_of_another_cluster_cannot_connect(ours: str) -> None:
    async def scenario() -> None:
        async with network("zmq-curve") as net:
            a, _ = await net.pair()
            staging = StagingPool(1, 1000, torch.device("cpu"))
            keys = None if ours == "none" else ClusterKeys.derive("another secret")
            intruder = Node(ZmqTransport("intruder", staging, keys=keys), staging)
            net.nodes.append(intruder)
            await intruder.transport.start(PATIENCE_S)
            said = r"cluster secret the same|did not answer|not belong to this cluster"
            with pytest.raises(TransferError, match=said):
                await intruder.transport.connect("a", a.address, 2.0)

    run_async(scenario())


def test_zmq_connect_tells_when_nobody_listens() -> None:
    async def scenario() -> None:
        async with network("zmq") as net:
            a, b = await net.pair()
            await b.transport.close()
            with pytest.raises(TransferError, match=r"nobody listens there$"):
                await a.transport.connect("b", b.address, PATIENCE_S)

    run_async(scenario())


def test_zmq_notices_the_loss_of_a_peer() -> None:
    async def scenario() -> None:
        async with network("zmq") as net:
            a, b = await net.pair()
            await assert_works(a, b)
            await b.transport.close()
            with pytest.raises(TransferError, match="'b'"):
                await a.send("b", 0, 1000, timeout=PATIENCE_S)

    run_async(scenario(), timeout=5)


@pytest.mark.parametrize("host", ["203.0.113.1", "no such host"])
def test_zmq_host_that_is_not_ours(host: str) -> None:
    async def scenario() -> None:
        staging = StagingPool(1, 1000, torch.device("cpu"))
        transport = ZmqTransport("a", staging, host=host)
        with pytest.raises(ConfigError, match="PAGEWIRE_HOST"):
            await transport.start(PATIENCE_S)
        await transport.close()

    run_async(scenario())


def test_zmq_listens_everywhere_and_is_reached_by_the_name_it_announces() -> None:
    everywhere = "0.0.0.0"  # noqa: S104 - that is the test

    async def scenario() -> None:
        async with network("zmq") as net:
            staging = StagingPool(4, 1 << 16, torch.device("cpu"))
            named = ZmqTransport("a", staging, host=everywhere, advertise_host="localhost")
            a, b = Node(named, staging), await net.open("b")
            net.nodes.append(a)
            a.address = await named.start(PATIENCE_S)
            assert endpoint_of(a).startswith(b"tcp://localhost:")
            await b.transport.connect("a", a.address, PATIENCE_S)
            await a.transport.connect("b", b.address, PATIENCE_S)
            await assert_works(a, b)

    run_async(scenario())


def test_ucx_survives_garbage() -> None:
    arrived: list[tuple[int, int]] = []

    async def flood(port: UcxPort, target: Node) -> None:
        endpoint = port.open_endpoint(endpoint_of(target), lambda: None)
        sent: list[TransferError | None] = []
        messages: list[tuple[int, Any]] = [(0, data) for data in GARBAGE if data]
        messages += [(1 << 63 | 7 << 32 | i, b"payload") for i in range(3)]
        messages += [(0, bytes(4 << 20)), (5, bytes(4 << 20)), (1 << 63, bytes(4 << 20))]
        for tag, data in messages:
            port.send(endpoint, None, data, tag, sent.append)
        await eventually(lambda: len(sent) == len(messages))
        port.close_endpoint(endpoint, None)

    async def scenario() -> None:
        async with network("ucx") as net:
            a, b = await net.pair()
            settings = ucx_settings("127.0.0.1", cuda=False)
            port = UcxPort(lambda tag, nbytes: arrived.append((tag, nbytes)), settings)
            await flood(port, b)
            await assert_works(a, b)
            stats = b.transport.stats
            assert stats.malformed >= 4
            assert stats.strays >= 7
            port.close()

    run_async(scenario())
    assert arrived == []


def test_ucx_stays_awake_only_for_what_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ucx_port, "_SPIN_S", 600.0)
    awaited = True

    async def scenario() -> None:
        nonlocal awaited
        async with network("ucx") as net:
            node = await net.open("a", 4, 1 << 16)
            settings = ucx_settings("127.0.0.1", cuda=False)
            port = UcxPort(lambda tag, nbytes: None, settings, awaits_more=lambda: awaited)
            endpoint = port.open_endpoint(endpoint_of(node), lambda: None)
            sent: list[TransferError | None] = []
            port.send(endpoint, None, b"hello", 0, sent.append)
            await eventually(lambda: sent)
            await asyncio.sleep(0.1)
            assert port._turn is not None  # it asks UCX in every turn of the loop
            awaited = False
            await eventually(lambda: port._turn is None)
            port.close_endpoint(endpoint, None)
            port.close()

    run_async(scenario())


def test_ucx_names_its_lane() -> None:
    async def scenario() -> None:
        async with network("ucx") as net:
            a, b = await net.pair()
            await asyncio.gather(a.send("b", 0, 60_000), b.take_all(1))
            assert a.transport.lane("b") == "tcp"
            assert a.transport.lane("nobody") == "ucx"

    run_async(scenario())


def test_unloadable_ucx_is_an_error_of_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        transport = create_transport("ucx", "w", StagingPool(1, 1000, torch.device("cpu")))
        monkeypatch.setitem(sys.modules, "ucxx", None)
        with pytest.raises(ConfigError, match="ucxx does not load"):
            await transport.start(PATIENCE_S)
        await transport.close()

    run_async(scenario())
