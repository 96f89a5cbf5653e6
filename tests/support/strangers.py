"""Strangers that connect to a port, send something and leave, in each way that a client can."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Iterator

FLOOD = 48  # connections at once
CALL_S = 2.0
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing drops what was not sent, and resets
Manner = Callable[[asyncio.StreamReader, asyncio.StreamWriter, bytes], Awaitable[None]]

_REFUSALS = (OSError, TimeoutError)  # the server may end a connection at any point


class Stranger:
    """Connects to one port again and again.

    Attributes:
        visits: number of visits so far, also of those that the port did not accept.
    """

    def __init__(self, host: str, port: int, payloads: Iterator[bytes], rng: random.Random) -> None:
        self.host, self.port = host, port
        self.visits = 0
        self._payloads, self._rng = payloads, rng

    async def visit_until(self, deadline: float) -> None:
        """Visit until `time.monotonic()` reaches `deadline`."""
        manners = (self._say, self._say, self._hear, self._hesitate, self._hold, self._reset)
        while time.monotonic() < deadline:
            self.visits += 1
            if self._rng.random() < 0.01:
                await self._flood()
            else:
                await self._visit(self._rng.choice(manners), next(self._payloads))
            await asyncio.sleep(self._rng.uniform(0, 0.04))

    async def _visit(self, manner: Manner, payload: bytes) -> None:
        try:
            async with asyncio.timeout(CALL_S):
                reader, writer = await asyncio.open_connection(self.host, self.port)
        except _REFUSALS:
            return
        try:
            with contextlib.suppress(*_REFUSALS):
                async with asyncio.timeout(CALL_S):
                    await manner(reader, writer, payload)
        finally:
            if manner == self._reset:
                writer.transport.abort()
            else:
                writer.close()

    async def _say(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, payload: bytes
    ) -> None:
        writer.write(payload)
        await writer.drain()

    async def _hear(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, payload: bytes
    ) -> None:
        """Send all, half of the time also the end of the stream, and read the answer."""
        writer.write(payload)
        await writer.drain()
        if self._rng.random() < 0.5:
            writer.write_eof()
        async with asyncio.timeout(0.3):
            while await reader.read(1 << 16):
                pass

    async def _hesitate(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, payload: bytes
    ) -> None:
        """Send the beginning, a few bytes at a time."""
        for at in range(0, min(len(payload), 200), 7):
            writer.write(payload[at : at + 7])
            await writer.drain()
            await asyncio.sleep(0.03)

    async def _hold(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, payload: bytes
    ) -> None:
        """Send a part, and keep the connection open."""
        writer.write(payload[: self._rng.randint(0, len(payload))])
        await writer.drain()
        await asyncio.sleep(self._rng.uniform(0.1, CALL_S))

    async def _reset(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, payload: bytes
    ) -> None:
        connection = writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        writer.write(payload)

    async def _flood(self) -> None:
        """Open many silent connections at once."""

        async def open_one() -> None:
            with contextlib.suppress(*_REFUSALS):
                async with asyncio.timeout(CALL_S):
                    _, writer = await asyncio.open_connection(self.host, self.port)
                    try:
                        await asyncio.sleep(0.3)
                    finally:
                        writer.close()

        await asyncio.gather(*(open_one() for _ in range(FLOOD)))
