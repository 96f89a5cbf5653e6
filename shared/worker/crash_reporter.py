"""The program of a worker's crash reporter: a process that says why the worker's process crashed.

    worker's faulthandler --text--> socket --> report in Redis, then the text goes to stderr
    step under way --> shared memory --/

faulthandler writes the stack in many small parts, of which the socket holds about six. So the
crashed process waits until its report is written and this process reads on, and its connections end
after that. Without any text, the worker did not crash.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mmap
import os
import select
import socket
import sys

import msgspec

from pagewire.shared.base.errors import RedisSetupError, RedisUnavailableError
from pagewire.shared.base.logs import STDERR, LogForm, configure_logging
from pagewire.shared.cluster.crash_reports import CrashReport, CrashReports
from pagewire.shared.cluster.redis_client import connect_redis

PROGRAM = "pagewire.shared.worker.crash_reporter"
logger = logging.getLogger(PROGRAM)  # `__name__` is "__main__" here

MEMORY_BYTES = 1 << 16
LENGTH_BYTES = 4
REDIS_TIMEOUT_S = 1.0  # the crashed process waits
STDERR_TIMEOUT_S = 1.0  # likewise
_CHUNK_BYTES = 4096


class Setup(msgspec.Struct):
    """The first line on the socket, in JSON: whose crash is reported, and where."""

    worker_id: str
    epoch: int
    redis_url: str
    cluster_secret: str
    log_level: str
    log_format: LogForm


class StepSummary(msgspec.Struct, frozen=True):
    """The step under way, as the shared memory has it after its length.

    Attributes:
        work: the step's work, in words.
        suspects: what peers call the requests that are suspected if it crashes.
        log_names: what logs call the first of them.
    """

    work: str
    suspects: list[str]
    log_names: list[str]


def read_summary(memory: mmap.mmap) -> StepSummary | None:
    """Return the step that is under way; None if there is none, or if it begins just now."""
    raw = memory[:]
    length = int.from_bytes(raw[:LENGTH_BYTES], "little")
    if not length:
        return None
    try:
        return msgspec.msgpack.decode(raw[LENGTH_BYTES : LENGTH_BYTES + length], type=StepSummary)
    except ValueError:  # another thread has crashed, and the engine's goes on
        return None


def report_of(headline: str, step: StepSummary | None) -> CrashReport:
    """Make the report about a worker's crash.

    Args:
        headline: the first line of the text, "Fatal Python error: " and a reason.
        step: the one under way.
    """
    error = f"the worker's process crashed ({headline.rpartition(': ')[2]})"
    if step is None:
        return CrashReport(f"{error} outside a step", [], in_step=False)
    return CrashReport(f"{error} in a step of {step.work}", step.suspects, in_step=True)


async def report_crash(worker: socket.socket, memory: mmap.mmap) -> None:
    """Wait until the worker's end of the socket is closed; report a crash before that."""
    if not (line := await _read_line(worker)):
        return
    setup = msgspec.json.decode(line, type=Setup)
    configure_logging(setup.log_level, setup.log_format, setup.worker_id)
    if not (headline := await _read_line(worker)):
        return
    step = read_summary(memory)
    report = report_of(headline.decode("ascii", "replace"), step)
    try:
        await _publish(setup, report)
    except (RedisSetupError, RedisUnavailableError) as exc:
        logger.warning("cannot report the crash of %s: %s", setup.worker_id, exc)
    names = "" if step is None else ", ".join(step.log_names)
    logger.error("%s: %s; suspected requests: %s", setup.worker_id, report.error, names or "none")
    for handler in logging.getLogger().handlers:
        handler.flush()  # else the lines would come amid those of the text
    await _pass_on(headline, worker)


async def _publish(setup: Setup, report: CrashReport) -> None:
    """Write a crash report to Redis, where routers and workers find it.

    Raises:
        RedisSetupError: Redis refuses or does not answer.
        RedisUnavailableError: likewise, after its first answer.
    """
    redis = await connect_redis(setup.redis_url, REDIS_TIMEOUT_S)
    try:
        reports = CrashReports(redis, setup.cluster_secret)
        await reports.publish(setup.worker_id, setup.epoch, report)
    finally:
        await redis.aclose()


async def _pass_on(headline: bytes, worker: socket.socket) -> None:
    """Write the stack to stderr; once nobody reads that in time, drop it: the worker must end."""
    loop, chunk, is_read = asyncio.get_running_loop(), headline + b"\n", True
    while chunk:
        is_read = is_read and bool(select.select([], [STDERR], [], STDERR_TIMEOUT_S)[1])
        if is_read:
            with contextlib.suppress(OSError):
                os.write(STDERR, chunk)
        chunk = await loop.sock_recv(worker, _CHUNK_BYTES)


async def _read_line(worker: socket.socket) -> bytes:
    """Read up to a line's end and nothing after it; or what there is before the socket's end."""
    loop, line = asyncio.get_running_loop(), b""
    while (byte := await loop.sock_recv(worker, 1)) not in (b"", b"\n"):
        line += byte
    return line


def main() -> None:
    """Run until the worker has ended.

    The arguments are the file descriptors of the socket and of the shared memory.
    """
    worker = socket.socket(fileno=int(sys.argv[1]))
    worker.setblocking(False)
    memory = mmap.mmap(int(sys.argv[2]), MEMORY_BYTES, access=mmap.ACCESS_READ)
    asyncio.run(report_crash(worker, memory))


if __name__ == "__main__":
    main()
