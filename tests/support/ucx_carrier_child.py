"""A process with one half of a KV link over UCX, which a test instructs and may stop or kill.

Run as `python -P -m pagewire.tests.support.ucx_carrier_child SLOTS SLOT_BYTES`. Each line of its
input is a command, each line of its output an event, the first one `ready`.

    offer LINK                        -> offer LINK HEX, or refused LINK REASON
    inbound LINK                      -> open LINK
    outbound LINK HEX                 -> open LINK, or refused LINK REASON
    send LINK CREDIT USE NBYTES       -> begun LINK USE, then sent LINK USE
    receive LINK CREDIT USE NBYTES    -> begun LINK USE, then intact or corrupt LINK USE
                                      either may end as failed LINK USE REASON instead
    after MS COMMAND                  carries the command out later, and polls meanwhile
    rest MS                           waits without polling
    close LINK                        -> closed LINK NUM_ABANDONED; a receiver then ended LINK

At the end of its input it closes all links and the carrier, and prints `end NUM_ABANDONED`.
"""

from __future__ import annotations

import queue
import sys
import threading
import time

import torch

from pagewire.shared.base.errors import TransferError
from pagewire.shared.engine.execution.block_mover import PendingMove
from pagewire.shared.transfer.carriers.base import DONE, Inbound, Outbound, Pending
from pagewire.shared.transfer.carriers.ucx import UcxCarrier
from pagewire.shared.transfer.carriers.ucx_settings import ucx_settings
from pagewire.shared.transfer.messages import Segment
from pagewire.shared.transfer.staging import make_staging

_POLL_S = 0.00005


def payload(link: int, use: int, nbytes: int) -> torch.Tensor:
    """Return bytes that differ from use to use and from place to place."""
    words = torch.arange(-(-nbytes // 4), dtype=torch.int32)
    return ((words * 2654435 + link * 1000003 + use * 7919) >> 3).view(torch.uint8)[:nbytes]


class _Silent:
    """Ignores announcements: the test sends them to the other process."""

    def post(self, segment: Segment, body: memoryview | None = None) -> Pending:
        return DONE


class _Half:
    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        self._staging = make_staging(num_slots, slot_bytes, torch.device("cpu"))
        self._carrier = UcxCarrier(self._staging, ucx_settings("127.0.0.1", cuda=False))
        self._outbound: dict[int, Outbound] = {}
        self._inbound: dict[int, Inbound] = {}
        self._quarantine: dict[int, Pending] = {}
        self._pending: list[tuple[str, int, Segment, Pending]] = []
        self._later: list[tuple[float, list[str]]] = []

    def do(self, words: list[str]) -> None:
        """Carry out a command."""
        verb, *rest = words
        if verb == "after":
            self._later.append((time.monotonic() + int(rest[0]) / 1e3, rest[1:]))
        elif verb == "rest":
            time.sleep(int(rest[0]) / 1e3)
        elif verb in ("send", "receive"):
            self._begin(verb, *map(int, rest))
        elif verb == "offer":
            self._offer(int(rest[0]))
        elif verb == "inbound":
            self._inbound[int(rest[0])] = self._carrier.inbound(int(rest[0]), b"")
            _say("open", rest[0])
        elif verb == "outbound":
            self._connect(int(rest[0]), bytes.fromhex(rest[1]))
        elif verb == "close":
            self._close(int(rest[0]))
        else:
            raise ValueError(f"unknown command {words}")

    def _offer(self, link: int) -> None:
        try:
            _say("offer", link, self._carrier.offer(link).hex())
        except TransferError as exc:
            _say("refused", link, exc)

    def _connect(self, link: int, offer: bytes) -> None:
        try:
            self._outbound[link] = self._carrier.outbound(link, offer, _Silent())
        except TransferError as exc:
            _say("refused", link, exc)
        else:
            _say("open", link)

    def _begin(self, verb: str, link: int, credit: int, use: int, nbytes: int) -> None:
        segment = Segment(credit, use, "job", 0, 1, 0, 1, 0, nbytes)
        try:
            if verb == "send":
                self._staging.buffers[credit][:nbytes] = payload(link, use, nbytes)
                pending = self._outbound[link].send(segment, credit, PendingMove(None))
                pending.is_done()  # it is packed, so this sends it
            else:
                pending = self._inbound[link].receive(segment, None)
        except TransferError as exc:
            _say("failed", link, use, exc)
        else:
            self._pending.append((verb, link, segment, pending))
            _say("begun", link, use)

    def _close(self, link: int) -> None:
        if link in self._outbound:
            self._outbound.pop(link).close()
        else:
            self._quarantine[link] = self._inbound.pop(link).close()
        self._pending = [entry for entry in self._pending if entry[1] != link]
        _say("closed", link, self._carrier.library.num_abandoned)

    def poll(self) -> None:
        """Poll the carrier, and print what has ended."""
        self._carrier.poll()
        now = time.monotonic()
        for entry in [entry for entry in self._later if entry[0] <= now]:
            self._later.remove(entry)
            self.do(entry[1])
        for pending in list(self._pending):
            self._check(*pending)
        for link in [link for link, ending in self._quarantine.items() if ending.is_done()]:
            del self._quarantine[link]
            _say("ended", link)

    def _check(self, verb: str, link: int, segment: Segment, pending: Pending) -> None:
        try:
            if not pending.is_done():
                return
        except TransferError as exc:
            _say("failed", link, segment.use, exc)
        else:
            _say(self._outcome(verb, link, segment), link, segment.use)
        self._pending.remove((verb, link, segment, pending))

    def _outcome(self, verb: str, link: int, segment: Segment) -> str:
        if verb == "send":
            return "sent"
        here = self._staging.buffers[segment.credit][: segment.nbytes]
        expected = payload(link, segment.use, segment.nbytes)
        return "intact" if torch.equal(here, expected) else "corrupt"

    def end(self) -> None:
        """Close everything."""
        for link in [*self._outbound, *self._inbound]:
            self._close(link)
        self._carrier.close()
        _say("end", self._carrier.library.num_abandoned)


def _say(*words: object) -> None:
    print(*words, flush=True)


def _read(lines: queue.Queue[str]) -> None:
    for line in sys.stdin:
        lines.put(line)
    lines.put("")


def _main(num_slots: int, slot_bytes: int) -> None:
    half = _Half(num_slots, slot_bytes)
    # Not a `SimpleQueue`: its `get` may wait for ever if so short a time-out passes meanwhile.
    lines: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_read, args=(lines,), daemon=True).start()
    _say("ready")
    while True:
        half.poll()
        try:
            line = lines.get(timeout=_POLL_S)
        except queue.Empty:
            continue
        if not line:
            break
        half.do(line.split())
    half.end()


if __name__ == "__main__":
    torch.set_num_threads(1)
    _main(int(sys.argv[1]), int(sys.argv[2]))
