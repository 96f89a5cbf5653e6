"""Times some steps before an engine has work, so that its first prices are measured.

On a CPU every engine runs a few small ones, so that the first prompt is cut into chunks of the
right size. A worker runs larger ones, too, as many as take little time: routers place the first
burst of requests by the prices in its first record.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from pagewire.shared.costs.first_steps import FIRST, FURTHER, TimedStep
from pagewire.shared.engine.execution.executor import Executor, PendingStep
from pagewire.shared.engine.execution.model_runner import ModelRunner
from pagewire.shared.engine.scheduling.schedule import SchedulerLimits
from pagewire.shared.engine.scheduling.scheduler import Scheduler
from pagewire.shared.engine.scheduling.step import (
    DecodeInput,
    NewDeviceSlot,
    PrefillChunk,
    StepPlan,
    TableEntries,
)
from pagewire.shared.request.sampling import RequestSpec

logger = logging.getLogger(__name__)

# Of each kind of step. The lower median counts, since the first run may take longer.
RUNS, RUNS_ON_CPU = 4, 2
_PRIME = 7919  # spreads tokens over the vocabulary, so that they need different experts


def calibrate(
    executor: Executor, runner: ModelRunner, scheduler: Scheduler, *, overlap: bool, limit_s: float
) -> None:
    """Let an engine's costs learn from steps, in blocks and device slots that are free.

    Args:
        executor: runs them.
        runner: the part of the executor in this process.
        scheduler: has the engine's costs and limits.
        overlap: whether the engine launches a step before the one before has ended.
        limit_s: how long this may take. The steps of `FIRST` are run in any case, once at least; of
            the others those that are predicted to end in time.
    """
    # On a CPU this thread's time: workers that start together slow each other, but not for long.
    clock = time.perf_counter if overlap else time.thread_time
    costs, began_s = scheduler.costs, clock()
    timer = _StepTimer(executor, runner, scheduler.limits, overlap, clock, began_s + limit_s)
    timer.seconds(timer.fitted(FIRST[0]))  # the first step of all takes longer
    for step in map(timer.fitted, FIRST):
        costs.learn(step.work, timer.seconds(step))
    for step in dict.fromkeys(map(timer.fitted, FURTHER)):
        if step.before >= 0 and timer.has_time_for(costs.prices.step_s(step.work)):
            costs.learn(step.work, timer.seconds(step))
    steps, seconds = costs.published.steps, clock() - began_s
    logger.info("timed %d kinds of steps in %.2f s, to predict how long steps take", steps, seconds)


@dataclass(frozen=True, slots=True)
class _StepTimer:
    """Runs steps of chosen sizes, and measures how long each takes.

    Attributes:
        executor: runs them.
        runner: the part of the executor in this process.
        limits: the engine's.
        overlap: see `calibrate`.
        clock: measures the steps.
        end_s: after this time no step is run again.
    """

    executor: Executor
    runner: ModelRunner
    limits: SchedulerLimits
    overlap: bool
    clock: Callable[[], float]
    end_s: float

    @property
    def runs(self) -> int:
        """How often each step is run."""
        return RUNS if self.overlap else RUNS_ON_CPU

    def has_time_for(self, step_s: float) -> bool:
        """Whether all runs of a step that takes this long end in time."""
        return self.clock() + self.runs * step_s <= self.end_s

    def fitted(self, step: TimedStep) -> TimedStep:
        """Return a step with no more than this engine has room for.

        `before` is below 0 if there is no room for the rows at all.
        """
        runner, rows = self.runner, min(step.rows, self.runner.state.num_slots)
        blocks = int(runner.kv_pool.shape[0]) // (len(runner.layout.groups) * max(1, rows))
        room = min(blocks * runner.block_size, self.limits.max_model_len)
        if rows:
            return TimedStep(rows, min(step.before, room - self.runs), 0)
        tokens = min(step.tokens, self.limits.max_num_batched_tokens, room)
        return TimedStep(0, min(step.before, room - tokens), tokens)

    def seconds(self, step: TimedStep) -> float:
        """Run a step; return the median seconds of its runs."""
        slots, vocab = list(range(max(1, step.rows))), self.runner.vocab_size
        if step.rows:
            inputs = [DecodeInput(slot, slot * _PRIME % vocab, step.before) for slot in slots]
            first = StepPlan(number=0, inputs=inputs, decodes=slots)
            again = StepPlan(number=0, decodes=slots)
        else:
            tokens = [number * _PRIME % vocab for number in range(step.tokens)]
            chunk = PrefillChunk(0, step.before, tokens, samples=False)
            first = again = StepPlan(number=0, chunks=[chunk])
        self._take_slots(slots, step.before + (step.tokens or self.runs))
        times = [end - began for began, end in pairwise(self._run(first, again))]
        self.executor.execute(StepPlan(number=0, freed=slots)).wait()
        return statistics.median_low(times)

    def _take_slots(self, slots: list[int], tokens: int) -> None:
        """Give device slots owners, and blocks for this many tokens each."""
        runner, blocks = self.runner, TableEntries()
        count, groups = runner.layout.blocks_for(tokens), len(runner.layout.groups)
        for slot in slots:
            for group in range(groups):
                start = (slot * groups + group) * count
                ids = list(range(start, start + count))
                blocks.add(slot, group * runner.state.max_blocks, ids)
        owners = [NewDeviceSlot(slot, RequestSpec(temperature=1.0, seed=slot)) for slot in slots]
        self.executor.execute(StepPlan(number=0, new_slots=owners, blocks=blocks)).wait()

    def _run(self, first: StepPlan, again: StepPlan) -> list[float]:
        """Run a step several times, as the engine does; return when it began, and each end."""
        depth, times_s = 2 if self.overlap else 1, [self.clock()]
        pending: deque[PendingStep] = deque()
        for run in range(self.runs):
            pending.append(self.executor.execute(again if run else first))
            if len(pending) == depth:
                pending.popleft().wait()
                times_s.append(self.clock())
            if times_s[-1] > self.end_s:
                break
        for each in pending:
            each.wait()
            times_s.append(self.clock())
        return times_s
