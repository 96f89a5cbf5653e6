import asyncio
import os
import resource
import socket
import time

import pytest
import uvloop

from pagewire.shared.base.addresses import with_host
from pagewire.shared.base.errors import ChannelError, ConfigError
from pagewire.shared.control.channel import ClusterKeys, ControlServer, make_client_id
from pagewire.shared.control.protocol import (
    Cancel,
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
    serving,
)


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


@pytest.mark.parametrize("loop_factory", [None, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_no_message_waits_for_a_heartbeat(loop_factory) -> None:
    quiet = {"heartbeat_s": 60.0, "lease_s": 300.0}

    async def scenario() -> None:
        async with serving(**quiet) as server, connected(server.endpoint, **quiet) as client:
            server.handler = lambda peer, message: server.control.post(peer, message)
            sent = 0
            for burst in range(300):
                for _ in range(1 + burst % 5):
                    client.control.post(ack(sent))
                    sent += 1
                while len(client.received) < sent:
                    client.arrived.clear()
                    await asyncio.wait_for(client.arrived.wait(), WAIT_S)
            assert client.received == [ack(number) for number in range(sent)]

    run_async(scenario(), loop_factory=loop_factory)


def test_connect_returns_who_answers() -> None:
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
        return sorted(times)[30]  # others may use the machine, too

    assert run_async(scenario()) < 0.005  # 0.12 ms on an idle machine


def test_large_messages_cross() -> None:
    async def scenario() -> None:
        async with serving() as server, connected(server.endpoint) as client:
            server.handler = lambda peer, message: server.control.post(peer, message)
            message = large_message(1 << 16)
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


def test_nobody_there_is_reported_at_once() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        endpoint = f"tcp://127.0.0.1:{unused.getsockname()[1]}"
        start = time.monotonic()
        with pytest.raises(ChannelError, match=r"nobody listens there$"):
            run_async(lone_client(endpoint).connect(WAIT_S))
        assert time.monotonic() - start < WAIT_S


def test_a_server_that_never_answers_times_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        endpoint = f"tcp://127.0.0.1:{mute.getsockname()[1]}"
        with pytest.raises(ChannelError, match=r"within 0\.3 s"):
            run_async(lone_client(endpoint).connect(0.3))


@pytest.mark.parametrize("endpoint", ["tcp://", "nonsense", "tcp://127.0.0.1:x"])
def test_endpoints_that_make_no_sense_are_refused(endpoint: str) -> None:
    with pytest.raises(ChannelError, match="cannot connect"):
        run_async(lone_client(endpoint).connect(WAIT_S))


def test_a_connection_without_a_file_descriptor_left_is_a_channel_error() -> None:
    async def scenario() -> None:
        async with serving() as server:
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            # All lower ones are open. With a limit of 0, libzmq could not even poll.
            lowest_free = os.dup(0)
            os.close(lowest_free)
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
            try:
                with pytest.raises(ChannelError, match="Too many open files"):
                    await lone_client(server.endpoint).connect(WAIT_S)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            again = lone_client(server.endpoint)
            await again.connect(WAIT_S)
            again.close()

    run_async(scenario())


def test_a_cancelled_connect_leaves_nothing() -> None:
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


def test_clients_connect_by_name() -> None:
    async def scenario() -> None:
        server = ControlServer("127.0.0.1", 0, KEYS, "w", 1, lambda p, m: None, lambda p: None)
        client = lone_client(with_host(await server.start(), "localhost"))
        assert (await client.connect(WAIT_S)).worker_id == "w"
        client.close()
        await server.close()

    run_async(scenario())


@pytest.mark.parametrize(("worker_id", "epoch"), [("w", 2), ("v", 1)])
def test_a_client_connects_to_the_run_that_it_asks_for_only(worker_id: str, epoch: int) -> None:
    async def scenario() -> None:
        server = ControlServer("127.0.0.1", 0, KEYS, "w", 1, lambda p, m: None, lambda p: None)
        endpoint = await server.start()
        right, wrong = lone_client(endpoint), lone_client(endpoint)
        await right.connect_to("w", 1, WAIT_S)
        with pytest.raises(ChannelError, match="now belongs to another worker"):
            await wrong.connect_to(worker_id, epoch, WAIT_S)
        assert right.alive and not wrong.alive
        right.close()
        await server.close()

    run_async(scenario())


@pytest.mark.parametrize("endpoint", ["tcp://no-such-host.invalid:5", "tcp://[::1:5"])
def test_a_name_without_an_address_is_a_channel_error(endpoint: str) -> None:
    async def scenario() -> None:
        with pytest.raises(ChannelError, match="no address"):
            await lone_client(endpoint).connect(WAIT_S)

    run_async(scenario())


def test_a_client_closed_while_its_name_is_looked_up_opens_nothing() -> None:
    async def scenario() -> None:
        client = lone_client("tcp://localhost:5")
        connecting = asyncio.create_task(client.connect(WAIT_S))
        await asyncio.sleep(0)
        client.close()
        with pytest.raises(ChannelError, match="was closed"):
            await connecting

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
