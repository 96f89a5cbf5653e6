"""The engine's own thread, and the queue of commands to it.

    commands --> advance: schedule, launch, read the previous step --> outputs --> hooks --> ...

Between two iterations the thread polls while the device works, and sleeps when there is nothing to
do.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from pagewire.shared.base.errors import IntegrityError, OverloadedError
from pagewire.shared.costs.load import Load
from pagewire.shared.costs.step_prices import StepPrices
from pagewire.shared.engine.core import EngineCore
from pagewire.shared.engine.step_clock import RunningStep
from pagewire.shared.engine.step_output import StepOutputs
from pagewire.shared.engine.waker import Waker
from pagewire.shared.kv.block_pool import BlockCounts

logger = logging.getLogger(__name__)

MAX_COMMANDS = 65_536
IDLE_WAIT_S = 0.5  # an idle iteration takes 0.4 ms
POLL_S = 0.00001  # of the device and the hooks; a sleep takes five times as long
EXPECTED_S = 0.005  # from the first bytes of a request until its job comes, and some more
WARM_INTERVAL_S = 0.001  # while work is expected
MAX_POLL_S = 0.01  # after this, an iteration runs in any case, to refresh the snapshot
_PR_SET_TIMERSLACK = 29  # linux/prctl.h
_SLACK_NS = 1000
SNAPSHOT_INTERVAL_S = 0.02
INTEGRITY_INTERVAL_S = 10.0

Command = Callable[[EngineCore], None]


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """The engine's state at one moment, for other threads to read.

    Attributes:
        as_of_s: time on the monotonic clock; commands that came later may be missing.
        iterations: of the loop so far.
        load: what is reported to routers.
        prices: of the engine's steps.
    """

    as_of_s: float
    iterations: int
    blocks: BlockCounts
    running: int
    waiting: int
    load: Load
    prices: StepPrices
    num_preemptions: int
    num_retained: int


class EngineThread:
    """Runs an engine. Commands go in as callables, outputs come out through a callback.

    Attributes:
        iterations: grows with each iteration of the loop, idle or not.
        commands_s: when the loop last ran commands, on the monotonic clock.
        thread: runs the loop.
        error: what ended the loop, if an error did.
        snapshot: at most a few steps old.
        integrity_errors: how often the block accounting was wrong; anything but 0 is a bug.
    """

    def __init__(
        self,
        core: EngineCore,
        on_outputs: Callable[[StepOutputs], None],
        *,
        waker: Waker | None = None,
        busy_polls: bool = False,
        warm_launch_path: Callable[[], object] = lambda: None,
    ) -> None:
        """Make the thread without starting it.

        Args:
            core: used by nobody else from `start` on.
            on_outputs: called in the engine's thread, which waits for it; what it raises ends the
                loop.
            waker: wakes the thread, also for what the hooks watch; `stop` closes it.
            busy_polls: poll without sleeping while only the hooks wait for something, or work is
                expected, which takes a core. A thread that sleeps may wake up milliseconds late,
                longer than a GPU takes to send a prompt's blocks.
            warm_launch_path: called again and again while work is expected, if the thread
                busy-polls: the first calls of CUDA after a pause take several times as long as
                later ones.
        """
        self._busy_polls, self._warm_launch_path = busy_polls, warm_launch_path
        self._polls_until_s = 0.0
        self._hooks_are_quiet = False  # for `MAX_POLL_S`: their peer may have stopped
        self.core = core
        self.iterations = 0
        self.commands_s = time.monotonic()
        self.snapshot = self._take_snapshot()
        self.integrity_errors = 0
        self._next_check_s = 0.0
        self._next_snapshot_s = 0.0
        self._on_outputs = on_outputs
        self._commands: deque[Command] = deque()
        self._lock = threading.Lock()
        self._waker = waker or Waker()
        self._is_woken = False
        self._stopping = False
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self._loop, name="engine", daemon=True)

    def start(self) -> None:
        """Start the thread, which runs the loop until `stop`."""
        self.thread.start()

    def stop(self, timeout: float) -> bool:
        """End the loop after the step under way; returns whether it ended in time."""
        with self._lock:
            self._stopping = True
        self._waker.wake()
        self.thread.join(timeout)
        if self.thread.is_alive():
            return False
        self._waker.close()
        return True

    def submit(self, command: Command, *, admitted: bool = False) -> None:
        """Run a command between two steps. Callable from any thread.

        Args:
            command: called in the engine's thread.
            admitted: the command ends or advances work that an earlier command brought in. It is
                never refused: that would leave blocks in use and requests waiting for ever. The
                limit on new work bounds such commands, too, since each request needs only a few.

        Raises:
            OverloadedError: the engine does not keep up; never for admitted work.
        """
        with self._lock:
            if not admitted and len(self._commands) >= MAX_COMMANDS:
                raise OverloadedError("the engine's command queue is full")
            self._commands.append(command)
        self._waker.wake()

    def expect_work(self) -> None:
        """Poll without sleeping for `EXPECTED_S`: work is about to come. From any thread."""
        self._polls_until_s = time.monotonic() + EXPECTED_S
        self._is_woken = True
        self._waker.wake()

    def is_running(self) -> bool:
        """Whether the loop runs. If it does and `heartbeat` does not change, it may hang."""
        return self.thread.is_alive()

    @property
    def step(self) -> RunningStep | None:
        """The step that `StepClock.current` says; from any thread."""
        return self.core.steps.current

    @property
    def heartbeat(self) -> int:
        """Changes with each step that ends, and without a step with each iteration."""
        steps = self.core.steps
        return self.iterations if steps.current is None else -1 - steps.finished

    def _loop(self) -> None:
        _set_precise_sleeps()
        try:
            while not self._stopping:
                self._iterate()
        except Exception as exc:
            self.error = exc
            logger.exception("the engine's loop died")  # from now on, `is_running` is false

    def _iterate(self) -> None:
        self.iterations += 1
        self._run_commands()
        outputs, worked = self.core.advance(wait=False)
        if outputs:
            if any(output.finish_reason is not None for output in outputs.individual):
                # With the last tokens of an answer comes the load after it.
                self.snapshot = self._take_snapshot()
            self._on_outputs(outputs)
        worked |= self.core.run_hooks()
        self._observe(idle=not self.core.has_work)
        if worked:
            return
        now = time.monotonic()
        if self.core.awaits_step or self.core.hooks_busy:
            self._poll(now + MAX_POLL_S)
        elif self._busy_polls and now < self._polls_until_s:
            self._warm_launch_path()
            self._hooks_are_quiet = False
            self._poll(min(self._polls_until_s, time.monotonic() + WARM_INTERVAL_S))
        else:
            self._idle()

    def _poll(self, until: float) -> None:
        """Poll the device and the hooks until a step or a command needs an iteration.

        Whole iterations would do, too, but each keeps the interpreter's lock for longer, and hooks
        would wait for the rest of it.

        Args:
            until: the time at which this ends at the latest.
        """
        core = self.core
        were_quiet, self._hooks_are_quiet = self._hooks_are_quiet, True
        while not (self._has_news or core.is_step_due() or time.monotonic() > until):
            if not core.poll_hooks():
                sleeps = core.awaits_step or were_quiet or not self._busy_polls
                time.sleep(POLL_S if sleeps else 0.0)
                continue
            were_quiet = self._hooks_are_quiet = False
            if core.run_hooks() or not (core.awaits_step or core.hooks_busy):
                break
        self._is_woken = False

    def _observe(self, idle: bool) -> None:
        """Refresh the snapshot from time to time; when idle, check the block accounting."""
        now = time.monotonic()
        if idle or now >= self._next_snapshot_s:
            self._next_snapshot_s = now + SNAPSHOT_INTERVAL_S
            self.snapshot = self._take_snapshot()
        if idle and now >= self._next_check_s:
            self._next_check_s = now + INTEGRITY_INTERVAL_S
            try:
                self.core.scheduler.table.check_integrity()
            except IntegrityError:
                self.integrity_errors += 1
                logger.exception("the accounting of KV blocks is wrong")

    def _take_snapshot(self) -> EngineSnapshot:
        scheduler = self.core.scheduler
        return EngineSnapshot(
            as_of_s=self.commands_s,
            iterations=self.iterations,
            blocks=scheduler.pool.counts(),
            running=len(scheduler.table.running),
            waiting=scheduler.table.num_waiting + len(scheduler.table.reserved),
            load=scheduler.meter.load,
            prices=scheduler.costs.published,
            num_preemptions=scheduler.table.num_preemptions,
            num_retained=scheduler.pool.num_retained,
        )

    @property
    def _has_news(self) -> bool:
        return bool(self._commands or self._is_woken or self._stopping)

    def _idle(self) -> None:
        # This check comes after `prepare`, because only what comes after `prepare` ends the wait.
        self._waker.prepare()
        if not (self._has_news or self.core.poll()):
            self._waker.wait(IDLE_WAIT_S)
        self._waker.finish()
        self._is_woken = self._hooks_are_quiet = False

    def _run_commands(self) -> None:
        self.commands_s = time.monotonic()
        for _ in range(len(self._commands)):  # later ones wait for the next iteration
            with self._lock:
                command = self._commands.popleft()
            try:
                command(self.core)
            except Exception:  # one request's command must not end the others'
                logger.exception("an engine command failed")


def _set_precise_sleeps() -> None:
    """Have this thread's sleeps end in time: Linux adds up to 50 us to each unless asked not to.

    See prctl(2). Where there is no such call, or it is refused, sleeps are longer.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, _SLACK_NS, 0, 0, 0)
