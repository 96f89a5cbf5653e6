"""The other end of `child_process.py`: a process that serves one socket, the router's."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from pagewire.shared.base.errors import ChannelError

NICENESS = 5  # where cores are few, streams go first


def run(serve: Callable[[socket.socket], None]) -> int:
    """Serve until the router closes the connection, whose file descriptor is the one argument."""
    os.nice(NICENESS)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # which a parent may have had ignored
    with (
        socket.socket(fileno=int(sys.argv[1])) as connection,
        contextlib.suppress(ChannelError, ConnectionError),
    ):
        serve(connection)
    return 0


def memory_bytes() -> int:
    """Return how much memory this process holds; 0 where the system does not say it."""
    try:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    except OSError:
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def limit_cpu(seconds: float) -> None:
    """Let the kernel end this process after so much CPU time from now on; 0: never."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


@contextlib.contextmanager
def added_memory(most_bytes: int) -> Iterator[None]:
    """Bound what the block adds to the memory of this process, where the system can.

    Beyond that, Python raises a MemoryError, and libraries in other languages end the process with
    SIGABRT. Memory that is only reserved, or that is mapped from files, does not count.
    """
    try:
        held = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[5])
    except OSError:
        yield
        return
    before, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = held * resource.getpagesize() + most_bytes
    if before == resource.RLIM_INFINITY or limit < before:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (before, hard))
