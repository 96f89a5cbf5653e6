"""Routers that accept from one socket: who has no room leaves connections to the others."""

from __future__ import annotations

import asyncio
import socket

from pagewire.services.router.http.server.acceptor import Acceptor
from pagewire.shared.base.listener import bound_socket
from pagewire.tests.support.aio import eventually, run_async

CONNECTIONS = 64


class Taker(asyncio.Protocol):
    """Counts its connections."""

    def __init__(self, taken: list[Taker]) -> None:
        self._taken = taken

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._taken.append(self)
        transport.close()


class Side:
    """A router's part."""

    def __init__(self, listener: socket.socket, is_full: bool) -> None:
        self.taken: list[Taker] = []
        self.acceptor = Acceptor(listener, CONNECTIONS, lambda: Taker(self.taken), lambda: is_full)


async def connect(address: tuple[str, int]) -> None:
    _, writer = await asyncio.open_connection(*address)
    writer.close()
    await writer.wait_closed()


def taken(*are_full: bool) -> list[int]:
    """Return how many connections each side took."""

    async def main() -> list[int]:
        with bound_socket("127.0.0.1", 0) as listener:
            # Each router process has a file descriptor of its own.
            sockets = [listener.dup() for _ in are_full]
            sides = [Side(own, full) for own, full in zip(sockets, are_full, strict=True)]
            address = listener.getsockname()
            for _ in range(CONNECTIONS):
                await connect(address)
            await eventually(lambda: sum(len(each.taken) for each in sides) == CONNECTIONS)
            for side, own in zip(sides, sockets, strict=True):
                side.acceptor.close()
                await side.acceptor.wait_closed()
                own.close()
            return [len(each.taken) for each in sides]

    return run_async(main())


def test_both_take_connections() -> None:
    assert min(taken(False, False)) > CONNECTIONS // 8


def test_who_has_no_room_leaves_them_to_the_other() -> None:
    full, other = taken(True, False)
    assert full < CONNECTIONS // 8 < other


def test_where_nobody_has_room_they_are_taken_all_the_same() -> None:
    assert sum(taken(True, True)) == CONNECTIONS
