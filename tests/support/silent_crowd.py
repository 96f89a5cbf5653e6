"""Opens silent connections to a port, in a process of its own, as each takes an open file."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPResponse
from multiprocessing.connection import Connection

from pagewire.shared.base.open_files import raise_open_file_limit
from pagewire.tests.support.child_process import Child, child_process
from pagewire.tests.support.raw_http import GET


class SilentCrowd:
    """A running process with silent connections."""

    def __init__(self, child: Child) -> None:
        self._child = child

    def leave(self) -> int:
        """End the process; returns the number of connections that the server had closed."""
        self._child.pipe.send("leave")
        num_closed: int = self._child.receive()
        self._child.kill()
        return num_closed


@contextmanager
def silent_crowd(port: int, count: int, requests: int = 0) -> Iterator[SilentCrowd]:
    """Open `count` connections that are silent after `requests` requests each."""
    with child_process(_open, port, count, requests, method="spawn") as child:
        assert child.receive() == "open"
        yield SilentCrowd(child)


def _open(pipe: Connection, port: int, count: int, requests: int) -> None:
    raise_open_file_limit()
    crowd = [socket.create_connection(("127.0.0.1", port), timeout=20) for _ in range(count)]
    for _ in range(requests):
        for each in crowd:
            each.sendall(GET)
        for each in crowd:
            response = HTTPResponse(each)
            response.begin()
            assert (response.status, bool(response.read())) == (200, True)
            response.close()
    pipe.send("open")
    pipe.recv()
    poll = select.poll()
    for each in crowd:
        poll.register(each, select.POLLIN)
    pipe.send(len(poll.poll(0)))
