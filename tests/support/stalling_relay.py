"""A relay for TCP connections that passes nothing on while it is stalled, like a broken network."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pagewire.tests.support.aio import until_one_ends

HOST = "127.0.0.1"
_CHUNK = 1 << 16


class StallingRelay:
    """Passes bytes on, both ways.

    Attributes:
        endpoint: address to connect to.
        flows: while it is cleared, nothing is passed on; connections stay open.
    """

    endpoint: str

    def __init__(self) -> None:
        self.flows = asyncio.Event()
        self.flows.set()

    async def _copy(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while data := await source.read(_CHUNK):
            await self.flows.wait()
            target.write(data)

    async def serve(
        self, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Relay one connection."""
        there, onward = await asyncio.open_connection(HOST, port)
        try:
            await until_one_ends(self._copy(reader, onward), self._copy(there, writer))
        finally:
            for each in (onward, writer):
                each.close()
                with contextlib.suppress(OSError):
                    await each.wait_closed()


@asynccontextmanager
async def stalling_relay(endpoint: str) -> AsyncIterator[StallingRelay]:
    """Relay connections to a port of this machine."""
    relay, connections = StallingRelay(), set[asyncio.Task[None]]()
    port = int(endpoint.rpartition(":")[2])

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.add(asyncio.ensure_future(relay.serve(port, reader, writer)))

    server = await asyncio.start_server(accept, HOST, 0)
    relay.endpoint = f"tcp://{HOST}:{server.sockets[0].getsockname()[1]}"
    try:
        yield relay
    finally:
        server.close()
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)
