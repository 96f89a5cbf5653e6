"""Both ends of a control channel, in this process or another, and what they reported."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import zmq

from pagewire.shared.control.channel import (
    ClusterKeys,
    ControlClient,
    ControlServer,
    make_client_id,
)
from pagewire.shared.control.protocol import (
    Cancel,
    ControlMessage,
    Generate,
    TokenBatch,
    TokenOutput,
)
from pagewire.shared.request.sampling import RequestSpec
from pagewire.tests.support.aio import eventually
from pagewire.tests.support.child_process import Child, child_process, run_in_loop

KEYS = ClusterKeys.derive("the cluster's secret")
WAIT_S = 5.0
REMOTE_LEASE_S = 0.5


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
    handler: Callable[[ControlMessage], None] | None = None
    control: ControlClient | None = None

    def on_message(self, message: ControlMessage) -> None:
        self.received.append(message)
        self.arrived.set()
        if self.handler is not None:
            self.handler(message)


@asynccontextmanager
async def serving(
    port: int = 0,
    epoch: int = 7,
    lease_s: float = 5.0,
    heartbeat_s: float = 0.1,
    worker_id: str = "worker-0",
) -> AsyncIterator[Server]:
    server = Server()
    server.control = ControlServer(
        "127.0.0.1",
        port,
        KEYS,
        worker_id,
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
    endpoint: str,
    name: str = "client",
    lease_s: float = 5.0,
    heartbeat_s: float = 0.1,
    handler: Callable[[ControlMessage], None] | None = None,
    keys: ClusterKeys = KEYS,
) -> AsyncIterator[Client]:
    client = Client(handler=handler)
    client.control = ControlClient(
        endpoint,
        keys,
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


def remote_server(epoch: int) -> AbstractContextManager[Child]:
    """Run a server in a process that can be killed and frozen; it says its endpoint."""
    return child_process(run_in_loop, _serve, epoch)


def remote_client(endpoint: str) -> AbstractContextManager[Child]:
    """Run a client in such a process; it says when it is connected, and why it lost the server."""
    return child_process(run_in_loop, _call, endpoint)


async def _serve(pipe: Connection, epoch: int) -> None:
    async with serving(epoch=epoch, lease_s=REMOTE_LEASE_S) as server:
        pipe.send(server.endpoint)
        await asyncio.to_thread(pipe.recv)


async def _call(pipe: Connection, endpoint: str) -> None:
    async with connected(endpoint, "remote", lease_s=REMOTE_LEASE_S) as client:
        pipe.send("ready")
        await eventually(lambda: client.lost, 60)
        pipe.send(client.lost[0])
        await asyncio.to_thread(pipe.recv)


def lone_client(endpoint: str, keys: ClusterKeys = KEYS) -> ControlClient:
    return ControlClient(endpoint, keys, make_client_id("lone"), lambda m: None, lambda r: None)


@asynccontextmanager
async def raw_peer(endpoint: str, *, keys: ClusterKeys | None = KEYS, receive_queue: int = 100):
    """Connect a bare DEALER, which can send what `ControlClient` never sends."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        if keys is not None:
            keys.secure_client(dealer)
        dealer.linger = 0
        dealer.rcvhwm = receive_queue
        dealer.routing_id = b"raw"
        dealer.connect(endpoint)
        yield dealer


async def check_service(server: Server) -> None:
    """Check that a normal client can still connect, and that its message arrives."""
    count = len(server.received)
    async with connected(server.endpoint, "normal") as client:
        client.control.post(Cancel(request_id="still-alive"))
        await eventually(lambda: len(server.received) > count)


def large_message(nbytes: int, request_id: str = "request") -> Generate:
    """Return a message whose frame has about `nbytes` bytes."""
    return Generate(
        request_id=request_id,
        prompt_token_ids=[2**31 - 1] * (nbytes // 5),
        spec=RequestSpec(),
    )


def ack(number: int) -> TokenBatch:
    return TokenBatch(outputs=[TokenOutput(request_id="request", token_ids=[number])])
