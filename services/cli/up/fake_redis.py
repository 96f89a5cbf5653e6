"""A stand-in for Redis in a separate process, for machines without a Redis server.

    python -P -m pagewire.services.cli.up.fake_redis SOCKET

It listens only on a Unix socket, because it has no password and runs the Lua code that a client
sends. It is meant for trying Pagewire out: it is slow and keeps everything in memory.
"""

from __future__ import annotations

import itertools
import select
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from fakeredis import TcpFakeServer

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

SEND_TIMEOUT_S = 10.0


class _Connection(socket.socket):
    """Sends replies of any length, although fakeredis makes its connections non-blocking."""

    def sendall(self, data: ReadableBuffer, flags: int = 0) -> None:
        """Send all, waiting for a client that reads slowly.

        Raises:
            ConnectionError: it reads nothing for `SEND_TIMEOUT_S`.
        """
        rest = memoryview(data)
        while rest:
            if not select.select([], [self], [], SEND_TIMEOUT_S)[1]:
                raise ConnectionError("the client does not read")
            rest = rest[self.send(rest, flags) :]


class UnixFakeServer(TcpFakeServer):  # type: ignore[misc]  # not checked, see pyproject.toml
    """fakeredis's server on a Unix socket, open to all users who may enter the socket's directory.

    Args:
        path: of the socket; one that an earlier process has left there is replaced.
    """

    address_family = socket.AF_UNIX

    def __init__(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self._connections = itertools.count()
        super().__init__(str(path), server_type="redis")
        self.daemon_threads = True  # a signal ends the process at once, clients or not

    def get_request(self) -> tuple[socket.socket, str]:
        """Accept a connection and name it: fakeredis keeps its clients by their addresses."""
        accepted, _ = self.socket.accept()
        return _Connection(fileno=accepted.detach()), f"unix:{next(self._connections)}"


def main(argv: list[str]) -> None:
    """Serve Redis's protocol on a Unix socket until the process is killed."""
    server = UnixFakeServer(Path(argv[1]))
    print(f"embedded Redis on {argv[1]}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main(sys.argv)
