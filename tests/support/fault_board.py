"""Files in a directory through which a test orders faults in the workers of a cluster.

The test writes an order for a worker; a worker that reaches the ordered point of a transfer carries
it out. Each event is one line of JSON in `events`.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SIGNAL_TIMEOUT_S = 5.0
# Time for a sender that continues to write its remaining bytes; the receiver's engine waits.
LATE_WRITE_S = 0.1

SENDER_POINTS = ("exported", "packed", "staged", "announced")
RECEIVER_POINTS = ("arrived", "unpacking", "unpacked", "acknowledged")


@dataclass(frozen=True)
class Order:
    """A fault that one worker is to cause, once.

    Attributes:
        number: unique number of the order.
        point: point of a transfer; see `fault_points`.
        passes: number of segments that pass the point before.
        signal: signal that is sent to a process.
        to_peer: send it to the process at the other end of the link, else to the worker itself.
        until_reused: a stopped sender continues when another sender has filled its staging slot,
            before that is unpacked.
    """

    number: int
    point: str
    passes: int
    signal: int
    to_peer: bool
    until_reused: bool = False


@dataclass(frozen=True)
class Segment:
    """The processes and the staging slot of a segment.

    Attributes:
        sender, receiver: process ids.
        credit: the receiver's staging slot; -1 before there is one.
    """

    sender: int
    receiver: int
    credit: int = -1


class FaultBoard:
    """The directory, for test and workers."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._events, self._held = directory / "events", directory / "held"

    def post(self, worker: str, order: Order) -> None:
        """Give a worker an order; it replaces an earlier one."""
        _write(self._order(worker), asdict(order))

    def withdraw(self, worker: str) -> None:
        """Withdraw an order, unless it is already being carried out."""
        self._order(worker).unlink(missing_ok=True)

    def order(self, worker: str) -> Order | None:
        """Return a worker's order."""
        found = _read(self._order(worker))
        return None if found is None else Order(**found)

    def hold(self, segment: Segment) -> None:
        """Record a stopped sender that continues when its staging slot is used again."""
        _write(self._held, asdict(segment))

    def held(self) -> Segment | None:
        """Return the segment that `hold` recorded."""
        found = _read(self._held)
        return None if found is None else Segment(**found)

    def release(self) -> None:
        """Forget the segment that `hold` recorded."""
        self._held.unlink(missing_ok=True)

    def note(self, event: str, **fields: Any) -> None:
        """Append an event, with this process's id and the monotonic time."""
        line = json.dumps({"event": event, "by": os.getpid(), "at": time.monotonic(), **fields})
        with self._events.open("ab", buffering=0) as file:
            file.write(line.encode() + b"\n")

    def events(self) -> list[dict[str, Any]]:
        """Return what has happened so far."""
        if not self._events.exists():
            return []
        lines = self._events.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def _order(self, worker: str) -> Path:
        return self._directory / f"order-{worker}"


class Points:
    """Carries out the orders of one worker; one thread uses it."""

    def __init__(self, board: FaultBoard, worker: str) -> None:
        self.board, self._worker = board, worker
        self._number, self._passes = -1, 0

    def reach(self, point: str, segment: Segment) -> None:
        """Carry out the order, if there is one for this point."""
        order = self.board.order(self._worker)
        if order is None or order.point != point:
            return
        if order.number != self._number:
            self._number, self._passes = order.number, 0
        self._passes += 1
        if self._passes > order.passes:
            self.board.withdraw(self._worker)
            self._carry_out(order, segment)

    def _carry_out(self, order: Order, segment: Segment) -> None:
        own = os.getpid()
        (peer,) = {segment.sender, segment.receiver} - {own}
        target = peer if order.to_peer else own
        if order.until_reused and segment.credit >= 0:
            self.board.hold(segment)
        self.board.note("fired", order=order.number, target=target, **asdict(segment))
        if order.to_peer:
            os.kill(target, order.signal)
            _wait_until_signalled(target)
        else:  # to this thread, so that it stops here; the kernel might choose another one
            signal.pthread_kill(threading.get_ident(), order.signal)

    def on_arrival(self, segment: Segment) -> None:
        """After a staging slot is filled: let a stopped sender that had it before write to it."""
        held = self.board.held()
        is_same_slot = held is not None and held.receiver == segment.receiver
        if not is_same_slot or held.credit != segment.credit or held.sender == segment.sender:
            return
        self.board.release()
        self.board.note("reused", **asdict(held))
        os.kill(held.sender, signal.SIGCONT)
        time.sleep(LATE_WRITE_S)


def _wait_until_signalled(pid: int) -> None:
    """Wait until a process has been stopped or has ended."""
    deadline = time.monotonic() + SIGNAL_TIMEOUT_S
    while process_state(pid) not in ("T", "Z", "X", ""):
        if time.monotonic() > deadline:
            raise TimeoutError(f"process {pid} is not affected by a signal")
        time.sleep(0.0005)


def process_state(pid: int) -> str:
    """Return the letter of /proc for a process; "" if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def _write(path: Path, value: Any) -> None:
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(value))
    draft.rename(path)


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None
