"""Baselines of the router bench, which pass the same bytes on: a bare asyncio relay, and nginx.

They show what a router could reach: both parse a request's head and then only pass bytes on.
"""

from __future__ import annotations

import asyncio
import shutil
import socket
import struct
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from string import Template
from typing import Any

import uvloop

from pagewire.loadtest import cluster
from pagewire.loadtest.bench.clusters import late_port

HOST = "127.0.0.1"
BACKLOG = 4096
START_TIMEOUT_S = 10.0
RESPONSE = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-cache\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)
DONE = b"data: [DONE]\n\n"
ENTRY = struct.Struct("<HI")  # in a message to the relay: stream, number of bytes that follow
NGINX_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
NGINX_CONFIG = Path(__file__).with_name("nginx.conf")  # a template


class HttpProtocol(asyncio.Protocol):
    """Answers a request with a response's head, and reports the stream's number and transport."""

    def __init__(self, on_stream: Callable[[int, Any], None]) -> None:
        self._on_stream, self._request = on_stream, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport, for the bytes that are sent later."""
        self._transport: Any = transport

    def data_received(self, data: bytes) -> None:
        """Wait for the whole request; only the seed of its body is used."""
        self._request += data
        if self._request.endswith(b"}"):
            number = int(self._request.partition(b'"seed":')[2].partition(b",")[0])
            self._request = b""
            self._transport.write(RESPONSE)
            self._on_stream(number, self._transport)


class RelayProtocol(asyncio.Protocol):
    """The relay's end of a source's connection: writes each event unchanged to its client."""

    def __init__(self, clients: dict[int, Any], sources: list[Any]) -> None:
        self._clients, self._sources, self._rest = clients, sources, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Add the source to those that get streams."""
        self._sources.append(transport)

    def data_received(self, data: bytes) -> None:
        """Pass on the events that are complete."""
        data = self._rest + data
        at, end, clients = 0, len(data), self._clients
        while end - at >= ENTRY.size:
            number, size = ENTRY.unpack_from(data, at)
            begin = at + ENTRY.size
            if end - begin < size:
                break
            at = begin + size
            clients[number].write(b"%x\r\n%b\r\n" % (size, data[begin:at]))
        self._rest = data[at:]


def chunk(data: bytes) -> bytes:
    """Return data as a chunk of a response; empty data ends it."""
    return b"%x\r\n%b\r\n" % (len(data), data)


async def listen(make: Callable[[], asyncio.Protocol]) -> tuple[asyncio.Server, int]:
    """Return a server and its port."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(make, HOST, 0, backlog=BACKLOG)
    return server, server.sockets[0].getsockname()[1]


def run_relay(commands: Connection) -> None:
    """Run the relay's process: send its ports for clients and for sources, then serve."""
    clients: dict[int, Any] = {}
    sources: list[Any] = []

    def on_stream(number: int, transport: Any) -> None:
        clients[number] = transport
        sources[number % len(sources)].write(array("H", [number]).tobytes())

    async def main() -> None:
        _, port = await listen(lambda: HttpProtocol(on_stream))
        _, source_port = await listen(lambda: RelayProtocol(clients, sources))
        commands.send((port, source_port))
        await asyncio.Event().wait()

    uvloop.run(main())  # as in the router


@contextmanager
def running_nginx(upstreams: Sequence[int], folder: Path) -> Iterator[tuple[int, int] | None]:
    """Run nginx as one process in front of HTTP servers, without buffering.

    Args:
        upstreams: their ports; requests go to them in turn.
        folder: for its files.

    Yields:
        Its port and process id, None if it is not installed.

    Raises:
        BenchError: it does not start.
    """
    program = shutil.which("nginx", path=NGINX_PATH)
    if program is None:
        yield None
        return
    folder.mkdir()
    port, config, log = late_port(), folder / "nginx.conf", folder / "nginx.log"
    servers = " ".join(f"server {HOST}:{each};" for each in upstreams)
    fields = {"folder": folder, "servers": servers, "host": HOST, "port": port}
    template = Template(NGINX_CONFIG.read_text(encoding="utf-8"))
    config.write_text(template.substitute(backlog=BACKLOG, **fields))
    with cluster.server([program, "-c", str(config)], log) as process:
        cluster.wait_ready(process, log, lambda: _accepts(port), START_TIMEOUT_S)
        yield port, process.pid


def _accepts(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((HOST, port)) == 0
