r"""Records what a command prints, with its times, as an SVG that plays it.

    python -P -m pagewire.tools.recording --out docs/prove.svg --begin "ready after" -- \
        .venv/bin/pagewire prove

The command runs in a terminal of its own, so that it prints colours. Each part of its text appears
in the picture as long after the beginning as it came. The picture plays once, in the browser's CSS:
it has no script, and no font or image from elsewhere. The recording is not written if the command
fails.
"""

from __future__ import annotations

import argparse
import fcntl
import html
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

COLUMNS, ROWS = 80, 34  # size of the terminal and of the picture
CHAR_WIDTH, LINE_HEIGHT, MARGIN = 8.43, 19, 16  # in pixels, with a font of 14
TOGETHER_S = 0.08  # parts of a line that come within this time appear at once
LATEST_END_S = 0.5  # how long the picture's animation outlasts the last part
CHUNK_BYTES = 4096
SEQUENCE = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])")
CLASSES = {"1": "b", "2": "d", "31": "r", "32": "g", "33": "y"}  # of SGR parameters
STYLE = """
text{fill:#d1d7e0;white-space:pre}
text{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace}
.b{font-weight:700}.d{fill:#8d96a0}.r{fill:#ff7b72}.g{fill:#56d364}.y{fill:#e3b341}
tspan{animation:a 1ms both}@keyframes a{from{fill-opacity:0}to{fill-opacity:1}}
"""
STILL = "@media(prefers-reduced-motion:reduce){tspan,g{animation:none!important}}"


class RecordingError(Exception):
    """The command failed, or printed something that cannot be drawn."""


@dataclass
class ScreenPart:
    """Text of one line that appears at once.

    Attributes:
        at: when it came, in seconds.
        classes: of its style, such as "b y".
    """

    at: float
    classes: str
    text: str


@dataclass
class Screen:
    """The lines that a command has printed; it can neither move the cursor nor erase."""

    lines: list[list[ScreenPart]] = field(default_factory=lambda: [[]])
    _style: tuple[str, ...] = ()

    def feed(self, at: float, text: str) -> None:
        """Add text with its escape sequences.

        Raises:
            RecordingError: a sequence does more than change the style.
        """
        position = 0
        for match in SEQUENCE.finditer(text):
            self._add(at, text[position : match.start()])
            position = match.end()
            if match[2] != "m":
                raise RecordingError(f"cannot draw the escape sequence {match[0]!r}")
            codes = [code for code in match[1].split(";") if code not in ("", "0")]
            self._style = (*self._style, *codes) if codes else ()
        self._add(at, text[position:])

    def _add(self, at: float, text: str) -> None:
        if "\x1b" in text:
            raise RecordingError(f"cannot draw {text!r}")
        first, *others = text.replace("\r", "").split("\n")
        self._append(at, first)
        for line in others:
            self.lines.append([])
            self._append(at, line)

    def _append(self, at: float, text: str) -> None:
        if not text:
            return
        classes = " ".join(CLASSES[code] for code in self._style if code in CLASSES)
        line = self.lines[-1]
        if line and line[-1].classes == classes and at - line[-1].at < TOGETHER_S:
            line[-1].text += text
        else:
            line.append(ScreenPart(at, classes, text))


def record(command: Sequence[str]) -> Iterator[tuple[float, str]]:
    """Run a command in a terminal; yield what it prints, with the time since its start.

    Raises:
        RecordingError: it failed.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS)}
    began, rest = time.monotonic(), b""
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env) as process:
        os.close(theirs)
        while chunk := _read(ours):
            text, rest = _whole(rest + chunk)
            yield time.monotonic() - began, text
    os.close(ours)
    if process.returncode:
        raise RecordingError(f"{command[0]} ended with {process.returncode}")


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, CHUNK_BYTES)
    except OSError:  # Linux's way to say that the other end is closed
        return b""


def _whole(data: bytes) -> tuple[str, bytes]:
    """Return the text up to an incomplete character or escape sequence, and the rest."""
    end, escape = len(data), data.rfind(b"\x1b")
    if escape >= 0 and not SEQUENCE.match(data[escape:].decode(errors="replace")):
        end = escape
    for size in range(min(4, end)):
        try:
            return data[: end - size].decode(), data[end - size :]
        except UnicodeDecodeError:
            continue
    return data[:end].decode(errors="replace"), data[end:]


def draw(screen: Screen, begin: str, caption: str) -> str:
    """Return the SVG of a recording.

    Args:
        screen: all that was printed.
        begin: text of the line that the picture begins with; what comes before is shown at once.
        caption: shown below.

    Raises:
        RecordingError: no line has that text.
    """
    lines = [line for line in screen.lines if line or line is not screen.lines[-1]]
    starts = [line[0].at for line in lines if begin in "".join(part.text for part in line)]
    if not starts:
        raise RecordingError(f"no line has {begin!r}")
    width = round(2 * MARGIN + COLUMNS * CHAR_WIDTH)
    height = 2 * MARGIN + (ROWS + 2) * LINE_HEIGHT
    scrolling, offset = _scrolling(lines, starts[0])
    body = "".join(_lines(lines, starts[0]))
    background = f'<rect width="{width}" height="{MARGIN + ROWS * LINE_HEIGHT}"/>'
    clip = f'<clipPath id="c">{background}</clipPath>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img" aria-label="{html.escape(caption)}">'
        f"<style>{STYLE}{scrolling}{STILL}</style>{clip}"
        f'<rect width="{width}" height="{height}" rx="8" fill="#0d1117"/>'
        f'<g clip-path="url(#c)"><g class="s" transform="translate(0 {-offset})">\n{body}</g></g>'
        f'<text class="d" x="{MARGIN}" y="{height - MARGIN}">{html.escape(caption)}</text></svg>\n'
    )


def _lines(lines: Iterable[list[ScreenPart]], start: float) -> Iterator[str]:
    for number, line in enumerate(lines):
        if line:
            y = MARGIN + (number + 1) * LINE_HEIGHT - 5
            yield f'<text x="{MARGIN}" y="{y}">{"".join(_spans(line, start))}</text>\n'


def _spans(line: Iterable[ScreenPart], start: float) -> Iterator[str]:
    for part in line:
        kind = f' class="{part.classes}"' if part.classes else ""
        delay = max(0.0, part.at - start)
        text = html.escape(part.text, quote=False)
        yield f'<tspan{kind} style="animation-delay:{delay:.2f}s">{text}</tspan>'


def _scrolling(lines: Sequence[list[ScreenPart]], start: float) -> tuple[str, int]:
    """Return the rules that keep the newest line in the picture, and the last offset."""
    last = max(part.at for line in lines for part in line) - start + LATEST_END_S
    steps, at = {0.0: 0}, 0.0
    for number, line in enumerate(lines):
        at = max([at, *(part.at - start for part in line[:1])])
        steps[round(100 * at / last, 2)] = max(0, number + 1 - ROWS) * LINE_HEIGHT
    moves = "".join(f"{at:g}%{{transform:translateY({-y}px)}}" for at, y in steps.items())
    offset = max(steps.values())
    rule = f".s{{animation:s {last:.2f}s step-end both}}"
    return f"{rule}@keyframes s{{{moves}100%{{transform:translateY({-offset}px)}}}}", offset


def main(argv: list[str]) -> int:
    """Record a command; return the exit code."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="SVG file to write")
    parser.add_argument("--begin", default="", help="text of the first line to show")
    parser.add_argument("--machine", default=f"{cores} CPU cores", help="machine for the caption")
    parser.add_argument("command", nargs="+", help="the command, after --")
    given = parser.parse_args(argv)
    screen = Screen()
    try:
        for at, text in record(given.command):
            sys.stdout.write(text)
            sys.stdout.flush()
            screen.feed(at, text)
        name = " ".join([Path(given.command[0]).name, *given.command[1:]])
        day = time.strftime("%Y-%m-%d")
        caption = f"{name}, in real time: {given.machine}, {day}"
        given.out.write_text(draw(screen, given.begin, caption), encoding="utf-8")
    except RecordingError as exc:
        print(f"recording: {exc}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
