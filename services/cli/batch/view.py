"""Shows a batch's progress: as a bar on a terminal, as plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from pagewire.services.cli.batch.sender import BatchSender
from pagewire.services.cli.terminal import can_redraw, note, printable, run_watched

REFRESH_S = 0.2


@dataclass
class Tally:
    """The requests of a batch so far.

    Attributes:
        before: requests that earlier runs answered.
        ok, failed: requests of this run that succeeded and failed.
        started: start of this run, by `time.monotonic`.
    """

    total: int
    before: int
    ok: int = 0
    failed: int = 0
    started: float = field(default_factory=time.monotonic)

    @property
    def done(self) -> int:
        """Number of requests that have an output line."""
        return self.before + self.ok + self.failed

    def describe(self) -> str:
        """Return one line: how many requests are done, their rate, and the remaining time."""
        parts = [f"{self.done:,} of {self.total:,} done"]
        if self.failed:
            parts.append(f"{self.failed:,} failed")
        seconds = time.monotonic() - self.started
        if (now := self.ok + self.failed) and seconds > 0:
            parts.append(f"{now / seconds:,.1f} requests/s")
            if self.done < self.total:
                parts.append(f"{_duration((self.total - self.done) * seconds / now)} left")
        return ", ".join(parts)


async def run_with_progress(
    work: Coroutine[Any, Any, None], tally: Tally, sender: BatchSender, every_s: float
) -> None:
    """Run the work to its end, and show its progress on stderr.

    Args:
        work: sends the requests and updates the tally.
        tally: the batch's tally.
        sender: the batch's sender.
        every_s: seconds between two lines, if stderr is not a terminal.
    """
    console = Console(stderr=True)
    if can_redraw(console):
        columns = (BarColumn(), TextColumn("{task.description}", markup=False))
        with Progress(*columns, console=console) as bar:
            task = bar.add_task("", total=tally.total)

            def redraw() -> None:
                bar.update(task, completed=tally.done, description=_status(tally, sender))

            await run_watched(work, redraw, REFRESH_S)
            redraw()
    else:
        await run_watched(work, lambda: note(_status(tally, sender)), every_s)


def _status(tally: Tally, sender: BatchSender) -> str:
    waiting = f"; {sender.waiting} to be sent again ({sender.trouble})" if sender.waiting else ""
    return printable(f"{tally.describe()}, {sender.in_flight} in flight{waiting}")


def _duration(seconds: float) -> str:
    """Return a time in two readable units."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
