"""Opens silent connections to a port, in a process of its own, as each takes an open file.

    silent_crowd.py PORT COUNT REQUESTS

Each of COUNT connections first sends REQUESTS requests, one after another. The process then prints
"open", and at the end of its standard input the number of connections that the server had closed.
"""

from __future__ import annotations

import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPResponse

from pagewire.shared.base.open_files import raise_open_file_limit
from pagewire.tests.support.raw_http import GET


class SilentCrowd:
    """A running process with silent connections."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def leave(self) -> int:
        """End the process; returns the number of connections that the server had closed."""
        closed, _ = self._process.communicate(timeout=30)
        return int(closed)


@contextmanager
def silent_crowd(port: int, count: int, requests: int = 0) -> Iterator[SilentCrowd]:
    """Open `count` connections that are silent after `requests` requests each."""
    command = [sys.executable, "-P", "-m", __name__, str(port), str(count), str(requests)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "open\n"
            yield SilentCrowd(process)
        finally:
            process.kill()


def _main(port: int, count: int, requests: int) -> None:
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
    print("open", flush=True)
    sys.stdin.read()
    poll = select.poll()
    for each in crowd:
        poll.register(each, select.POLLIN)
    print(len(poll.poll(0)))


if __name__ == "__main__":
    _main(*map(int, sys.argv[1:]))
