"""A worker that crashes in native code leaves a report; its peers find it as soon as it is gone."""

from __future__ import annotations

import json
import mmap
import os
import resource
import subprocess
import sys

import pytest

from pagewire.shared.base.errors import ConfigError
from pagewire.shared.cluster.crash_reports import CrashReport, CrashReports
from pagewire.shared.cluster.redis_client import connect_redis
from pagewire.shared.worker.crash_reporter import MEMORY_BYTES, read_summary
from pagewire.shared.worker.step_record import StepRecord
from pagewire.tests.support.aio import run_async
from pagewire.tests.support.crashing_worker import EPOCH, PROMPT_TOKENS, SECRET, WORKER_ID
from pagewire.tests.support.redis_server import RedisServer

REPORTER = "pagewire.shared.worker.crash_reporter"
PROGRAM = "pagewire.tests.support.crashing_worker"
TIMEOUT_S = 60


def report_after(way: str, redis: RedisServer) -> tuple[CrashReport | None, str]:
    """Have a worker end, and look for its report at once; returns that and what it wrote."""
    argv = [sys.executable, "-P", "-m", PROGRAM, way, redis.url]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as ended:
        assert ended.stdout is not None
        assert ended.stdout.read() == ""  # which ends with the process, as its connections do
        found = run_async(find(redis), TIMEOUT_S)
        text = ended.communicate(timeout=TIMEOUT_S)[1]
    assert "Traceback" not in text, text
    return found, text


async def find(redis: RedisServer) -> CrashReport | None:
    client = await connect_redis(redis.url)
    try:
        return await CrashReports(client, SECRET).find(WORKER_ID, EPOCH)
    finally:
        await client.aclose()


@pytest.mark.parametrize(("way", "why"), [("segfault", "Segmentation fault"), ("abort", "Aborted")])
def test_a_crash_is_reported_with_those_in_the_step(
    redis_server: RedisServer, way: str, why: str
) -> None:
    report, text = report_after(way, redis_server)
    assert report is not None
    assert why in report.error
    assert f"{2 * PROMPT_TOKENS} prompt tokens" in report.error
    assert report.suspects == ["job-a", "job-b"]
    assert f"Fatal Python error: {why}" in text
    assert "in main" in text  # the stack
    line = json.loads(text.splitlines()[0])  # whole, and before the stack, which has another form
    assert (line["level"], line["service"], line["logger"]) == ("error", WORKER_ID, REPORTER)
    assert "suspected requests: a, b" in line["message"]


def test_a_crash_between_two_steps_suspects_nobody(redis_server: RedisServer) -> None:
    report, _ = report_after("after", redis_server)
    assert report is not None
    assert report.suspects == []
    assert not report.in_step
    assert "outside a step" in report.error


def test_all_rows_of_a_step_without_prompts_are_suspected(redis_server: RedisServer) -> None:
    report, _ = report_after("rows", redis_server)
    assert report is not None
    assert report.suspects == ["job-b", "job-c"]


def lowest_free_fd() -> int:
    lowest = os.dup(0)
    os.close(lowest)
    return lowest


def test_a_record_that_finds_too_few_file_descriptors_leaves_none_open() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = lowest_free_fd()
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + 1, hard))  # it needs two
    try:
        with pytest.raises(ConfigError, match=r"crash reporter.*Too many open files"):
            StepRecord(lambda _sequence: [])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert lowest_free_fd() == lowest


@pytest.mark.parametrize("way", ["kill", "exit", "disarmed"])
def test_another_end_is_no_crash(redis_server: RedisServer, way: str) -> None:
    report, text = report_after(way, redis_server)
    assert report is None
    assert ("Fatal Python error: Aborted" in text) == (way == "disarmed")


@pytest.mark.parametrize("way", ["segfault", "unreported"])
def test_a_crash_that_cannot_be_reported_still_writes_the_stack(
    redis_server: RedisServer, way: str
) -> None:
    """Redis is away while the worker starts and crashes, or its reporter was killed."""
    redis_server.kill()
    argv = [sys.executable, "-P", "-m", PROGRAM, way, redis_server.url]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert ended.returncode < 0
    assert "Fatal Python error" in ended.stderr
    assert "in main" in ended.stderr
    assert "Traceback" not in ended.stderr
    why = "cannot report the crash" if way == "segfault" else "the crash reporter has ended"
    assert why in ended.stderr


def test_half_a_summary_counts_as_none() -> None:
    """Another thread may have crashed while the engine's thread writes the next one."""
    with mmap.mmap(-1, MEMORY_BYTES) as memory:
        for half in (b"\x82\xa4work", b"\x82\xa4work\xa1\xff", b"\x80"):
            memory[: 4 + len(half)] = len(half).to_bytes(4, "little") + half
            assert read_summary(memory) is None


def test_a_report_of_a_stranger_counts_as_none(redis_server: RedisServer) -> None:
    async def scenario() -> None:
        client = await connect_redis(redis_server.url)
        try:
            reports = CrashReports(client, SECRET)
            await reports.publish(
                WORKER_ID, EPOCH, CrashReport("it crashed", ["job-a"], in_step=True)
            )
            (name,) = await client.keys("*:crash:*")
            sealed = await client.get(name)
            assert isinstance(sealed, bytes)
            await client.set(name, bytes(32) + sealed[32:])
            assert await reports.find(WORKER_ID, EPOCH) is None
        finally:
            await client.aclose()

    run_async(scenario(), TIMEOUT_S)
