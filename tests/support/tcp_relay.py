"""Records a cluster's own TCP traffic: its services reach each other through relays.

The services announce 127.0.0.2 (`RELAYED_ENV`) and listen on 127.0.0.1. As soon as one listens on a
port, a relay listens on the same port of 127.0.0.2 and passes all bytes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from pagewire.tests.support.aio import until_one_ends

RELAY_HOST, REAL_HOST = "127.0.0.2", "127.0.0.1"
RELAYED_ENV = {"PAGEWIRE_ADVERTISE_HOST": RELAY_HOST}
_POLL_S = 0.02
_CHUNK = 1 << 16
_BYTES_KEPT = 1 << 15  # of each direction of a connection
_STREAMS_KEPT = 40  # a port


class Recorder:
    """Relays connections and keeps the first bytes of each."""

    def __init__(self) -> None:
        self._streams: defaultdict[int, list[bytearray]] = defaultdict(list)
        self._servers: dict[int, asyncio.Server] = {}
        self._connections: set[asyncio.Task[None]] = set()

    def recorded(self) -> dict[int, list[bytes]]:
        """Return the first bytes of each direction of the connections to each port, so far."""
        streams = list(self._streams.items())
        return {port: [bytes(each) for each in seen if each] for port, seen in streams}

    async def run(self, ports: Callable[[], Iterable[int]], stop: asyncio.Event) -> None:
        """Relay for all ports, also those that come later, until `stop` is set."""
        try:
            while not stop.is_set():
                for port in set(await asyncio.to_thread(ports)) - set(self._servers):
                    self._servers[port] = await self._relay(port)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), _POLL_S)
        finally:
            for server in self._servers.values():
                server.close()
            for task in self._connections:
                task.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)

    async def _relay(self, port: int) -> asyncio.Server:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._connections.add(task)
            try:
                with contextlib.suppress(OSError, asyncio.CancelledError):  # an end has gone, or we
                    await self._connect(port, reader, writer)
            finally:
                writer.close()
                self._connections.discard(task)

        return await asyncio.start_server(serve, RELAY_HOST, port)

    async def _connect(
        self, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        there, onward = await asyncio.open_connection(REAL_HOST, port)
        try:
            await until_one_ends(self._copy(port, reader, onward), self._copy(port, there, writer))
        finally:
            onward.close()

    async def _copy(
        self, port: int, source: asyncio.StreamReader, target: asyncio.StreamWriter
    ) -> None:
        kept = bytearray()
        if len(self._streams[port]) < _STREAMS_KEPT:
            self._streams[port].append(kept)
        while data := await source.read(_CHUNK):
            kept += data[: _BYTES_KEPT - len(kept)]
            target.write(data)
            await target.drain()


@contextmanager
def recording(ports: Callable[[], Iterable[int]]) -> Iterator[Recorder]:
    """Relay and record in a thread of its own.

    Args:
        ports: returns the ports on which the cluster listens now.
    """
    recorder, loop, stop = Recorder(), asyncio.new_event_loop(), asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(recorder.run(ports, stop),))
    thread.start()
    try:
        yield recorder
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        loop.close()
