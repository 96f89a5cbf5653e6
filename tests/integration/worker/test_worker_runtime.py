"""A worker's runtime: how it sizes its staging, and how it ends."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from pagewire.shared.base.errors import ConfigError
from pagewire.shared.control.protocol import ControlMessage
from pagewire.shared.engine.step_output import StepOutputs
from pagewire.shared.engine.thread import EngineThread
from pagewire.shared.kv.packing import max_blocks, packed_bytes
from pagewire.shared.settings.config import WorkerSettings, load_settings
from pagewire.shared.transfer.endpoint.events import KvEvent
from pagewire.shared.worker import process
from pagewire.shared.worker.process import run_worker
from pagewire.shared.worker.runtime import WorkerRuntime
from pagewire.shared.worker.staging_size import MAX_BLOCKS_PER_SLOT, slot_size, staging_bytes
from pagewire.tests.support.aio import run_async
from pagewire.tests.support.kv_layouts import kv_layout
from pagewire.tests.support.redis_server import RedisServer

BLOCK = 2048
LAYOUT = kv_layout([None] * 32, size=BLOCK // 32 // 4)
DRAIN_S = 60.0


def settings_at(redis: RedisServer, **changes: Any) -> WorkerSettings:
    fields = {
        "redis_url": redis.url,
        "device": "cpu",
        "num_blocks": 64,
        "kv_transport": "zmq",
        "heartbeat_s": 0.1,
        "drain_timeout_s": DRAIN_S,
        "log_level": "error",
    }
    return load_settings(WorkerSettings, fields | changes)


class BusyService:
    """Has work that never ends.

    Args:
        runtime: whose worker this is.
        trouble: called once all is up.
    """

    def __init__(self, runtime: WorkerRuntime, trouble: Callable[[WorkerRuntime], None]) -> None:
        self.num_active = 1
        self.runtime, self._trouble = runtime, trouble

    def owners_of(self, engine_id: str) -> list[tuple[str, str]]:
        return []

    def start(self) -> None:
        asyncio.get_running_loop().call_later(0.2, self._trouble, self.runtime)

    def close(self) -> None:
        pass

    def end_jobs(self) -> None:
        pass

    def on_message(self, peer_id: str, message: ControlMessage) -> None:
        pass

    def on_peer_lost(self, peer_id: str) -> None:
        pass

    def on_kv_event(self, event: KvEvent) -> None:
        pass

    def on_outputs(self, outputs: StepOutputs) -> None:
        pass


def busy(trouble: Callable[[WorkerRuntime], None]) -> Callable[[WorkerRuntime], Any]:
    """Return what makes a `BusyService`."""
    return lambda runtime: BusyService(runtime, trouble)


def die(runtime: WorkerRuntime) -> None:
    """End the engine's loop as an error in a step does."""

    def fail(idle: bool) -> None:
        raise RuntimeError("device on fire")

    cast(Any, runtime.engine)._observe = fail


@pytest.mark.parametrize(
    ("asked", "blocks"),
    [
        (BLOCK, 1),
        (3 * BLOCK, 3),
        (4 * BLOCK - 1, 3),
        (MAX_BLOCKS_PER_SLOT * BLOCK + 1, MAX_BLOCKS_PER_SLOT),
    ],
)
def test_a_slot_holds_whole_blocks(asked: int, blocks: int) -> None:
    assert slot_size(asked, LAYOUT) == packed_bytes(LAYOUT, blocks)


@pytest.mark.parametrize("asked", [1, BLOCK - 1, (MAX_BLOCKS_PER_SLOT + 1) * BLOCK])
def test_a_slot_without_a_block_or_of_too_many_is_refused(asked: int) -> None:
    with pytest.raises(ConfigError) as caught:
        slot_size(asked, LAYOUT)
    message = str(caught.value)
    assert "PAGEWIRE_STAGING_SLOT_BYTES" in message
    assert f"{BLOCK} to {MAX_BLOCKS_PER_SLOT * BLOCK}" in message
    assert "\n" not in message


def test_the_default_slot_takes_no_more_than_its_share_of_the_memory() -> None:
    assert slot_size(None, LAYOUT, share=3 * BLOCK + 5) == packed_bytes(LAYOUT, 3)
    assert slot_size(None, LAYOUT, share=5) == packed_bytes(LAYOUT, 1)
    assert slot_size(4 * BLOCK, LAYOUT, share=5) == packed_bytes(LAYOUT, 4)
    settings = WorkerSettings(staging_slots=8)
    assert staging_bytes(settings, LAYOUT, 64 * 8 * 3 * BLOCK) == 8 * packed_bytes(LAYOUT, 3)


@pytest.mark.parametrize("num_layers", [1, 2, 32])
@pytest.mark.parametrize("block_bytes", [128, BLOCK, 1 << 20, 100 << 20])
def test_the_default_slot_holds_whole_blocks(block_bytes: int, num_layers: int) -> None:
    layout = kv_layout([None] * num_layers, size=block_bytes // num_layers // 4)
    size = slot_size(None, layout)
    blocks = max_blocks(layout, size)
    assert size == packed_bytes(layout, blocks)
    assert 1 <= blocks <= MAX_BLOCKS_PER_SLOT


def num_selectors() -> int:
    """Return how many objects of epoll(7) this process has open."""
    with os.scandir("/proc/self/fd") as entries:
        return [os.readlink(entry.path) for entry in entries].count("anon_inode:[eventpoll]")


def test_a_worker_refuses_slots_that_hold_no_block(redis_server: RedisServer) -> None:
    async def scenario() -> None:
        settings = settings_at(redis_server, staging_slot_bytes=100)
        runtime = WorkerRuntime(settings, "prefill")
        before = num_selectors()
        with pytest.raises(ConfigError, match="PAGEWIRE_STAGING_SLOT_BYTES"):
            await runtime.run(busy(die))
        assert num_selectors() == before, "the engine's waker is still open"

    run_async(scenario())


def test_a_worker_whose_engine_died_does_not_wait_for_its_work(redis_server: RedisServer) -> None:
    async def scenario() -> None:
        runtime = WorkerRuntime(settings_at(redis_server), "prefill")
        assert await runtime.run(busy(die)) == 1
        assert runtime.lifetime.is_draining

    run_async(scenario())


@pytest.mark.parametrize("is_draining", [False, True], ids=["serving", "draining"])
def test_a_worker_whose_engine_hangs_ends_to_be_started_again(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture, is_draining: bool
) -> None:
    go_on = threading.Event()

    def hang(runtime: WorkerRuntime) -> None:
        if is_draining:
            os.kill(os.getpid(), signal.SIGTERM)
        runtime.engine.submit(lambda _core: go_on.wait(60.0) and None)

    async def scenario() -> None:
        runtime = WorkerRuntime(settings_at(redis_server, step_timeout_s=0.5), "prefill")
        try:
            code = await runtime.run(busy(hang))
        finally:
            go_on.set()
        assert code == (0 if is_draining else 1)
        assert runtime.left_behind is not None
        runtime.engine.thread.join(10.0)
        await runtime.left_behind.aclose()

    run_async(scenario())
    assert "the engine has not gone on for" in caplog.text


def test_an_engine_that_dies_ends_the_draining(redis_server: RedisServer) -> None:
    def terminate(runtime: WorkerRuntime) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        asyncio.get_running_loop().call_later(0.5, die, runtime)

    async def scenario() -> None:
        runtime = WorkerRuntime(settings_at(redis_server), "prefill")
        assert await runtime.run(busy(terminate)) == 0

    run_async(scenario())


def test_background_tasks_end_before_a_slow_engine(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop, stopping, beats = EngineThread.stop, [float("inf")], [0.0]

    def slow_stop(engine: EngineThread, timeout: float) -> bool:
        stopping[0] = time.monotonic()
        time.sleep(0.5)
        return stop(engine, timeout)

    async def beat() -> None:
        while True:
            beats.append(time.monotonic())
            await asyncio.sleep(0.02)

    def end(runtime: WorkerRuntime) -> None:
        runtime.tasks.spawn(beat(), "what opens links")
        asyncio.get_running_loop().call_later(0.2, os.kill, os.getpid(), signal.SIGTERM)

    async def scenario() -> None:
        monkeypatch.setattr(EngineThread, "stop", slow_stop)
        runtime = WorkerRuntime(settings_at(redis_server, drain_timeout_s=0.1), "prefill")
        assert await runtime.run(busy(end)) == 0

    run_async(scenario())
    assert len(beats) > 1
    assert max(beats) < stopping[0]


def test_the_loop_runs_while_a_slow_engine_stops(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop, stopped, beats = EngineThread.stop, [0.0], [0.0]

    def slow_stop(engine: EngineThread, timeout: float) -> bool:
        time.sleep(1.0)
        stopped.append(time.monotonic())
        return stop(engine, timeout)

    async def beat() -> None:
        while True:
            beats.append(time.monotonic())
            await asyncio.sleep(0.02)

    async def scenario() -> None:
        monkeypatch.setattr(EngineThread, "stop", slow_stop)
        runtime = WorkerRuntime(settings_at(redis_server), "prefill")
        task = asyncio.create_task(beat())
        assert await runtime.run(busy(die)) == 1
        task.cancel()
        await asyncio.wait([task])

    run_async(scenario())
    assert len([moment for moment in beats if 0 < stopped[1] - moment < 0.9]) > 5


def test_what_a_stopping_engine_still_hands_over_leaves_no_task(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = EngineThread.stop

    def stop_with_outputs(engine: EngineThread, timeout: float) -> bool:
        engine._on_outputs(StepOutputs())
        return stop(engine, timeout)

    def send_for_ever(service: BusyService, _outputs: StepOutputs) -> None:
        def send() -> None:
            service.runtime.tasks.spawn(asyncio.sleep(60), "sending")

        service.runtime.in_loop(send)()

    async def scenario() -> None:
        monkeypatch.setattr(EngineThread, "stop", stop_with_outputs)
        monkeypatch.setattr(BusyService, "on_outputs", send_for_ever)
        runtime = WorkerRuntime(settings_at(redis_server), "prefill")
        assert await runtime.run(busy(die)) == 1

    run_async(scenario())  # which finds tasks that are left


@pytest.fixture
def switch_interval() -> Iterator[None]:
    """Whatever a test sets is the process's own again after it."""
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)


def test_a_worker_lets_its_threads_take_turns_quickly(
    redis_server: RedisServer, switch_interval: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "configure_logging", lambda *_: None)  # pytest has
    seen: list[float] = []

    def terminate(runtime: WorkerRuntime) -> None:
        seen.append(sys.getswitchinterval())
        die(runtime)

    settings = settings_at(redis_server)
    code = run_worker(settings, "decode", busy(terminate))
    assert code == 1
    assert seen == [pytest.approx(process.SWITCH_INTERVAL_S)]
