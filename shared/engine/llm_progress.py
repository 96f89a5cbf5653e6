"""A progress bar for the offline `LLM`, on stderr."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

UPDATE_S = 0.1


class GenerationProgress:
    """Shows how many answers are done and how fast tokens go; silent if not on a terminal."""

    def __init__(self, total: int, wanted: bool) -> None:
        console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("answers"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[speed]}"),
            console=console,
            disable=not (wanted and console.is_terminal),
        )
        self._task = self._progress.add_task("", total=total, speed="")
        self._done = self._prompt_tokens = self._output_tokens = 0
        self._start = self._shown = time.monotonic()

    def __enter__(self) -> GenerationProgress:
        self._progress.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._show(time.monotonic())
        self._progress.stop()

    def add(self, done: int = 0, prompt_tokens: int = 0, output_tokens: int = 0) -> None:
        """Count what a step gave: answers that ended, prompts and tokens that were computed."""
        if self._progress.disable:
            return
        self._done += done
        self._prompt_tokens += prompt_tokens
        self._output_tokens += output_tokens
        now = time.monotonic()
        if now - self._shown >= UPDATE_S:
            self._show(now)

    def _show(self, now: float) -> None:
        self._shown = now
        seconds = max(now - self._start, 1e-6)
        speed = (
            f"{self._prompt_tokens / seconds:,.0f} prompt tokens/s, "
            f"{self._output_tokens / seconds:,.0f} output tokens/s"
        )
        self._progress.update(self._task, completed=self._done, speed=speed)
