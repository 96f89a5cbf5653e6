"""Prints a model's text, dim lines about it, and tables, for the client commands."""

from __future__ import annotations

import asyncio
import io
import sys
from collections.abc import Callable, Coroutine
from typing import Any, TextIO

from rich.console import Console, RenderableType
from rich.text import Text

from pagewire.services.cli.client.openai_client import Reply
from pagewire.shared.base.aio import end_task, start_task

_MAX_COLUMNS = 1000

# A model may write control characters that a terminal obeys. Text needs only tabs and line ends.
_CONTROLS = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}


def readable_stdin() -> TextIO:
    """Return stdin; bytes that are not text become a replacement character."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    return sys.stdin


def write_text(text: str) -> None:
    """Write a part of an answer to stdout; on a terminal, without control characters."""
    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def printable(text: str) -> str:
    """Return text without characters that would control the terminal."""
    return text.translate(_CONTROLS)


def note(line: str, style: str = "dim") -> None:
    """Print a line about the answers to stderr, so that stdout has only answers."""
    console = Console(stderr=True)
    # On a terminal, the line breaks between words; in a file, it is one line.
    console.print(Text(printable(line), style=style), soft_wrap=not console.is_terminal)


def can_redraw(console: Console) -> bool:
    """Whether the output is a terminal that can redraw lines; TERM=dumb cannot."""
    return console.is_terminal and not console.is_dumb_terminal


async def run_watched(
    work: Coroutine[Any, Any, None], show: Callable[[], None], every_s: float
) -> None:
    """Run the work to its end, and show its progress every few seconds."""

    async def repeat() -> None:
        while True:
            await asyncio.sleep(every_s)
            show()

    watcher = start_task(repeat(), "progress")
    try:
        await work
    finally:
        await end_task(watcher)


def print_whole(console: Console, tables: RenderableType) -> None:
    """Print tables at full width: a narrower terminal breaks lines, but nothing is cut."""
    options = console.options.update(max_width=_MAX_COLUMNS)
    width = console.measure(tables, options=options).maximum
    if width > console.width:
        console = Console(file=console.file, width=width)
    console.print(tables)


def describe(reply: Reply) -> str:
    """Return one line: time to first token, speed, length, cached prompt tokens."""
    parts = []
    if reply.ttft is not None:
        parts.append(f"TTFT {seconds(reply.ttft)}")
    if reply.tokens_per_s is not None:
        parts.append(f"{reply.tokens_per_s:.1f} tokens/s")
    parts.append(f"{reply.num_tokens} token{'' if reply.num_tokens == 1 else 's'}")
    if reply.usage is not None and reply.cached_tokens is not None:
        parts.append(f"{reply.cached_tokens} of {reply.usage.prompt_tokens} prompt tokens cached")
    return " · ".join(parts)


def cut_note(reply: Reply, max_tokens: int | None) -> str:
    """Return a line about an answer that was cut and how to get more; empty if it is complete.

    Args:
        reply: the whole answer.
        max_tokens: the value of --max-tokens; None if the endpoint chose.
    """
    if reply.finish_reason != "length":
        return ""
    if max_tokens is None:
        return (
            "the answer was cut: the model's context is full, or the endpoint has a limit that "
            "--max-tokens can raise"
        )
    return f"the answer was cut at --max-tokens {max_tokens}; a higher number gives more"


def seconds(value: float) -> str:
    """Return a time with a readable unit."""
    return f"{value * 1e3:.0f} ms" if value < 1 else f"{value:.2f} s"
