"""The test's side of `ucx_carrier_child`: two processes with a KV link over UCX between them."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

MIB = 1 << 20
_START_S = 60.0  # a process imports torch, on a busy machine
_TIMEOUT_S = 20.0


class Half:
    """A process with one half of links."""

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        command = (sys.executable, "-P", "-m", "pagewire.tests.support.ucx_carrier_child")
        self.process = subprocess.Popen(
            [*command, str(num_slots), str(slot_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self._events: queue.Queue[list[str]] = queue.Queue()
        self._unread: list[list[str]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._events.put(line.split())

    def do(self, *words: object) -> None:
        """Send a command."""
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()

    def wait(self, *words: object, timeout: float = _TIMEOUT_S) -> list[str]:
        """Return the next event that begins with these words; other events stay unread."""
        wanted, deadline = [str(word) for word in words], time.monotonic() + timeout
        while True:
            for event in self._unread:
                if event[: len(wanted)] == wanted:
                    self._unread.remove(event)
                    return event
            try:
                self._unread.append(self._events.get(timeout=deadline - time.monotonic()))
            except (queue.Empty, ValueError):
                state = self.process.poll()
                raise AssertionError(f"no {wanted} but {self._unread}; exit code {state}") from None

    def signal(self, number: int) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def end(self) -> int:
        """Close the process's input and wait for its end; returns its exit code."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(_TIMEOUT_S)

    def kill(self) -> None:
        """Kill it, unless it has ended."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait(_TIMEOUT_S)
        self._reader.join(_TIMEOUT_S)
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


@contextmanager
def two_halves(num_slots: int = 4, slot_bytes: int = MIB) -> Iterator[tuple[Half, Half]]:
    """Start a sender and a receiver without a link; they are killed at the end."""
    halves: list[Half] = []
    try:
        for _ in range(2):
            halves.append(Half(num_slots, slot_bytes))
        for half in halves:
            half.wait("ready", timeout=_START_S)
        yield halves[0], halves[1]
    finally:
        for half in halves:
            half.kill()


def connect(sender: Half, receiver: Half, link: int) -> None:
    """Open a link between them."""
    receiver.do("offer", link)
    offer = receiver.wait("offer", link)[2]
    sender.do("outbound", link, offer)
    sender.wait("open", link)
    receiver.do("inbound", link)
    receiver.wait("open", link)


def cross(sender: Half, receiver: Half, link: int, use: int, nbytes: int, credit: int = 0) -> None:
    """Send a payload, and check that it arrives intact."""
    for half, verb in ((sender, "send"), (receiver, "receive")):
        half.do(verb, link, credit, use, nbytes)
    receiver.wait("intact", link, use)
    sender.wait("sent", link, use)
