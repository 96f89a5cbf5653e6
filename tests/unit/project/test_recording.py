"""Recordings of commands as pictures: what they show and when, and the one in the documents."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from pagewire.tools.recording import ROWS, RecordingError, Screen, draw, main, record

ROOT = Path(__file__).resolve().parents[3]
SVG = "{http://www.w3.org/2000/svg}"
MAX_BYTES = 60_000
PROGRAM = """
import sys, time
print("before")
print("\\x1b[1;31mred <&>\\x1b[0m plain", flush=True)
time.sleep(0.3)
print("lat\\u00ebr", end="", flush=True)
"""


def each_text(svg: str) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(svg).iter(f"{SVG}text"))  # noqa: S314 - our own


def texts(svg: str) -> list[list[tuple[str, str | None, float]]]:
    """Return text, classes and delay of each part of each line, without the caption."""
    lines = []
    for line in each_text(svg):
        parts = [
            (
                part.text or "",
                part.get("class"),
                float(re.findall(r"[\d.]+", part.get("style", ""))[0]),
            )
            for part in line.iter(f"{SVG}tspan")
        ]
        if parts:
            lines.append(parts)
    return lines


def test_a_recording_shows_each_part_as_late_as_it_came(tmp_path: Path) -> None:
    out = tmp_path / "out.svg"
    command = [sys.executable, "-c", PROGRAM]
    assert (
        main(
            [
                "--out",
                str(out),
                "--begin",
                "red",
                "--machine",
                "a pocket calculator",
                "--",
                *command,
            ]
        )
        == 0
    )
    before, styled, later = texts(out.read_text(encoding="utf-8"))
    assert before == [("before", None, 0.0)]
    assert styled == [("red <&>", "b r", 0.0), (" plain", None, 0.0)]
    [(text, _, delay)] = later
    assert (text, 0.2 < delay < 5) == ("latër", True)
    assert "a pocket calculator" in out.read_text(encoding="utf-8")


def test_the_last_lines_are_in_the_picture_at_its_end() -> None:
    screen = Screen()
    for number in range(ROWS + 3):
        screen.feed(float(number), f"line {number}\n")
    svg = draw(screen, "line 0", "a caption")
    assert len(texts(svg)) == ROWS + 3
    offset = re.search(r'class="s" transform="translate\(0 -(\d+)\)"', svg)
    assert offset is not None
    heights = [int(text.get("y", "0")) for text in each_text(svg)]
    *_, last, caption = heights
    assert last - int(offset[1]) < caption


@pytest.mark.parametrize(
    ("text", "problem"),
    [("\x1b[2K", "escape sequence"), ("\x1b]0;title", "cannot draw"), ("other", "no line has")],
)
def test_what_cannot_be_drawn_is_an_error(text: str, problem: str) -> None:
    screen = Screen()
    with pytest.raises(RecordingError, match=problem):
        screen.feed(0.0, text)
        draw(screen, "begin", "")


def test_a_command_that_fails_is_not_recorded(tmp_path: Path) -> None:
    failing = [sys.executable, "-c", "raise SystemExit(3)"]
    with pytest.raises(RecordingError, match="ended with 3"):
        list(record(failing))
    assert main(["--out", str(tmp_path / "out.svg"), "--", *failing]) == 1
    assert list(tmp_path.iterdir()) == []


def test_the_recording_in_the_documents_is_of_a_proof_that_passed() -> None:
    path = ROOT / "docs/prove.svg"
    svg = path.read_text(encoding="utf-8")
    lines = ["".join(text for text, *_ in parts) for parts in texts(svg)]
    assert path.stat().st_size < MAX_BYTES
    assert lines[-1].startswith("proved, in ")
    assert any(re.search(r"✓ tokens that differ +0 of \d+$", line) for line in lines)
    assert not any("✗" in line for line in lines)
    assert "CPU cores" in svg
    assert not re.search(
        r"https?://(?!www\.w3\.org/2000/svg)|url\((?!#)|<script|<image|@import", svg
    )
