"""Prints a proof: both texts as they are streamed, the faults in between, the result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from pagewire.services.cli.prove.answers import MAX_TOKENS, PROMPTS, TEMPERATURE
from pagewire.services.cli.prove.cluster import DECODE, PREFILL
from pagewire.services.cli.prove.judgement import Line
from pagewire.services.cli.terminal import printable

WIDTH = 78
INDENT = "  "


class View:
    """Prints line by line and never redraws, so that a file gets the same as a terminal.

    Args:
        console: a quiet one prints nothing.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._column = 0
        self._word = ""  # the beginning of a word that is not complete
        self._blanks = 0  # spaces before the next word

    def starting(self, device: str, num_gpus: int) -> None:
        """Print where workers run; the cluster's first process is about to start.

        Args:
            device: as the command line has it.
            num_gpus: found on this machine; workers may find some where the driver's tool does not.
        """
        where = "GPUs" if device == "cuda" else "the CPU"
        if num_gpus and device != "cpu":
            where = f"{num_gpus} GPU{'s' if num_gpus > 1 else ''}"
        self._line(f"{PREFILL} prefill and {DECODE} decode workers start, on {where} ...", "dim")

    def started(self, seconds: float) -> None:
        """Print that the cluster is ready, and after how long."""
        self._line(f"ready after {seconds:.1f} s", "dim")

    def calm(self) -> None:
        """Print that the run without faults begins."""
        what = f"{len(PROMPTS)} answers of {MAX_TOKENS} tokens, temperature {TEMPERATURE:g}"
        self._begin_text(f"Calm run: {what}; the first one:")

    def disturbed(self) -> None:
        """Print that the run with faults begins."""
        self._begin_text("Disturbed run: the same prompts and seeds")

    def text(self, text: str) -> None:
        """Print what is added to the first answer, without breaking words."""
        *words, self._word = (self._word + printable(text)).replace("\n", " \n ").split(" ")
        for word in words:
            self._put(word)

    def fault(self, text: str) -> None:
        """Print a fault, within the text that it is to disturb."""
        self._end_line()
        self._line(f"{INDENT}>> {text}", "bold yellow")

    def result(self, lines: Sequence[Line], seconds: float) -> None:
        """Print each judged line and whether all has been proved."""
        self._end_text()
        self._line("")
        width = max(len(line.name) for line in lines)
        for line in lines:
            style = "bold green" if line.passed else "bold red"
            text = Text(INDENT).append(f"{self._mark(line.passed)} ", style=style)
            text.append(f"{line.name:<{width}}  ", style="" if line.passed else style)
            self._print(text.append(printable(line.detail)))
        failed = [line.name for line in lines if not line.passed]
        end = f"failed: {', '.join(failed)}" if failed else "proved"
        self._line("")
        self._line(f"{end}, in {seconds:.1f} s", "bold red" if failed else "bold green")

    def _mark(self, passed: bool) -> str:
        try:
            "✓✗".encode(self._console.encoding)
        except (UnicodeEncodeError, LookupError):
            return "ok  " if passed else "FAIL"
        return "✓" if passed else "✗"

    def _begin_text(self, heading: str) -> None:
        self._end_text()
        self._line("")
        self._line(heading, "bold")
        self.text(PROMPTS[0])

    def _put(self, word: str) -> None:
        if word == "\n":
            self._print(Text(""))
            self._column = self._blanks = 0
        elif not word:
            self._blanks += 1
        else:
            if self._column and self._column + 1 + self._blanks + len(word) > WIDTH:
                self._end_line()
            start = " " * (self._blanks + 1) if self._column else INDENT + " " * self._blanks
            self._blanks = 0
            self._column += len(start + word)
            self._print(Text(start + word), end="")

    def _end_line(self) -> None:
        """End a line that has been begun, where the text itself has no end of a line."""
        if self._column:
            self._print(Text(""))
        self._column = self._blanks = 0

    def _end_text(self) -> None:
        if word := self._word:
            self._word = ""
            self._put(word)
        self._end_line()

    def _line(self, text: str, style: str = "") -> None:
        self._print(Text(text, style=style))

    def _print(self, text: Text, **options: Any) -> None:
        self._console.print(text, soft_wrap=True, **options)
