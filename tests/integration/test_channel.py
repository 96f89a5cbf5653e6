import asyncio
import logging
import os
import pickle
import random
import resource
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import uvloop
import zmq

from pagewire.shared.channel import ClusterKeys, ControlClient, ControlServer, make_client_id
from pagewire.shared.errors import ChannelError, ConfigError
from pagewire.shared.protocol import (
    MAX_FRAME_BYTES,
    Cancel,
    ControlMessage,
    KvWelcome,
    PieceAck,
    Ping,
    decode,
    encode,
)
from pagewire.tests.support.aio import eventually, run_async
from pagewire.tests.support.control_peer import remote_peer

KEYS = ClusterKeys.derive("the cluster's secret")
WAIT_S = 5.0


@dataclass
class Server:
    """A server under test and what it reported."""

    received: list[tuple[str, ControlMessage]] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    handler: Callable[[str, ControlMessage], None] | None = None
    control: ControlServer | None = None
    endpoint: str = ""

    def on_message(self, peer: str, message: ControlMessage) -> None:
        self.received.append((peer, message))
        if self.handler is not None:
            self.handler(peer, message)


@dataclass
class Client:
    """A client under test and what it reported."""

    received: list[ControlMessage] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    control: ControlClient | None = None

    def on_message(self, message: ControlMessage) -> None:
        self.received.append(message)
        self.arrived.set()


@asynccontextmanager
async def serving(
    port: int = 0, epoch: int = 7, lease_s: float = 5.0, heartbeat_s: float = 0.1
) -> AsyncIterator[Server]:
    server = Server()
    server.control = ControlServer(
        "127.0.0.1",
        port,
        KEYS,
        "worker-0",
        epoch,
        server.on_message,
        server.lost.append,
        lease_s=lease_s,
        heartbeat_s=heartbeat_s,
    )
    server.endpoint = await server.control.start()
    try:
        yield server
    finally:
        await server.control.close()


@asynccontextmanager
async def connected(
    endpoint: str, name: str = "client", lease_s: float = 5.0, heartbeat_s: float = 0.1
) -> AsyncIterator[Client]:
    client = Client()
    client.control = ControlClient(
        endpoint,
        KEYS,
        make_client_id(name),
        client.on_message,
        client.lost.append,
        lease_s=lease_s,
        heartbeat_s=heartbeat_s,
    )
    try:
        await client.control.connect(WAIT_S)
        yield client
    finally:
        client.control.close()


def lone_client(endpoint: str, keys: ClusterKeys = KEYS) -> ControlClient:
    return ControlClient(endpoint, keys, make_client_id("lone"), lambda m: None, lambda r: None)


@asynccontextmanager
async def raw_peer(endpoint: str, *, keys: ClusterKeys | None = KEYS, receive_queue: int = 100):
    """A bare DEALER, to say what `ControlClient` never would."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        if keys is not None:
            keys.secure_client(dealer)
        dealer.linger = 0
        dealer.rcvhwm = receive_queue
        dealer.routing_id = b"raw"
        dealer.connect(endpoint)
        yield dealer


async def check_service(server: Server) -> None:
    """A normal client still gets its answers."""
    count = len(server.received)
    async with connected(server.endpoint, "normal") as client:
        client.control.post(Cancel(request_id="still-alive"))
        await eventually(lambda: len(server.received) > count)


def ack(number: int) -> PieceAck:
    return PieceAck(job_id="job", piece=number)


@pytest.mark.parametrize("loop_factory", [None, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_messages_cross_both_ways_in_order(loop_factory) -> None:
    async def scenario() -> None:
        async with serving() as server, connected(server.endpoint) as client:
            server.handler = lambda peer, message: server.control.post(peer, message)
            for number in range(2000):
                client.control.post(ack(number))
            await eventually(lambda: len(client.received) == 2000)
            assert client.received == [ack(number) for number in range(2000)]
            assert [m for _, m in server.received] == client.received
            assert {peer for peer, _ in server.received} == {client.control.client_id}
            assert server.control.peers == (client.control.client_id,)
            assert client.control.alive

    run_async(scenario(), loop_factory=loop_factory)


def test_connect_tells_who_answers() -> None:
    async def scenario() -> None:
        async with serving(epoch=41) as server:
            client = lone_client(server.endpoint)
            pong = await client.connect(WAIT_S)
            client.close()
            assert (pong.worker_id, pong.epoch) == ("worker-0", 41)

    run_async(scenario())


def test_a_round_trip_takes_well_under_a_millisecond() -> None:
    async def scenario() -> float:
        times = []
        async with serving() as server, connected(server.endpoint) as client:
            server.handler = lambda peer, message: server.control.post(peer, message)
            for number in range(300):
                client.arrived.clear()
                start = time.perf_counter()
                client.control.post(ack(number))
                await client.arrived.wait()
                times.append(time.perf_counter() - start)
        return sorted(times)[150]

    assert run_async(scenario()) < 0.005  # 0.12 ms on an idle machine


def test_large_messages_cross() -> None:
    async def scenario() -> None:
        async with serving() as server, connected(server.endpoint) as client:
            server.handler = lambda peer, message: server.control.post(peer, message)
            message = KvWelcome(worker_id="w", epoch=1, address=os.urandom(1 << 16))
            client.control.post(message)
            await eventually(lambda: client.received == [message])

    run_async(scenario())


def test_several_servers_and_loops_in_one_process() -> None:
    async def scenario() -> None:
        async with (
            serving(epoch=1) as one,
            serving(epoch=2) as two,
            connected(one.endpoint, "a") as a,
            connected(two.endpoint, "b") as b,
        ):
            a.control.post(Cancel(request_id="for-one"))
            b.control.post(Cancel(request_id="for-two"))
            await eventually(lambda: one.received and two.received)
            assert one.received == [(a.control.client_id, Cancel(request_id="for-one"))]
            assert two.received == [(b.control.client_id, Cancel(request_id="for-two"))]

    run_async(scenario())
    run_async(scenario())


def test_another_secret_is_refused_at_once() -> None:
    async def scenario() -> None:
        async with serving() as server:
            start = time.monotonic()
            with pytest.raises(ChannelError, match="secret"):
                await lone_client(server.endpoint, ClusterKeys.derive("another")).connect(WAIT_S)
            assert time.monotonic() - start < 2
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
                await asyncio.to_thread(member.send, b"\x01" + pickle.dumps(Exploit()))
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
            seen = lambda: server.control.malformed_frames + len(server.received)  # noqa: E731
            await eventually(lambda: seen() == count, timeout=20)
            assert server.control.malformed_frames > count // 2
            await check_service(server)
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before

    with caplog.at_level(logging.WARNING):
        grown_kib = run_async(scenario(), timeout=60)
    assert grown_kib < 50 * 1024
    warnings = [r for r in caplog.records if "malformed" in r.message]
    assert 1 <= len(warnings) <= 10


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
            await asyncio.to_thread(member.send, b"\x01" + bytes(MAX_FRAME_BYTES + 1000))
            await eventually(lambda: server.lost == ["raw"])
            assert server.received == []
            await check_service(server)

    run_async(scenario())


def test_a_failing_handler_is_logged_and_the_next_message_handled(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        async with serving() as server, connected(server.endpoint) as client:

            def fail_on_first(peer: str, message: ControlMessage) -> None:
                if message == ack(0):
                    raise RuntimeError("a bug in the handler")

            server.handler = fail_on_first
            client.control.post(ack(0))
            client.control.post(ack(1))
            await eventually(lambda: len(server.received) == 2)

    with caplog.at_level(logging.ERROR):
        run_async(scenario())
    assert "a bug in the handler" in caplog.text


def test_a_client_that_leaves_is_reported_once_and_soon() -> None:
    async def scenario() -> None:
        async with serving() as server:
            async with connected(server.endpoint) as client:
                client.control.post(Cancel(request_id="last-word"))
            start = time.monotonic()
            await eventually(lambda: server.lost)
            assert time.monotonic() - start < 1
            assert server.received == [(client.control.client_id, Cancel(request_id="last-word"))]
            await asyncio.sleep(0.3)
            assert server.lost == [client.control.client_id]
            assert not server.control.post(client.control.client_id, ack(1))
            assert client.lost == []

    run_async(scenario())


def test_a_server_that_closes_is_reported_once_and_soon() -> None:
    async def scenario() -> None:
        async with serving() as server, connected(server.endpoint) as client:
            await server.control.close()
            start = time.monotonic()
            await eventually(lambda: client.lost)
            assert time.monotonic() - start < 1
            assert not client.control.alive
            with pytest.raises(ChannelError, match="not connected"):
                client.control.post(ack(1))
            await asyncio.sleep(0.3)
            assert len(client.lost) == 1

    run_async(scenario())


def test_a_restarted_server_has_another_epoch_and_the_old_connection_is_lost() -> None:
    async def scenario() -> None:
        async with serving(epoch=1) as server:
            port = int(server.endpoint.rsplit(":", 1)[1])
            async with connected(server.endpoint) as client:
                await server.control.close()
                async with serving(port=port, epoch=2) as reborn:
                    await eventually(lambda: client.lost)
                    again = lone_client(reborn.endpoint)
                    assert (await again.connect(WAIT_S)).epoch == 2
                    again.close()

    run_async(scenario())


def test_a_killed_server_process_is_noticed_at_once() -> None:
    async def scenario(endpoint: str, kill: Callable[[], None]) -> None:
        async with connected(endpoint, lease_s=10) as client:
            kill()
            await eventually(lambda: client.lost, timeout=1)

    with remote_peer("server", "the cluster's secret", "3") as remote:
        run_async(scenario(remote.read_line(), remote.kill))


def test_a_frozen_server_process_is_noticed_after_the_lease() -> None:
    async def scenario(endpoint: str, freeze: Callable[[], None]) -> None:
        async with connected(endpoint, lease_s=0.5) as client:
            freeze()
            start = time.monotonic()
            await eventually(lambda: client.lost)
            assert 0.3 < time.monotonic() - start < 3
            assert "silent" in client.lost[0]

    with remote_peer("server", "the cluster's secret", "3") as remote:
        run_async(scenario(remote.read_line(), remote.freeze))


def test_a_frozen_client_process_is_forgotten_and_told_so() -> None:
    async def scenario() -> None:
        async with serving(lease_s=0.5) as server:
            with remote_peer("client", "the cluster's secret", server.endpoint) as remote:
                assert await asyncio.to_thread(remote.read_line) == "ready"
                remote.freeze()
                await eventually(lambda: server.lost)
                remote.thaw()
                assert (await asyncio.to_thread(remote.read_line)).startswith("lost: ")

    run_async(scenario())


def test_a_forgotten_client_that_goes_on_talking_is_told_and_not_served() -> None:
    async def scenario() -> None:
        async with serving(lease_s=0.3) as server, raw_peer(server.endpoint) as silent:
            silent.send(encode(Cancel(request_id="one")))
            await eventually(lambda: server.lost == ["raw"])
            silent.send(encode(Cancel(request_id="two")))
            assert await asyncio.to_thread(silent.poll, 2000)
            assert decode(silent.recv()).epoch == 0
            assert len(server.received) == 1
            assert server.lost == ["raw"]

    run_async(scenario())


def test_a_client_that_does_not_read_is_lost_with_bounded_memory() -> None:
    message = KvWelcome(worker_id="w", epoch=1, address=bytes(1 << 14))

    async def scenario() -> None:
        async with (
            serving(lease_s=60) as server,
            raw_peer(server.endpoint, receive_queue=1) as reader,
        ):
            reader.send(encode(Ping()))
            await eventually(lambda: server.control.peers == ("raw",))
            posted = 0
            while server.control.post("raw", message):
                posted += 1
                assert posted < 20_000
                if posted % 100 == 0:
                    await asyncio.sleep(0)
            await eventually(lambda: server.lost == ["raw"])
            await check_service(server)

    run_async(scenario(), timeout=60)


def test_a_client_whose_queue_is_full_says_so_and_never_blocks() -> None:
    async def scenario(endpoint: str, freeze: Callable[[], None]) -> None:
        async with connected(endpoint, lease_s=60) as client:
            freeze()
            with pytest.raises(ChannelError, match="full"):
                for number in range(1_000_000):
                    client.control.post(
                        KvWelcome(worker_id="w", epoch=number, address=bytes(1 << 12))
                    )

    with remote_peer("server", "the cluster's secret", "3") as remote:
        run_async(scenario(remote.read_line(), remote.freeze), timeout=60)


def test_nobody_there_is_told_at_once() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        endpoint = f"tcp://127.0.0.1:{unused.getsockname()[1]}"
        start = time.monotonic()
        with pytest.raises(ChannelError, match="nobody listens"):
            run_async(lone_client(endpoint).connect(WAIT_S))
        assert time.monotonic() - start < 2


def test_a_server_that_never_answers_times_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        endpoint = f"tcp://127.0.0.1:{mute.getsockname()[1]}"
        with pytest.raises(ChannelError, match=r"within 0\.3 s"):
            run_async(lone_client(endpoint).connect(0.3))


@pytest.mark.parametrize("endpoint", ["tcp://", "nonsense", "tcp://127.0.0.1:x"])
def test_endpoints_that_make_no_sense_are_refused(endpoint: str) -> None:
    with pytest.raises(ChannelError, match="cannot connect"):
        run_async(lone_client(endpoint).connect(WAIT_S))


def test_a_cancelled_connect_leaves_nothing_behind() -> None:
    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as mute:
            client = lone_client(f"tcp://127.0.0.1:{mute.getsockname()[1]}")
            task = asyncio.create_task(client.connect(WAIT_S))
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert not client.alive
            with pytest.raises(ChannelError, match="used before"):
                await client.connect(WAIT_S)

    run_async(scenario())


def test_a_port_in_use_is_a_configuration_error() -> None:
    async def scenario() -> None:
        async with serving() as server:
            port = int(server.endpoint.rsplit(":", 1)[1])
            with pytest.raises(ConfigError, match="another port") as caught:
                async with serving(port=port):
                    pytest.fail("two servers on one port")
            assert "\n" not in str(caught.value)
            await check_service(server)

    run_async(scenario())


def test_an_unknown_host_is_a_configuration_error() -> None:
    server = ControlServer(
        "no-such-host.invalid", 0, KEYS, "w", 1, lambda p, m: None, lambda p: None
    )
    with pytest.raises(ConfigError, match="no-such-host"):
        run_async(server.start())


def test_host_names_are_resolved() -> None:
    async def scenario() -> None:
        server = ControlServer("localhost", 0, KEYS, "w", 1, lambda p, m: None, lambda p: None)
        endpoint = await server.start()
        client = lone_client(endpoint)
        await client.connect(WAIT_S)
        client.close()
        await server.close()

    run_async(scenario())


def test_epochs_begin_above_the_one_that_means_forgotten() -> None:
    with pytest.raises(ValueError, match="epoch"):
        ControlServer("127.0.0.1", 0, KEYS, "w", 0, lambda p, m: None, lambda p: None)


@pytest.mark.parametrize("name", ["router", "x" * 80, ""], ids=["short", "long", "empty"])
def test_client_ids_are_unique_and_fit(name: str) -> None:
    ids = {make_client_id(name) for _ in range(100)}
    assert len(ids) == 100
    assert all(len(i) <= 64 and i.startswith(name[:40]) for i in ids)
    client = lone_client("tcp://127.0.0.1:1")
    client.close()
    client.close()


def test_keys_derive_from_the_secret_alone() -> None:
    assert ClusterKeys.derive("a") == ClusterKeys.derive("a")
    assert ClusterKeys.derive("a") != ClusterKeys.derive("b")
    assert ClusterKeys.derive("a").secret.decode() not in repr(ClusterKeys.derive("a"))
