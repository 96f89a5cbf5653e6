import asyncio
import logging
import pickle
import random
import resource
import socket
import time
from pathlib import Path

import pytest
import zmq

from pagewire.shared.base.errors import ChannelError
from pagewire.shared.control.auth import ZapHandler
from pagewire.shared.control.channel import ClusterKeys, ControlClient
from pagewire.shared.control.loop_socket import LoopSocket
from pagewire.shared.control.protocol import (
    MAX_FRAME_BYTES,
    PROTOCOL_VERSION,
    Cancel,
    Ping,
    encode,
)
from pagewire.tests.support.aio import eventually, run_async
from pagewire.tests.support.control import (
    KEYS,
    WAIT_S,
    ack,
    check_service,
    connected,
    lone_client,
    raw_peer,
    serving,
)

LATER_FRAME = bytes([PROTOCOL_VERSION + 1]) + b"whatever it says"


def test_another_secret_is_refused_at_once() -> None:
    async def scenario() -> None:
        async with serving() as server:
            start = time.monotonic()
            with pytest.raises(
                ChannelError, match=r"authentication failed \(is the cluster secret the same"
            ):
                await lone_client(server.endpoint, ClusterKeys.derive("another")).connect(WAIT_S)
            assert time.monotonic() - start < WAIT_S - 1
            assert server.control.peers == ()
            await check_service(server)

    run_async(scenario())


def test_a_peer_without_a_key_gets_nothing() -> None:
    async def scenario() -> None:
        async with serving() as server, raw_peer(server.endpoint, keys=None) as stranger:
            await asyncio.to_thread(stranger.send, encode(Cancel(request_id="x")))
            assert not await asyncio.to_thread(stranger.poll, 500)
            assert server.received == []
            await check_service(server)

    run_async(scenario())


def test_knowing_the_servers_public_key_is_not_enough() -> None:
    async def scenario() -> None:
        public, secret = zmq.curve_keypair()
        async with serving() as server:
            with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
                stranger.linger = 0
                stranger.curve_serverkey = KEYS.public
                stranger.curve_publickey, stranger.curve_secretkey = public, secret
                stranger.connect(server.endpoint)
                stranger.send(encode(Cancel(request_id="x")))
                await eventually(lambda: server.control.denied_clients > 0)
            assert server.received == []
            await check_service(server)

    run_async(scenario())


def test_strangers_that_come_and_go_disturb_nobody() -> None:
    def knock(port: int) -> None:
        for _ in range(300):
            socket.create_connection(("127.0.0.1", port), timeout=5).close()

    async def scenario() -> None:
        async with serving() as server, connected(server.endpoint) as client:
            await asyncio.to_thread(knock, int(server.endpoint.rsplit(":", 1)[1]))
            client.control.post(ack(1))
            await eventually(lambda: len(server.received) == 1)
            assert client.lost == server.lost == []

    run_async(scenario())


def test_pickles_and_noise_on_the_port_do_nothing(tmp_path: Path) -> None:
    marker = tmp_path / "marker"

    class Exploit:
        def __reduce__(self):
            return (open, (str(marker), "w"))

    def attack(port: int) -> None:
        noise = random.Random(7)
        payloads = [pickle.dumps(Exploit())] + [noise.randbytes(2**n) for n in range(17)]
        for payload in payloads:
            with socket.create_connection(("127.0.0.1", port), timeout=5) as stream:
                stream.sendall(payload)

    async def scenario() -> None:
        async with serving() as server:
            await asyncio.to_thread(attack, int(server.endpoint.rsplit(":", 1)[1]))
            async with raw_peer(server.endpoint) as member:  # even one that has the key
                await asyncio.to_thread(
                    member.send, bytes([PROTOCOL_VERSION]) + pickle.dumps(Exploit())
                )
                await eventually(lambda: server.control.malformed_frames == 1)
            assert server.received == []
            await check_service(server)

    run_async(scenario())
    assert not marker.exists()


def test_malformed_frames_are_counted_and_leave_the_server_alive(
    caplog: pytest.LogCaptureFixture,
) -> None:
    noise = random.Random(11)
    good = encode(Cancel(request_id="r"))
    count = 20_000

    def frames() -> list[list[bytes]]:
        mutated = bytearray(good)
        mutated[noise.randrange(len(good))] ^= 0x80
        return [[noise.randbytes(noise.randrange(200))], [bytes(mutated)], [good, good], [b""]]

    async def scenario() -> int:
        async with serving() as server, raw_peer(server.endpoint) as member:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            for _ in range(count // 100):
                for _ in range(25):
                    for parts in frames():
                        member.send_multipart(parts)
                await asyncio.sleep(0.001)
            control, received = server.control, server.received
            await eventually(
                lambda: (
                    control.malformed_frames + control.other_version_frames + len(received) == count
                ),
                timeout=20,
            )
            assert server.control.malformed_frames > count // 2
            await check_service(server)
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before

    with caplog.at_level(logging.WARNING):
        grown_kib = run_async(scenario(), timeout=60)
    assert grown_kib < 50 * 1024
    warnings = [r for r in caplog.records if "malformed" in r.message]
    assert 1 <= len(warnings) <= 10


def test_a_client_of_another_release_learns_the_servers_version(
    caplog: pytest.LogCaptureFixture,
) -> None:

    async def scenario() -> None:
        async with serving() as server:
            async with raw_peer(server.endpoint) as member:  # of a later release
                await asyncio.to_thread(member.send, LATER_FRAME)
                assert await asyncio.to_thread(member.poll, 5000)
                assert member.recv()[0] == PROTOCOL_VERSION
            control = server.control
            assert (control.malformed_frames, control.other_version_frames) == (0, 1)
            assert control.peers == ()

    with caplog.at_level(logging.WARNING):
        run_async(scenario())
    [warning] = caplog.messages
    assert (
        f"connection of 'raw': the peer speaks protocol version {PROTOCOL_VERSION + 1}" in warning
    )


def test_a_server_of_another_release_is_named_as_such() -> None:
    mismatch = f"speaks protocol version {PROTOCOL_VERSION + 1}, this side {PROTOCOL_VERSION}: run"

    async def scenario() -> None:
        with zmq.Context() as context:
            gate = ZapHandler(context, KEYS)
            socket = context.socket(zmq.ROUTER)
            KEYS.secure_server(socket)
            link = LoopSocket(socket, lambda frames: link.send([frames[0], LATER_FRAME]))
            port = socket.bind_to_random_port("tcp://127.0.0.1")
            start = time.monotonic()
            with pytest.raises(ChannelError, match=mismatch):
                await lone_client(f"tcp://127.0.0.1:{port}").connect(WAIT_S)
            assert time.monotonic() - start < WAIT_S - 1
            link.close()
            gate.close()

    run_async(scenario())


@pytest.mark.parametrize("client_id", [b"with space", b"\xff\xfe", b"x" * 65], ids=repr)
def test_invalid_client_ids_are_no_peers(client_id: bytes) -> None:
    async def scenario() -> None:
        async with serving() as server:
            with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
                KEYS.secure_client(dealer)
                dealer.linger = 0
                dealer.routing_id = client_id
                dealer.connect(server.endpoint)
                dealer.send(encode(Ping()))
                await eventually(lambda: server.control.malformed_frames == 1)
            assert server.control.peers == ()
            await check_service(server)

    run_async(scenario())
    with pytest.raises(ValueError, match="client id"):
        ControlClient("tcp://127.0.0.1:1", KEYS, "with space", lambda m: None, lambda r: None)


def test_a_frame_over_the_limit_costs_its_sender_the_connection() -> None:
    async def scenario() -> None:
        async with serving() as server, raw_peer(server.endpoint) as member:
            await asyncio.to_thread(member.send, encode(Ping()))
            await eventually(lambda: server.control.peers == ("raw",))
            member.reconnect_ivl = -1
            await asyncio.to_thread(
                member.send, bytes([PROTOCOL_VERSION]) + bytes(MAX_FRAME_BYTES + 1000)
            )
            await eventually(lambda: server.lost == ["raw"])
            assert server.received == []
            await check_service(server)

    run_async(scenario())
