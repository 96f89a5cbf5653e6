"""A progress bar for the offline `LLM`, on stderr."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

UPDATE_S = 0.1


class GenerationProgress:
    """Shows how many answers are done and tokens per second, if stderr is a terminal."""

    def __init__(self, total: int, wanted: bool) -> None:
        self._bar: Progress | None = None
        if not (wanted and sys.stderr.isatty()):
            return  # constructing a bar takes longer than a short answer on a GPU
        self._bar = Progress(
            TextColumn("answers"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[speed]}"),
            console=Console(stderr=True),
        )
        self._task = self._bar.add_task("", total=total, speed="")
        self._done = self._prompt_tokens = self._output_tokens = 0
        self._start = self._shown = time.monotonic()

    def __enter__(self) -> GenerationProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._bar is not None:
            self._show(self._bar, time.monotonic())
            self._bar.stop()

    def add(self, done: bool, prompt_tokens: int, output_tokens: int) -> None:
        """Count a step's tokens of one answer; `done`: it has ended."""
        if self._bar is None:
            return
        self._done += done
        self._prompt_tokens += prompt_tokens
        self._output_tokens += output_tokens
        now = time.monotonic()
        if now - self._shown >= UPDATE_S:
            self._show(self._bar, now)

    def _show(self, bar: Progress, now: float) -> None:
        self._shown = now
        seconds = max(now - self._start, 1e-6)
        speed = (
            f"{self._prompt_tokens / seconds:,.0f} prompt tokens/s, "
            f"{self._output_tokens / seconds:,.0f} output tokens/s"
        )
        bar.update(self._task, completed=self._done, speed=speed)
