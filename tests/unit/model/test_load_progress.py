"""The progress of loading, in lines: where stderr is not a terminal."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Iterator

from pagewire.shared.model.load_progress import LINE_S, LoadProgress

BAR = """
from pagewire.shared.model.load_progress import BAR_S, LoadProgress
clock = iter((0.0, BAR_S, 2 * BAR_S)).__next__
with LoadProgress("loading weights", 4_000_000_000, lines.append, clock) as progress:
    progress.add(1_000_000_000)
"""


def clock_of(*times: float) -> Iterator[float]:
    yield from times


def test_lines_come_now_and_then_and_say_how_long_it_takes() -> None:
    times = clock_of(100.0, 102.0, 100.0 + LINE_S, 101.0 + LINE_S, 100.0 + 2 * LINE_S, 120.0)
    said: list[str] = []
    with LoadProgress("loading weights", 16_000_000_000, said.append, times.__next__) as progress:
        for _ in range(4):
            progress.add(2_000_000_000)
    assert said == [
        "loading weights: 4.0 of 16.0 GB, 15 s left",
        "loading weights: 8.0 of 16.0 GB, 10 s left",
    ]
    assert progress.summary == "16.00 GB in 20.0 s (0.8 GB/s)"


def test_a_short_load_says_nothing() -> None:
    said: list[str] = []
    with LoadProgress("loading weights", 2, said.append) as progress:
        progress.add(1)
        progress.add(1)
    assert said == []


def test_a_terminal_gets_a_bar_with_bytes_and_time_left() -> None:
    ours, theirs = pty.openpty()
    code = f"lines = []\n{BAR}\nassert not lines"
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], stderr=theirs, timeout=60, check=False, env=environment
    )
    os.close(theirs)
    shown = os.read(ours, 65536).decode()
    os.close(ours)
    assert done.returncode == 0, shown
    assert "loading weights" in shown
    assert "1.0/4.0 GB" in shown
