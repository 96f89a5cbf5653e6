"""Shows progress of loading weights: a bar on a terminal, else a line every few seconds."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

BAR_S = 1.0  # the bar appears after this time
LINE_S = 5.0  # time between two lines
GB = 1e9


def quiet(_line: str) -> None:
    """Show nothing: another process shows the progress."""


class LoadProgress:
    """Counts loaded bytes and shows the progress.

    Attributes:
        what: name of the work, such as "loading weights".
        total: number of bytes to load.
        seconds: duration, set at the end of the context.
    """

    def __init__(
        self,
        what: str,
        total: int,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin at zero.

        Args:
            what: name of the work.
            total: number of bytes to load.
            say: called with a line every `LINE_S` if stderr is not a terminal; `quiet` shows
                nothing at all.
            clock: returns the time in seconds.
        """
        self.what, self.total, self.seconds = what, total, 0.0
        self._say, self._clock = say, clock
        self._done = 0
        self._start = self._reported_at = clock()
        self._lock = threading.Lock()
        self._bar: Progress | None = None
        if say is not quiet and sys.stderr.isatty():
            self._bar = _make_bar(what)
            self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> LoadProgress:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.seconds = self._clock() - self._start
        if self._bar is not None and self._bar.live.is_started:
            self._bar.stop()

    def add(self, num_bytes: int) -> None:
        """Count loaded bytes; any thread may call it."""
        with self._lock:
            self._done += num_bytes
            now = self._clock()
            if self._bar is not None:
                if not self._bar.live.is_started and now - self._start >= BAR_S:
                    self._bar.start()
                self._bar.update(self._task, completed=self._done)
                return
            if now - self._reported_at >= LINE_S:
                self._reported_at = now
                self._say(self._line(now))

    def _line(self, now: float) -> str:
        left = (now - self._start) * (self.total / max(self._done, 1) - 1)
        done, total = self._done / GB, self.total / GB
        return f"{self.what}: {done:.1f} of {total:.1f} GB, {left:.0f} s left"

    @property
    def summary(self) -> str:
        """How much was loaded, how long it took and how fast it was."""
        rate = self.total / GB / max(self.seconds, 1e-6)
        return f"{self.total / GB:.2f} GB in {self.seconds:.1f} s ({rate:.1f} GB/s)"


def _make_bar(what: str) -> Progress:
    from rich import progress  # not needed without a terminal
    from rich.console import Console

    return progress.Progress(
        progress.TextColumn(what),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
