"""The program of a worker's crash reporter: a process that says why the worker's process crashed.

    worker's faulthandler --text--> socket --> report in Redis, then the text goes to stderr
    step under way --> shared memory --/

The worker's end of the socket has the smallest buffer there is. So the crashed process, which
writes its stack there, waits until the report is written and this process reads on; its
connections end after that. Without any text, the worker did not crash.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mmap
import os
import socket
import sys

import msgspec

from pagewire.shared.cluster.crash_reports import CrashReport, CrashReports
from pagewire.shared.cluster.redis_client import connect_redis
from pagewire.shared.errors import RedisSetupError, RedisUnavailableError
from pagewire.shared.logs import STDERR, LogForm, configure_logging

logger = logging.getLogger(__name__)

MEMORY_BYTES = 1 << 16
LENGTH_BYTES = 4
_CHUNK_BYTES = 4096


class Setup(msgspec.Struct):
    """The first line on the socket, in JSON: whose crash is reported, and where."""

    worker_id: str
    epoch: int
    redis_url: str
    cluster_secret: str
    log_level: str
    log_format: LogForm


class StepNote(msgspec.Struct, frozen=True):
    """The step under way, as the shared memory has it after its length.

    Attributes:
        work: the step's work, in words.
        suspects: what peers call the requests that are suspected if it crashes.
    """

    work: str
    suspects: list[str]


def read_note(memory: mmap.mmap) -> StepNote | None:
    """Return the step that is under way; None if there is none."""
    length = int.from_bytes(memory[:LENGTH_BYTES], "little")
    if not length:
        return None
    return msgspec.msgpack.decode(memory[LENGTH_BYTES : LENGTH_BYTES + length], type=StepNote)


def report_of(headline: str, note: StepNote | None) -> CrashReport:
    """Make a report.

    Args:
        headline: the first line of the text, "Fatal Python error: " and a reason.
        note: the step under way.
    """
    error = f"the worker's process crashed ({headline.rpartition(': ')[2]})"
    if note is None:
        return CrashReport(f"{error} outside a step", [])
    return CrashReport(f"{error} in a step of {note.work}", note.suspects)


async def watch(worker: socket.socket, memory: mmap.mmap) -> None:
    """Wait until the worker's end of the socket is closed; report a crash before that.

    Raises:
        RedisSetupError: Redis refuses or does not answer.
    """
    setup = msgspec.json.decode(await _read_line(worker), type=Setup)
    configure_logging(setup.log_level, setup.log_format, setup.worker_id)
    redis = await connect_redis(setup.redis_url)
    try:
        if not (headline := await _read_line(worker)):
            return
        report = report_of(headline.decode("ascii", "replace"), read_note(memory))
        try:
            await CrashReports(redis, setup.cluster_secret).publish(
                setup.worker_id, setup.epoch, report
            )
        except RedisUnavailableError as exc:
            logger.warning("the crash of %s cannot be reported: %s", setup.worker_id, exc)
        suspects = ", ".join(report.suspects) or "none"
        logger.error("%s: %s; suspected requests: %s", setup.worker_id, report.error, suspects)
        await _pass_on(headline, worker)
    finally:
        await redis.aclose()


async def _pass_on(headline: bytes, worker: socket.socket) -> None:
    """Write the text to stderr, as far as somebody reads it, so that the worker can end."""
    loop, chunk = asyncio.get_running_loop(), headline + b"\n"
    while chunk:
        with contextlib.suppress(OSError):
            os.write(STDERR, chunk)
        chunk = await loop.sock_recv(worker, _CHUNK_BYTES)


async def _read_line(worker: socket.socket) -> bytes:
    """Read up to a line's end and nothing after it; or what there is before the socket's end."""
    loop, line = asyncio.get_running_loop(), b""
    while (byte := await loop.sock_recv(worker, 1)) not in (b"", b"\n"):
        line += byte
    return line


def main() -> int:
    """Run until the worker has ended; returns the exit code.

    The arguments are the file descriptors of the socket and of the shared memory.
    """
    worker = socket.socket(fileno=int(sys.argv[1]))
    worker.setblocking(False)
    memory = mmap.mmap(int(sys.argv[2]), MEMORY_BYTES, access=mmap.ACCESS_READ)
    try:
        asyncio.run(watch(worker, memory))
    except RedisSetupError as exc:
        logger.warning("crashes of this worker are not reported: %s", exc)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
