"""The cells of the fault tests: a point of a transfer, a signal, and whose process gets it."""

from __future__ import annotations

import itertools
import signal
from dataclasses import dataclass, field

from pagewire.tests.support.fault_board import RECEIVER_POINTS, SENDER_POINTS

COUNTED = {  # how the sample's name starts
    "corrupt": 'pagewire_kv_transfer_segments_total{direction="received",outcome="corrupt"',
    "dropped": 'pagewire_kv_transfer_segments_total{direction="received",outcome="dropped"',
    "lost": 'pagewire_kv_transfer_segments_total{direction="sent",outcome="lost"',
    "stray": 'pagewire_kv_link_faults_total{kind="stray"',
}


@dataclass(frozen=True)
class Cell:
    """A point, a signal, and whose process gets it.

    Attributes:
        side: "sender" or "receiver".
    """

    point: str
    signal: signal.Signals
    side: str

    def __str__(self) -> str:
        return f"{self.point:12} {self.signal.name} {self.side:8}"

    @property
    def role(self) -> str:
        """Role of the worker that reaches the point."""
        return "prefill" if self.point in SENDER_POINTS else "decode"

    @property
    def is_to_peer(self) -> bool:
        """Whether the worker at the point signals the other one."""
        return (self.side == "sender") is (self.role == "decode")


CELLS = tuple(
    itertools.starmap(
        Cell,
        itertools.product(
            SENDER_POINTS + RECEIVER_POINTS,
            (signal.SIGKILL, signal.SIGSTOP),
            ("sender", "receiver"),
        ),
    )
)


def few_cells() -> list[Cell]:
    """Return a cell of each point, with each combination of signal and side twice."""
    return [CELLS[4 * index + index % 4] for index in range(8)]


@dataclass
class CellResult:
    """The result of a cell.

    Attributes:
        targets: workers that got the signal.
        num_reused: number of stopped senders that continued after another one had filled their
            staging slot.
        counts: increases of `COUNTED`; those of killed workers are lost.
        problem: why the cell failed; empty if it did not.
    """

    cell: str
    num_requests: int = 0
    seconds: float = 0.0
    targets: list[str] = field(default_factory=list)
    num_reused: int = 0
    counts: dict[str, float] = field(default_factory=dict)
    problem: str = ""

    def __str__(self) -> str:
        counts = " ".join(f"{name} {count:g}" for name, count in self.counts.items() if count)
        return (
            f"{self.cell} {','.join(self.targets):22} {self.num_requests:4d} requests "
            f"{self.seconds:5.1f} s reused {self.num_reused} {counts}"
            f"{'FAILED: ' + self.problem if self.problem else ''}"
        )
