"""Log lines whose reader is slow, stuck or gone."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator

import pytest

from pagewire.shared.base.log_writer import LogWriter

FILL = b"x" * 65536  # what a pipe holds


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    yield reader, writer
    os.close(writer)
    os.close(reader)


def log(handler: LogWriter, *messages: str) -> None:
    for message in messages:
        handler.handle(logging.makeLogRecord({"msg": message, "levelno": logging.INFO}))


def read_until(fd: int, end: bytes) -> bytes:
    seen = b""
    while end not in seen:
        seen += os.read(fd, 1 << 16)
    return seen


def test_lines_are_written_in_order_and_a_flush_waits_for_them(pipe: tuple[int, int]) -> None:
    handler = LogWriter(pipe[1])
    log(handler, *map(str, range(100)), "non-ascii \udcff ü")
    handler.flush()
    expected = [*map(str, range(100)), "non-ascii \\udcff ü"]
    assert os.read(pipe[0], 1 << 16).decode().splitlines() == expected


@pytest.mark.parametrize("blocking", [True, False])
def test_nobody_waits_for_a_stuck_reader_and_the_loss_is_counted(
    pipe: tuple[int, int], blocking: bool
) -> None:
    os.write(pipe[1], FILL)
    os.set_blocking(pipe[1], blocking)
    handler = LogWriter(pipe[1], max_lines=3)
    began = time.monotonic()
    log(handler, *map(str, range(11)))
    assert time.monotonic() - began < 5
    seen = read_until(pipe[0], b"\n2\n")
    log(handler, "afterwards")
    seen += read_until(pipe[0], b"afterwards\n")
    assert seen.startswith(FILL)
    *kept, loss, last = seen.removeprefix(FILL).decode().splitlines()
    # The thread has one line in its hands, or has not got to it.
    assert kept in ([str(n) for n in range(3)], [str(n) for n in range(4)])
    assert (loss.split()[0], last) == (str(11 - len(kept)), "afterwards")


def test_a_stuck_reader_holds_an_end_up_for_seconds_only(pipe: tuple[int, int]) -> None:
    os.write(pipe[1], FILL)
    handler = LogWriter(pipe[1])
    log(handler, "at work")
    began = time.monotonic()
    handler.flush()
    assert 1 < time.monotonic() - began < 10
    os.read(pipe[0], 1 << 17)
    handler.flush()


def test_a_reader_that_is_gone_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    handler = LogWriter(writer)
    log(handler, "to nobody", "again")
    handler.flush()
    assert any(each.name == "log-writer" and each.is_alive() for each in threading.enumerate())
    os.close(writer)
