"""The start-up display keeps its columns whatever the children log."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from pagewire.services.cli.up.log_lines import as_json_line, message_of
from pagewire.services.cli.up.processes import ChildSpec, OutputLog
from pagewire.services.cli.up.progress import ProgressDisplay
from pagewire.services.cli.up.supervisor import ChildStatus

HEAD = "2026-11-22 12:54:58,856 INFO pagewire.shared.worker.runtime: "
LONG = f"{HEAD}sizing the KV pool {'x' * 300}"


def child(directory: Path, name: str, line: str) -> ChildStatus:
    status = ChildStatus(ChildSpec(name, ()), OutputLog(directory / name))
    status.log.feed(line.encode() + b"\n")
    status.saw_output()
    return status


@pytest.mark.parametrize("width", [60, 80, 120])
def test_columns_stay_when_a_child_logs(tmp_path: Path, width: int) -> None:
    children = [
        child(tmp_path, "redis", "12:M 22 Nov 2026 12:54:51.591 * Ready to accept connections"),
        child(tmp_path, "prefill-0", LONG),
        child(tmp_path, "decode-0", "a\tb\x1b[2J\r" + "wide 東京 " * 60),
    ]
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=True, color_system=None)
    display = ProgressDisplay(console, lambda: children)
    console.print(display.render())
    for each in children:
        each.log.close()
    lines = out.getvalue().splitlines()
    assert len(lines) == 3  # each on a line of its own
    columns = [line[3:].split(maxsplit=3) for line in lines]
    assert [row[:2] for row in columns] == [
        ["redis", "loading"],
        ["prefill-0", "loading"],
        ["decode-0", "loading"],
    ]
    assert "Ready to accept connections" in lines[0]
    assert "sizing the KV pool" in lines[1]
    assert "…" in lines[1]
    assert "\x1b" not in lines[2]


def test_what_the_cluster_waits_for_is_shown() -> None:
    out = io.StringIO()
    console = Console(file=out, width=60, force_terminal=True, color_system=None)
    display = ProgressDisplay(console, list)
    with display:
        display.update(["the KV link prefill-0 -> decode-0"])
    assert "waiting for the KV link prefill-0 -> decode-0" in out.getvalue()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (f"{HEAD}sizing the KV pool", "sizing the KV pool"),
        ("7:C 01 Jan 2026 00:00:00.000 # Warning: no config", "Warning: no config"),
        ('{"level": "info", "message": "sizing the KV pool"}', "sizing the KV pool"),
        ("{not JSON", "{not JSON"),
        ("Traceback (most recent call last):", "Traceback (most recent call last):"),
    ],
)
def test_the_message_of_a_log_line(line: str, message: str) -> None:
    assert message_of(line).strip() == message


@pytest.mark.parametrize("line", ["12:M Ready", '{"message": "cut in the mid', "{not JSON", "[1]"])
def test_what_is_not_a_json_object_becomes_the_message_of_one(line: str) -> None:
    found = json.loads(as_json_line("redis", line))
    assert (found["message"], found["service"]) == (line, "redis")


def test_a_json_line_with_a_long_traceback_stays_as_it_is(tmp_path: Path) -> None:
    seen: list[str] = []
    log = OutputLog(tmp_path / "log", seen.append)
    line = json.dumps({"message": "failed", "exception": "x" * 20_000})
    log.feed(f"{line}\n".encode())
    log.close()
    assert [as_json_line("decode-0", each) for each in seen] == [line]
