"""A progress bar for the offline `LLM`, on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from pagewire.shared.engine.offline.outputs import RequestOutput

UPDATE_S = 0.1


class GenerationProgress:
    """Shows how many answers are done and tokens per second, if stderr is a terminal."""

    def __init__(self, outputs: Sequence[RequestOutput], wanted: bool) -> None:
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
        self._answers = [(output, answer) for output in outputs for answer in output.outputs]
        self._task = self._bar.add_task("", total=len(self._answers), speed="")
        self._start = self._shown = time.monotonic()

    def __enter__(self) -> GenerationProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._bar is not None:
            self._show(self._bar)
            self._bar.stop()

    def update(self) -> None:
        """Show the outputs' progress, if the last time is long enough ago."""
        if self._bar is not None and time.monotonic() - self._shown >= UPDATE_S:
            self._show(self._bar)

    def _show(self, bar: Progress) -> None:
        self._shown = time.monotonic()
        seconds = max(self._shown - self._start, 1e-6)
        done = sum(answer.finish_reason is not None for _, answer in self._answers)
        read = sum(len(output.prompt_token_ids) for output, each in self._answers if each.token_ids)
        written = sum(len(answer.token_ids) for _, answer in self._answers)
        speed = f"{read / seconds:,.0f} prompt tokens/s, {written / seconds:,.0f} output tokens/s"
        bar.update(self._task, completed=done, speed=speed)
