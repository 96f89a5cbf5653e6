"""The engine's thread where a device, a reader of outputs or the block accounting fails."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from functools import partial

import pytest

from pagewire.shared.engine import thread as thread_module
from pagewire.shared.engine.failed_steps import MAX_FAILED_STEPS
from pagewire.shared.engine.scheduling.step import StepPlan, StepResult
from pagewire.shared.engine.step_output import StepOutputs
from pagewire.shared.engine.thread import EngineThread
from pagewire.shared.worker.load_reports import LoadReports
from pagewire.tests.support.aio import wait_until
from pagewire.tests.support.engine_threads import Outputs, adding, started
from pagewire.tests.support.fake_device import FakeDevice, FakePending
from pagewire.tests.support.fake_engine import make_core, make_sequence
from pagewire.tests.support.kv_layouts import kv_layout

pytestmark = [pytest.mark.timeout(30), pytest.mark.usefixtures("each_executor")]


class StuckPending(FakePending):
    """Results that do not come before they are let go."""

    def __init__(self, device: StuckDevice, result: StepResult) -> None:
        super().__init__(device, result)
        self._reached, self._go = device.reached, device.go

    def is_done(self) -> bool:
        self._reached.set()
        return self._go.wait(20.0)


@dataclass
class StuckDevice(FakeDevice):
    """A device that hangs until it is let go; always in this process."""

    reached: threading.Event = field(default_factory=threading.Event)
    go: threading.Event = field(default_factory=threading.Event)

    def execute(self, plan: StepPlan) -> FakePending:
        return StuckPending(self, super().execute(plan).wait())


def test_stalled_loop_does_not_iterate_and_does_not_stop_in_time() -> None:
    core, device = make_core()
    stuck = core.executor = StuckDevice(device.limits, 16, kv_layout(block_size=4))
    engine = EngineThread(core, Outputs())
    engine.start()
    engine.submit(lambda core: core.sequences.add(make_sequence("a", [1], max_tokens=1)))
    assert stuck.reached.wait(5.0)
    iterations = engine.iterations
    time.sleep(0.3)
    assert engine.iterations == iterations
    assert engine.is_running()
    assert not engine.stop(0.05)
    stuck.go.set()
    assert engine.stop(5.0)


def test_a_load_report_says_since_when_a_long_step_has_kept_the_engine_from_new_requests() -> None:
    core, device = make_core()
    stuck = core.executor = StuckDevice(device.limits, 16, kv_layout(block_size=4))
    engine = EngineThread(core, lambda _outputs: None)
    loads = LoadReports(1, engine)
    engine.start()
    engine.submit(lambda core: core.sequences.add(make_sequence("a", [1], max_tokens=1)))
    assert stuck.reached.wait(5.0)
    engine.submit(lambda core: core.sequences.add(make_sequence("b", [2] * 5, max_tokens=1)))
    time.sleep(0.2)
    assert loads.recent().load.tokens == 0
    assert loads.recent().age_s > 0.19
    stuck.go.set()
    wait_until(lambda: loads.recent().age_s < 0.1)
    assert engine.stop(5.0)


def test_loop_does_not_run_before_start_nor_after_stop() -> None:
    core, _ = make_core()
    engine = EngineThread(core, Outputs())
    assert not engine.is_running()
    engine.start()
    assert engine.is_running()
    assert engine.stop(5.0)
    assert not engine.is_running()


def test_loop_ends_with_a_device_that_fails_every_step(caplog: pytest.LogCaptureFixture) -> None:
    core, device = make_core()
    outputs = Outputs()
    engine = EngineThread(core, outputs)
    engine.start()
    for number in range(MAX_FAILED_STEPS):
        assert engine.is_running()
        device.fail("fail_execute", "device lost")
        engine.submit(adding(make_sequence(f"r{number}", [1])))
        if number < MAX_FAILED_STEPS - 1:
            wait_until(partial(outputs.has_ended, f"r{number}"))
    wait_until(lambda: not engine.is_running())
    assert "the engine's loop died" in caplog.text
    assert engine.stop(1.0)


def test_loop_ends_if_outputs_cannot_be_handed_over(caplog: pytest.LogCaptureFixture) -> None:
    def fail(_outputs: StepOutputs) -> None:
        raise ValueError("nobody listens")

    core, _ = make_core()
    engine = EngineThread(core, fail)
    engine.start()
    engine.submit(lambda core: core.sequences.add(make_sequence("a", [1])))
    wait_until(lambda: not engine.is_running())
    assert "nobody listens" in caplog.text


def test_waiting_for_the_device_is_not_idleness(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The block accounting is checked when that holds nobody up, not between two steps."""
    monkeypatch.setattr(thread_module, "INTEGRITY_INTERVAL_S", 0.0)
    core, device = make_core()
    device.has_run = False
    with started(core) as engine:
        engine.submit(lambda core: core.sequences.add(make_sequence("a", [1])))
        wait_until(lambda: device.batches)
        engine.submit(lambda core: core.scheduler.pool.allocate(1) and None)
        iterations = engine.iterations
        wait_until(lambda: engine.iterations > iterations + 20)
        assert engine.integrity_errors == 0
        device.has_run = True
        wait_until(lambda: engine.integrity_errors > 0)


def test_accounting_errors_are_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(thread_module, "INTEGRITY_INTERVAL_S", 0.0)
    core, _ = make_core()
    with started(core) as engine:
        wait_until(lambda: engine.iterations >= 3)
        assert engine.integrity_errors == 0
        engine.submit(lambda core: core.scheduler.pool.allocate(1) and None)
        wait_until(lambda: engine.integrity_errors > 0)
        assert engine.is_running()
    assert "accounting of KV blocks is wrong" in caplog.text
