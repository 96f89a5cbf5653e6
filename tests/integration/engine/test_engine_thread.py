from __future__ import annotations

import ctypes
import itertools
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest

from pagewire.shared.base.errors import OverloadedError
from pagewire.shared.engine import thread as thread_module
from pagewire.shared.engine.core import EngineCore
from pagewire.shared.engine.scheduling.step import StepPlan
from pagewire.shared.engine.step_output import StepOutputs
from pagewire.shared.engine.thread import EngineThread
from pagewire.shared.engine.waker import Waker
from pagewire.shared.worker.load_reports import LoadReports
from pagewire.tests.support.aio import wait_until
from pagewire.tests.support.engine_threads import Outputs, adding, started
from pagewire.tests.support.fake_engine import generate, make_core, make_sequence

pytestmark = [pytest.mark.timeout(30), pytest.mark.usefixtures("each_executor")]


@pytest.fixture
def sleepy(monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle loop sleeps for ever unless it is woken."""
    monkeypatch.setattr(thread_module, "IDLE_WAIT_S", 60.0)


@pytest.mark.parametrize("overlap", [False, True], ids=["serial", "overlap"])
def test_tokens_come_out_in_the_engines_thread(overlap: bool, sleepy: None) -> None:
    core, _ = make_core(overlap=overlap)
    sequences = [make_sequence(f"r{n}", [n] * 5, max_tokens=9) for n in range(6)]
    expected = {s.request_id: generate(s, 64) for s in sequences}
    outputs = Outputs()
    with started(core, outputs) as engine:
        for sequence in sequences:
            engine.submit(adding(sequence))
        wait_until(lambda: all(outputs.has_ended(name) for name in expected))
    assert {name: outputs.tokens(name) for name in expected} == expected
    assert outputs.threads == {"engine"}


def test_the_last_tokens_come_with_a_load_without_their_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(thread_module, "SNAPSHOT_INTERVAL_S", 60.0)
    core, _ = make_core()
    loads = []

    def note(outputs: StepOutputs) -> None:
        if any(each.finish_reason for each in outputs):
            loads.append(engine.snapshot.load)

    engine = EngineThread(core, note)
    engine.start()
    sequence = make_sequence("r", [1] * 5, max_tokens=9)
    engine.submit(adding(sequence))
    wait_until(lambda: bool(loads))
    assert engine.stop(5.0)
    assert (loads[0].rows, loads[0].blocks) == (0, 0)


def test_tokens_come_with_the_load_after_an_answer_whose_place_another_one_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(thread_module, "SNAPSHOT_INTERVAL_S", 60.0)
    core, _ = make_core()
    steps = itertools.count(1)
    loads = []

    def note(outputs: StepOutputs) -> None:
        if next(steps) == 8:  # the step of the first one's last token is to come
            engine.submit(adding(make_sequence("second", [1] * 9)))
        if any(each.finish_reason for each in outputs):
            loads.append((engine.snapshot.load, core.scheduler.meter.load))

    core.sequences.add(make_sequence("first", [1] * 5, max_tokens=9))
    engine = EngineThread(core, note)
    engine.start()
    wait_until(lambda: bool(loads))
    assert engine.stop(5.0)
    reported, real = loads[0]
    assert reported == real
    assert (real.tokens > 0) != (real.rows > 0)  # the second one has begun


def test_a_load_of_some_steps_ago_is_reported_as_the_older_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(thread_module, "SNAPSHOT_INTERVAL_S", 60.0)
    core, _ = make_core()
    reports = []

    def note(_outputs: StepOutputs) -> None:
        reports.append((loads.recent(), loads.current()))

    core.sequences.add(make_sequence("r", [1] * 5, max_tokens=9))
    engine = EngineThread(core, note)
    loads = LoadReports(1, engine)
    engine.start()
    wait_until(lambda: len(reports) == 9)
    assert engine.stop(5.0)
    assert any(recent.load != current.load for recent, current in reports)
    for recent, current in reports:
        assert recent.load == current.load or recent.iterations < current.iterations


def test_commands_run_in_order_in_the_engines_thread(sleepy: None) -> None:
    core, _ = make_core()
    ran: list[tuple[int, str, EngineCore]] = []

    def note(core: EngineCore, number: int) -> None:
        ran.append((number, threading.current_thread().name, core))

    with started(core) as engine:
        for number in range(100):
            engine.submit(partial(note, number=number))
        wait_until(lambda: len(ran) == 100)
    assert ran == [(number, "engine", core) for number in range(100)]


def test_command_that_fails_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def fail(_core: EngineCore) -> None:
        raise ValueError("no such thing")

    core, _ = make_core()
    done = threading.Event()
    with started(core) as engine:
        engine.submit(fail)
        engine.submit(lambda _core: done.set())
        assert done.wait(5.0)
        assert engine.is_running()
    assert "no such thing" in caplog.text


def test_command_queue_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_module, "MAX_COMMANDS", 3)
    core, _ = make_core()
    blocked, go_on = threading.Event(), threading.Event()
    ran: list[int] = []

    def block(_core: EngineCore) -> None:
        blocked.set()
        assert go_on.wait(10.0)

    def note(_core: EngineCore, number: int) -> None:
        ran.append(number)

    with started(core) as engine:
        engine.submit(block)
        assert blocked.wait(5.0)
        for number in range(3):
            engine.submit(partial(note, number=number))
        with pytest.raises(OverloadedError):
            engine.submit(partial(note, number=3))
        engine.submit(partial(note, number=4), admitted=True)
        go_on.set()
        wait_until(lambda: ran == [0, 1, 2, 4])
        engine.submit(partial(note, number=5))
        wait_until(lambda: ran == [0, 1, 2, 4, 5])


def test_commands_without_end_do_not_keep_steps_from_running() -> None:
    core, _ = make_core()
    outputs = Outputs()
    with started(core, outputs) as engine:

        def again(_core: EngineCore) -> None:
            engine.submit(again)

        engine.submit(again)
        engine.submit(lambda core: core.sequences.add(make_sequence("a", [1])))
        wait_until(lambda: outputs.has_ended("a"))


@dataclass
class Hook:
    """Busy for some iterations; may do something in each."""

    busy_iterations: int = 0
    then: Callable[[], None] = lambda: None
    iterations: int = 0
    due: bool = True

    def before_launch(self, plan: StepPlan) -> None:
        pass

    def after_launch(self, plan: StepPlan | None) -> bool:
        self.iterations += 1
        self.then()
        return self.iterations < self.busy_iterations

    def poll(self) -> bool:
        return self.due and self.iterations < self.busy_iterations


def test_busy_hook_keeps_the_loop_running(sleepy: None) -> None:
    hook = Hook(busy_iterations=10)
    core, _ = make_core(hooks=[hook])
    with started(core):
        wait_until(lambda: hook.iterations >= 10)
        time.sleep(0.05)
        assert hook.iterations == 11  # once more before the loop sleeps


def test_what_hooks_wait_for_is_handled_without_an_iteration(
    sleepy: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thread_module, "MAX_POLL_S", 60.0)
    hook = Hook(busy_iterations=100)
    core, _ = make_core(hooks=[hook])
    with started(core) as engine:
        wait_until(lambda: hook.iterations >= 100)
        assert engine.iterations <= 3  # the first, and one before the loop sleeps


@pytest.mark.parametrize("busy_polls", [False, True])
@pytest.mark.parametrize("news", ["device", "command", "wake"])
def test_sleeps_end_with_the_first_news(
    news: str, busy_polls: bool, sleepy: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thread_module, "MAX_POLL_S", 60.0)
    hook = Hook(busy_iterations=10**6, due=False)
    core, _ = make_core(hooks=[hook])
    with started(core, busy_polls=busy_polls) as engine:
        wait_until(lambda: hook.iterations == 1)
        time.sleep(0.1)
        assert hook.iterations == 1
        if news == "device":
            hook.then, hook.due = lambda: setattr(hook, "due", False), True
        elif news == "command":
            engine.submit(lambda _core: None)
        else:
            engine.expect_work()
        wait_until(lambda: hook.iterations == 2)


@dataclass
class SilentHook(Hook):
    """Waits for nothing, and never wakes the loop."""

    def after_launch(self, plan: StepPlan | None) -> bool:
        self.iterations, self.due = self.iterations + 1, False
        return False

    def poll(self) -> bool:
        return self.due


@pytest.mark.parametrize("busy_polls", [True, False])
def test_a_loop_that_expects_work_polls_for_a_while_if_it_busy_polls_at_all(
    busy_polls: bool, sleepy: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thread_module, "EXPECTED_S", 1.0)
    hook = SilentHook()
    core, _ = make_core(hooks=[hook])
    warmings: list[None] = []
    warm = partial(warmings.append, None)
    with started(core, busy_polls=busy_polls, warm_launch_path=warm) as engine:
        wait_until(lambda: hook.iterations == 1)
        assert not warmings
        for _ in range(2):  # news while work is expected: the loop goes on without sleeping
            engine.expect_work()
            wait_until(lambda before=hook.iterations: hook.iterations > before)
        time.sleep(0.1)
        before = hook.iterations
        hook.due = True
        time.sleep(0.1)
        assert (hook.iterations > before) == busy_polls
        assert (len(warmings) > 2) == busy_polls
        time.sleep(1.0)
        before, num_warmings = hook.iterations, len(warmings)
        hook.due = True
        time.sleep(0.1)
        assert hook.iterations == before  # it sleeps
        assert len(warmings) == num_warmings


def test_readable_file_descriptor_wakes_the_loop(sleepy: None) -> None:
    hook = Hook()
    core, _ = make_core(hooks=[hook])
    read, write = os.pipe()
    hook.then = lambda: os.read(read, 1) if hook.iterations > 1 else None
    waker = Waker()
    with started(core, waker=waker):
        waker.watch(read)
        wait_until(lambda: hook.iterations == 1)
        time.sleep(0.05)
        assert hook.iterations == 1
        for iterations in (2, 3):
            os.write(write, b"x")
            wait_until(lambda iterations=iterations: hook.iterations == iterations)
        time.sleep(0.05)
        assert hook.iterations == 3
        waker.unwatch(read)
    os.close(read)
    os.close(write)


def test_wake_in_the_middle_of_an_iteration_is_not_lost(sleepy: None) -> None:
    hook = Hook()
    core, _ = make_core(hooks=[hook])
    engine = EngineThread(core, Outputs())

    def wake_five_times() -> None:
        if hook.iterations <= 5:
            other = threading.Thread(target=engine.expect_work)
            other.start()
            other.join()

    hook.then = wake_five_times
    engine.start()
    wait_until(lambda: hook.iterations == 6)
    assert engine.stop(5.0)


def test_snapshot_follows_the_engine() -> None:
    core, _ = make_core(max_num_seqs=1, block_size=4)
    with started(core) as engine:
        assert engine.snapshot.blocks.used == 0
        job = make_sequence("job", [1] * 9, prefill_only=True)
        engine.submit(adding(job))
        engine.submit(adding(make_sequence("r", [1] * 9, remote_prefill=True)))
        wait_until(lambda: engine.snapshot.waiting == 1 and engine.snapshot.running == 0)
        wait_until(lambda: engine.snapshot.blocks.used == 3 + 1)  # two of the job's are shared
        engine.submit(lambda core: core.sequences.abort("r"))
        engine.submit(lambda core: core.sequences.abort("job"))
        wait_until(lambda: engine.snapshot.blocks.used == 0)
        assert engine.snapshot.blocks.cached == 2
        assert engine.snapshot.waiting == engine.snapshot.load.tokens == 0


def test_idle_loop_beats() -> None:
    core, _ = make_core()
    with started(core) as engine:
        before = engine.iterations
        wait_until(lambda: engine.iterations >= before + 3)
        assert engine.is_running()


def test_sleeps_of_the_engines_thread_end_in_time() -> None:
    slack_ns: list[int] = []
    core, _ = make_core()
    with started(core) as engine:
        get_slack = 30  # PR_GET_TIMERSLACK
        engine.submit(lambda _core: slack_ns.append(ctypes.CDLL(None).prctl(get_slack)))
        wait_until(lambda: slack_ns)
    assert slack_ns == [1000]


def test_blocks_that_a_hook_frees_go_to_who_waits_at_once(sleepy: None) -> None:
    outputs = Outputs()
    written: list[list[int]] = []

    class Writing:
        def before_launch(self, plan: StepPlan) -> None:
            pass

        def after_launch(self, plan: StepPlan | None) -> bool:
            if core.scheduler.table.waiting and written:  # the scheduler has run
                core.sequences.unpin(written.pop())
            return False

        def poll(self) -> bool:
            return False

    def start(core: EngineCore) -> None:
        blocks = core.scheduler.pool.allocate(3)  # of a sequence that has ended
        core.scheduler.blocks.pin(blocks)
        core.scheduler.pool.release(blocks)
        written.append(blocks)
        core.sequences.add(make_sequence("waiting", [1] * 9, max_tokens=2))

    core, _ = make_core(hooks=[Writing()], num_blocks=4, block_size=4)
    with started(core, outputs) as engine:
        engine.submit(start)
        wait_until(lambda: outputs.has_ended("waiting"))
