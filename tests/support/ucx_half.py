"""Processes with one half of a KV link over UCX each, which a test instructs and may stop or kill.

A command is a method of `_Transport` and its arguments. These are the events, each a list of words.

    offer LINK                        -> offer LINK HEX, or refused LINK REASON
    inbound LINK                      -> open LINK
    outbound LINK HEX                 -> open LINK, or refused LINK REASON
    send LINK CREDIT USE NBYTES       -> begun LINK USE, then sent LINK USE
    receive LINK CREDIT USE NBYTES    -> begun LINK USE, then intact or corrupt LINK USE
                                      either may end as failed LINK USE REASON instead
    after MS COMMAND                  carries the command out later, and polls meanwhile
    rest MS                           waits without polling
    close LINK                        -> closed LINK NUM_ABANDONED; a receiver then ended LINK
    end                               closes all links and the transport
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection

import torch

from pagewire.shared.base.errors import TransferError
from pagewire.shared.engine.execution.block_mover import PendingMove
from pagewire.shared.transfer.messages import Segment
from pagewire.shared.transfer.staging import make_staging
from pagewire.shared.transfer.transports.base import DONE, Inbound, Outbound, Pending
from pagewire.shared.transfer.transports.ucx import UcxTransport
from pagewire.shared.transfer.transports.ucx_settings import ucx_settings
from pagewire.tests.support.child_process import REPLY_S, Child, child_process

MIB = 1 << 20
_TIMEOUT_S = 20.0
_POLL_S = 0.00005


class Half:
    """A process with one half of links."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self._unread: list[list[str]] = []
        self.signal, self.kill = child.signal, child.kill

    def do(self, *words: object) -> None:
        """Send a command."""
        self._child.pipe.send(words)

    def wait(self, *words: object, timeout: float = _TIMEOUT_S) -> list[str]:
        """Return the next event that begins with these words; other events stay unread."""
        wanted, deadline = [str(word) for word in words], time.monotonic() + timeout
        while True:
            for event in self._unread:
                if event[: len(wanted)] == wanted:
                    self._unread.remove(event)
                    return event
            try:
                self._unread.append(self._child.receive(max(0, deadline - time.monotonic())))
            except (AssertionError, EOFError):
                state = self._child.process.exitcode
                raise AssertionError(f"no {wanted} but {self._unread}; exit code {state}") from None

    def end(self) -> int:
        """Have the process close everything, and wait for its end; returns its exit code."""
        self.do("end")
        self._child.process.join(_TIMEOUT_S)
        code: int = self._child.process.exitcode
        return code


@contextmanager
def two_halves(num_slots: int = 4, slot_bytes: int = MIB) -> Iterator[tuple[Half, Half]]:
    """Start a sender and a receiver without a link; they are killed at the end."""
    with ExitStack() as stack:
        # Spawned ones go through the end of an interpreter, as workers do.
        sender, receiver = (
            Half(stack.enter_context(child_process(_main, num_slots, slot_bytes, method="spawn")))
            for _ in range(2)
        )
        for half in (sender, receiver):
            half.wait("ready", timeout=REPLY_S)
        yield sender, receiver


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


# The process


def _payload(link: int, use: int, nbytes: int) -> torch.Tensor:
    """Return bytes that differ from use to use and from place to place."""
    words = torch.arange(-(-nbytes // 4), dtype=torch.int32)
    return ((words * 2654435 + link * 1000003 + use * 7919) >> 3).view(torch.uint8)[:nbytes]


class Silent:
    """Ignores announcements: the test sends them to the other process."""

    peer = "the other process"

    def post(self, segment: Segment, body: memoryview | None = None) -> Pending:
        return DONE


class _Transport:
    """Carries out the commands, which have the names of its public methods."""

    def __init__(self, pipe: Connection, num_slots: int, slot_bytes: int) -> None:
        self._pipe = pipe
        self._staging = make_staging(num_slots, slot_bytes, torch.device("cpu"))
        self._transport = UcxTransport(self._staging, ucx_settings("127.0.0.1", cuda=False))
        self._outbound: dict[int, Outbound] = {}
        self._inbound: dict[int, Inbound] = {}
        self._quarantine: dict[int, Pending] = {}
        self._pending: list[tuple[bool, int, Segment, Pending]] = []
        self._later: list[tuple[float, str, tuple[int, ...]]] = []
        self.has_ended = False
        self._say("ready")

    def do(self, command: str, *args: int) -> None:
        getattr(self, command)(*args)

    def after(self, ms: int, command: str, *args: int) -> None:
        self._later.append((time.monotonic() + ms / 1e3, command, args))

    def rest(self, ms: int) -> None:
        time.sleep(ms / 1e3)

    def offer(self, link: int) -> None:
        try:
            self._say("offer", link, self._transport.offer(link).hex())
        except TransferError as exc:
            self._say("refused", link, exc)

    def inbound(self, link: int) -> None:
        self._inbound[link] = self._transport.inbound(link, b"")
        self._say("open", link)

    def outbound(self, link: int, offer: str) -> None:
        try:
            self._outbound[link] = self._transport.outbound(link, bytes.fromhex(offer), Silent())
        except TransferError as exc:
            self._say("refused", link, exc)
        else:
            self._say("open", link)

    def send(self, *numbers: int) -> None:
        self._begin(True, *numbers)

    def receive(self, *numbers: int) -> None:
        self._begin(False, *numbers)

    def _begin(self, sends: bool, link: int, credit: int, use: int, nbytes: int) -> None:
        segment = Segment(credit, use, "job", 0, 1, 0, 1, 0, nbytes)
        try:
            if sends:
                self._staging.buffers[credit][:nbytes] = _payload(link, use, nbytes)
                pending = self._outbound[link].send(segment, credit, PendingMove(None))
                pending.poll()  # it is packed, so this sends it
            else:
                pending = self._inbound[link].receive(segment, None)
        except TransferError as exc:
            self._say("failed", link, use, exc)
        else:
            self._pending.append((sends, link, segment, pending))
            self._say("begun", link, use)

    def close(self, link: int) -> None:
        if link in self._outbound:
            self._outbound.pop(link).close()
        else:
            self._quarantine[link] = self._inbound.pop(link).close()
        self._pending = [entry for entry in self._pending if entry[1] != link]
        self._say("closed", link, self._transport.library.num_abandoned)

    def end(self) -> None:
        for link in [*self._outbound, *self._inbound]:
            self.close(link)
        self._transport.close()
        self.has_ended = True

    def poll(self) -> None:
        """Poll the transport, and say what has ended."""
        self._transport.poll()
        now = time.monotonic()
        for entry in [entry for entry in self._later if entry[0] <= now]:
            self._later.remove(entry)
            self.do(entry[1], *entry[2])
        for pending in list(self._pending):
            self._check(*pending)
        for link in [link for link, ending in self._quarantine.items() if ending.poll()]:
            del self._quarantine[link]
            self._say("ended", link)

    def _check(self, sends: bool, link: int, segment: Segment, pending: Pending) -> None:
        try:
            if not pending.poll():
                return
        except TransferError as exc:
            self._say("failed", link, segment.use, exc)
        else:
            self._say("sent" if sends else self._content(link, segment), link, segment.use)
        self._pending.remove((sends, link, segment, pending))

    def _content(self, link: int, segment: Segment) -> str:
        here = self._staging.buffers[segment.credit][: segment.nbytes]
        expected = _payload(link, segment.use, segment.nbytes)
        return "intact" if torch.equal(here, expected) else "corrupt"

    def _say(self, *words: object) -> None:
        self._pipe.send(" ".join(map(str, words)).split())


def _main(pipe: Connection, num_slots: int, slot_bytes: int) -> None:
    torch.set_num_threads(1)
    transport = _Transport(pipe, num_slots, slot_bytes)
    while not transport.has_ended:
        transport.poll()
        if pipe.poll(_POLL_S):
            transport.do(*pipe.recv())
