"""A process that ends in a step while a crash watch is on, in the way of the first argument.

    python -P -m pagewire.tests.support.crashing_worker WAY REDIS_URL

Its standard output ends when it does. Its log lines are JSON. It has no disk to write to.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
import tempfile

from pagewire.shared.base.logs import configure_logging
from pagewire.shared.engine.scheduling.decode_batch import DecodeRows
from pagewire.shared.engine.scheduling.schedule import Schedule, ScheduledTokens
from pagewire.shared.engine.step_clock import StepClock
from pagewire.shared.settings.config import WorkerSettings, load_settings
from pagewire.shared.worker.crash_watch import CrashWatch
from pagewire.shared.worker.step_record import StepRecord
from pagewire.tests.support.fake_engine import make_sequence

WORKER_ID, EPOCH, SECRET = "decode-7", 12, "a secret of these tests alone"
PROMPT_TOKENS = 24


async def main() -> None:
    way, redis_url = sys.argv[1:]
    tempfile.tempdir = "/nonexistent"
    configure_logging("error", "json")
    fields = {"worker_id": WORKER_ID, "redis_url": redis_url, "cluster_secret": SECRET}
    fields["log_format"] = "json"
    settings = load_settings(WorkerSettings, fields)
    record = StepRecord(lambda sequence: [f"job-{sequence.request_id}"])
    steps = StepClock(on_change=record.write)
    watch = CrashWatch(settings, EPOCH, record)
    a, b, c = (make_sequence(name, [7] * 30) for name in "abc")
    prompts = [ScheduledTokens(each, 0, PROMPT_TOKENS, False) for each in (a, b)]
    steps.begin(Schedule(chunks=prompts[:1]))
    if way == "rows":
        older = DecodeRows([a, b])
        for rows in (older, older, DecodeRows([b, c])):
            steps.begin(Schedule(rows=rows))
            steps.finish()
    else:
        steps.begin(Schedule(chunks=prompts))
        steps.finish()
        if way == "after":
            steps.finish()
    if way in ("segfault", "after", "rows"):
        ctypes.string_at(0)
    if way == "disarmed":
        watch.disarm()
    if way == "unreported":
        watch.reporter.kill()
        await asyncio.to_thread(watch.reporter.wait)
        await asyncio.sleep(0.1)  # the loop looks at its sockets
    if way in ("abort", "disarmed", "unreported"):
        os.abort()
    if way == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
        await asyncio.sleep(60)


if __name__ == "__main__":
    asyncio.run(main())
