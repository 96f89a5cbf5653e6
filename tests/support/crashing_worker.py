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

from pagewire.shared.config import WorkerSettings, load_settings
from pagewire.shared.engine.scheduling.schedule import Schedule, ScheduledTokens
from pagewire.shared.engine.step_clock import StepClock
from pagewire.shared.logs import configure_logging
from pagewire.shared.worker.crash_watch import CrashWatch
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
    watch = CrashWatch(settings, EPOCH, lambda sequence: [f"job-{sequence.request_id}"])
    steps = StepClock(on_change=watch.note_step)
    prompts = [
        ScheduledTokens(make_sequence(name, [7] * 30), 0, PROMPT_TOKENS, False) for name in "ab"
    ]
    for number in range(3):  # the first two end, or with `after` all of them
        steps.begin(Schedule(chunks=prompts[: number % 2 + 1]))
        if number < 2 or way == "after":
            steps.finish()
    steps.begin(Schedule(chunks=prompts))
    if way == "after":
        steps.withdraw()
    if way in ("segfault", "after"):
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
