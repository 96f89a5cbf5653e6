import asyncio
import logging
import time
from collections.abc import Callable
from signal import SIGCONT, SIGSTOP

import pytest
import zmq

from pagewire.shared.base.errors import ChannelError
from pagewire.shared.control.channel import ClusterKeys, ControlClient, make_client_id
from pagewire.shared.control.protocol import (
    Cancel,
    ControlMessage,
    Ping,
    Pong,
    decode,
    encode,
)
from pagewire.tests.support.aio import eventually, run_async
from pagewire.tests.support.control import (
    KEYS,
    WAIT_S,
    ack,
    check_service,
    connected,
    large_message,
    lone_client,
    raw_peer,
    remote_client,
    remote_server,
    serving,
)

# Which of the two depends on whether the kernel still held bytes for the process.
DIED = r"lost in the handshake|the process has just ended"


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


def test_a_server_that_ends_right_after_the_handshake_is_lost(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Both happen before the client's event loop hears of the first."""

    def shake_hands_and_end(server: zmq.Socket[bytes], monitor: zmq.Socket[bytes]) -> None:
        assert monitor.poll(int(WAIT_S * 1000))
        server.disable_monitor()
        server.close(linger=0)
        time.sleep(0.2)  # the client's I/O thread finds the connection closed

    async def scenario() -> None:
        with zmq.Context() as context, context.socket(zmq.ROUTER) as server:
            KEYS.secure_server(server)
            port = server.bind_to_random_port("tcp://127.0.0.1")
            with server.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED) as monitor:
                client = lone_client(f"tcp://127.0.0.1:{port}")
                connecting = asyncio.create_task(client.connect(WAIT_S))
                await asyncio.sleep(0)  # the client connects: an address needs no look-up
                shake_hands_and_end(server, monitor)  # in this thread: the loop stands still
            with pytest.raises(ChannelError, match="was closed"):
                await connecting

    with caplog.at_level(logging.ERROR):
        run_async(scenario())
    assert not caplog.records


def test_a_server_lost_together_with_its_first_answer_was_never_reached() -> None:
    """The client reads both before `connect` goes on: that raises, and nothing ticks afterwards."""

    def greet_and_forget(server: zmq.Socket[bytes]) -> None:
        peer, _ping = server.recv_multipart()
        for epoch in (7, 0):
            server.send_multipart([peer, encode(Pong(worker_id="worker-0", epoch=epoch))])
        time.sleep(0.2)  # the client's I/O thread reads both

    async def scenario() -> None:
        with zmq.Context() as context, context.socket(zmq.ROUTER) as server:
            server.linger = 0
            KEYS.secure_server(server)
            port = server.bind_to_random_port("tcp://127.0.0.1")
            endpoint, lost = f"tcp://127.0.0.1:{port}", list[str]()
            client = ControlClient(
                endpoint, KEYS, make_client_id("client"), lambda _: None, lost.append
            )
            connecting = asyncio.create_task(client.connect(WAIT_S))
            await eventually(lambda: server.poll(0))
            greet_and_forget(server)  # in this thread: the loop stands still
            with pytest.raises(ChannelError, match="does not know this client"):
                await connecting
            assert lost == []
            assert client._ticker is None

    run_async(scenario())


@pytest.mark.parametrize(("waits_s", "said_s"), [(0.5, "0.5"), (8.0, "5")], ids=["ours", "zmq's"])
def test_a_frozen_server_is_not_taken_for_one_with_another_secret(
    waits_s: float, said_s: str
) -> None:
    """Whether the handshake times out here or in ZeroMQ."""

    async def scenario() -> None:
        with remote_server(7) as server:
            endpoint = await asyncio.to_thread(server.receive)
            server.signal(SIGSTOP)
            with pytest.raises(ChannelError) as caught:
                await lone_client(endpoint).connect(waits_s)
            assert str(caught.value) == (
                f"{endpoint}: connected, but no answer within {said_s} s: "
                "the process is frozen or overloaded"
            )
            server.signal(SIGCONT)
            async with connected(endpoint):
                with pytest.raises(ChannelError, match="authentication failed"):
                    await lone_client(endpoint, ClusterKeys.derive("another")).connect(WAIT_S)

    run_async(scenario())


def test_a_server_that_dies_in_the_handshake_did_not_refuse_it() -> None:
    async def scenario() -> None:
        with remote_server(7) as server:
            endpoint = await asyncio.to_thread(server.receive)
            server.signal(SIGSTOP)
            client = lone_client(endpoint)
            connecting = asyncio.create_task(client.connect(WAIT_S))
            await eventually(lambda: client._reached == zmq.EVENT_CONNECTED)
            server.kill()
            with pytest.raises(ChannelError, match=DIED):
                await connecting

    run_async(scenario())


def test_something_else_on_the_port_is_named() -> None:
    async def hang_up(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async def scenario() -> None:
        async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            with pytest.raises(ChannelError, match="is this a Pagewire service"):
                await lone_client(f"tcp://127.0.0.1:{port}").connect(WAIT_S)

    run_async(scenario())


def test_a_client_that_leaves_is_reported_once_and_soon() -> None:
    async def scenario() -> None:
        async with serving(lease_s=60) as server:
            async with connected(server.endpoint) as client:
                client.control.post(Cancel(request_id="last-word"))
            await eventually(lambda: server.lost)
            assert server.received == [(client.control.client_id, Cancel(request_id="last-word"))]
            await asyncio.sleep(0.3)
            assert server.lost == [client.control.client_id]
            assert not server.control.post(client.control.client_id, ack(1))
            assert client.lost == []

    run_async(scenario())


def test_a_client_that_leaves_later_than_its_event_is_reported_with_the_next_heartbeat() -> None:
    """libzmq may drop the route long after it has said that somebody left."""

    async def scenario() -> None:
        async with serving(lease_s=60) as server:
            server.control._monitor._on_frames = lambda _frames: None  # it says nothing else
            async with connected(server.endpoint) as client:
                server.control._on_disconnect(zmq.EVENT_DISCONNECTED, 0)
                await eventually(lambda: server.control._probe is None)
                assert server.control.peers == (client.control.client_id,)
            await eventually(lambda: server.lost == [client.control.client_id])

    run_async(scenario())


def test_a_server_that_is_closed_reports_nobody_lost() -> None:
    """Not even whom it has forgotten just before."""

    async def scenario() -> None:
        async with serving() as server, connected(server.endpoint) as client:
            server.control._forget(client.control.client_id.encode(), "for the test")
            await server.control.close()
            assert server.lost == []

    run_async(scenario())


def test_a_server_that_closes_is_reported_once_and_soon() -> None:
    async def scenario() -> None:
        async with serving() as server, connected(server.endpoint, lease_s=60) as client:
            await server.control.close()
            await eventually(lambda: client.lost)
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
            await eventually(lambda: client.lost)

    with remote_server(3) as remote:
        run_async(scenario(remote.receive(), remote.kill))


def test_a_frozen_server_process_is_noticed_after_the_lease() -> None:
    async def scenario(endpoint: str, freeze: Callable[[], None]) -> None:
        async with connected(endpoint, lease_s=1.5) as client:
            freeze()
            start = time.monotonic()
            await eventually(lambda: client.lost)
            assert time.monotonic() - start > 1
            assert "silent" in client.lost[0]

    with remote_server(3) as remote:
        run_async(scenario(remote.receive(), lambda: remote.signal(SIGSTOP)))


def test_a_frozen_client_process_is_forgotten_and_notified() -> None:
    async def scenario() -> None:
        async with serving(lease_s=0.5) as server:
            with remote_client(server.endpoint) as remote:
                assert await asyncio.to_thread(remote.receive) == "ready"
                remote.signal(SIGSTOP)
                await eventually(lambda: server.lost)
                remote.signal(SIGCONT)
                assert await asyncio.to_thread(remote.receive)  # why it lost the server

    run_async(scenario())


def test_a_forgotten_client_that_goes_on_talking_is_notified_and_not_served() -> None:
    async def scenario() -> None:
        async with serving(lease_s=0.3) as server, raw_peer(server.endpoint) as silent:
            silent.send(encode(Cancel(request_id="one")))
            await eventually(lambda: server.lost == ["raw"])
            silent.send(encode(Cancel(request_id="two")))
            assert await asyncio.to_thread(silent.poll, 20_000)
            assert decode(silent.recv()).epoch == 0
            assert len(server.received) == 1
            assert server.lost == ["raw"]

    run_async(scenario())


def test_a_client_that_does_not_read_is_lost_with_bounded_memory() -> None:
    message = large_message(1 << 14)

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
                    client.control.post(large_message(1 << 12, str(number)))

    with remote_server(3) as remote:
        run_async(scenario(remote.receive(), lambda: remote.signal(SIGSTOP)), timeout=60)
