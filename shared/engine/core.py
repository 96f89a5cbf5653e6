"""The engine's step loop: schedules and runs steps, and accepts their tokens.

One iteration of a worker's engine (`EngineThread._iterate`) calls `advance`, passes the outputs on,
and calls `run_hooks`. Only one thread calls this class.

With overlap, step n + 1 is launched before the tokens of step n are read, so that the host works
while the device does. Stop conditions are then noticed one step late; the extra token is dropped.

If a step fails, its only prompt does, or if it has none its newest row; the others are computed
again (failed_steps.py). Another error in an iteration fails the sequences that the iteration
touched. Then the block accounting is checked. The loop ends only if the accounting is wrong, or if
one step after another fails on the device.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from pagewire.shared.base.errors import RankError, SchedulingError
from pagewire.shared.engine.acceptance import accept
from pagewire.shared.engine.execution.executor import Executor, StepHook
from pagewire.shared.engine.failed_steps import FailedSteps
from pagewire.shared.engine.launched import EngineStats, Launched
from pagewire.shared.engine.live_sequences import LiveSequences
from pagewire.shared.engine.scheduling.schedule import Schedule
from pagewire.shared.engine.scheduling.scheduler import Scheduler
from pagewire.shared.engine.scheduling.step import GrammarMasks, StepPlan
from pagewire.shared.engine.step_clock import OnStepChange, StepClock, unobserved
from pagewire.shared.engine.step_output import StepOutputs

logger = logging.getLogger(__name__)


class EngineCore:
    """Runs what the scheduler decides on an executor, and gives the tokens to their sequences.

    Args:
        scheduler: decides about steps.
        sequences: those that have not ended; others add and end them between two steps.
        executor: runs steps.
        overlap: launch a step before the tokens of the previous step are read.
        hooks: called before and after each launch; in a worker, the KV endpoint.
        on_step_change: see `StepClock.on_change`.

    Attributes:
        hooks_busy: a hook asks to be called again soon.
        stats: counters of all steps.
        steps: which step runs, and how long steps take.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        sequences: LiveSequences,
        executor: Executor,
        overlap: bool,
        hooks: Iterable[StepHook] = (),
        on_step_change: OnStepChange = unobserved,
    ) -> None:
        self.scheduler, self.executor, self.overlap = scheduler, executor, overlap
        self.sequences, self._in_flight = sequences, sequences.in_flight
        self.constraints, self.clock = sequences.constraints, sequences.clock
        self.hooks, self.hooks_busy = tuple(hooks), False
        self.stats, self._failures = EngineStats(), FailedSteps()
        self.steps = StepClock(scheduler.costs, self.clock, on_step_change)
        # What this iteration has decided and launched, for the hooks.
        self._decided: tuple[Schedule, StepPlan | None] = Schedule(), None

    @property
    def has_work(self) -> bool:
        """Whether a further step could change anything."""
        table = self.scheduler.table
        outputs = self.sequences.outputs.individual
        return bool(table.running or table.waiting or self._in_flight or outputs)

    @property
    def awaits_step(self) -> bool:
        """Whether a step is on the device."""
        return bool(self._in_flight)

    @property
    def awaits_device(self) -> bool:
        """Whether only the device can bring something new: as many steps as may be are on it."""
        return len(self._in_flight) == self._depth and not self.is_step_due()

    @property
    def _depth(self) -> int:
        return 2 if self.overlap else 1

    def poll(self) -> bool:
        """Let the hooks go on; return whether the next iteration has something to do; quick."""
        return self.is_step_due() or self.poll_hooks()

    def is_step_due(self) -> bool:
        """Whether `advance` can go on with the step on the device; cheap."""
        if not self._in_flight:
            return False
        oldest = self._in_flight[0]
        return self.constraints.is_due() if oldest.awaits_masks else oldest.pending.is_done()

    def poll_hooks(self) -> bool:
        """Let the hooks go on; return whether `run_hooks` has something to do; quick."""
        return any(hook.poll() for hook in self.hooks)

    def step(self, wait: bool = True) -> tuple[StepOutputs, bool]:
        """Run an iteration: `advance`, then `run_hooks`; returns what both return."""
        outputs, worked = self.advance(wait)
        has_news = self.run_hooks()
        return outputs, worked or has_news

    def advance(self, wait: bool) -> tuple[StepOutputs, bool]:
        """Launch the next step and postprocess the previous one (without overlap: the same one).

        Args:
            wait: block until the step that is due has finished. Otherwise a step that still runs
                on the device is polled again in the next call.

        Returns:
            The outputs, and whether anything was done, so that another call may find more to do.

        Raises:
            IntegrityError: something failed, and the block accounting is wrong afterwards.
            Exception: whatever the executor raises, when step after step fails.
        """
        depth = self._depth
        num_before = len(self._in_flight)
        may_launch = num_before < depth and not (num_before and self._in_flight[-1].awaits_masks)
        schedule = self._schedule() if may_launch else Schedule()
        plan = self._launch(schedule, schedule.plan) if schedule.plan is not None else None
        self._decided = schedule, plan
        has_rows = len(self._in_flight) > num_before
        sampled = self._sample(wait)
        due = len(self._in_flight) == depth or (self._in_flight and not has_rows)
        finished = bool(due and (wait or self._in_flight[0].is_done()))
        if finished:
            self._postprocess(self._in_flight.popleft())
            sampled |= self._sample(wait)
        outputs = self.sequences.outputs.flush()
        return outputs, bool(schedule.plan or finished or sampled or outputs)

    def run_hooks(self) -> bool:
        """Run the hooks. Call this after `advance`, so that its outputs do not wait for them.

        Returns:
            Whether the scheduler has something new to decide.

        Raises:
            IntegrityError: a hook failed, and the block accounting is wrong afterwards.
            RankError: a rank of the model is lost.
        """
        schedule, plan = self._decided
        self._decided = Schedule(), None
        self.hooks_busy = False
        for hook in self.hooks:
            try:
                self.hooks_busy |= hook.after_launch(plan)
            except RankError:
                raise
            except Exception:  # any, here and below: the other requests go on
                logger.exception("a step hook failed: failing this step's requests")
                self.sequences.contain(schedule.sequences)
        has_news, self.sequences.has_news = self.sequences.has_news, False
        return has_news

    def _schedule(self) -> Schedule:
        self.scheduler.pool.advance_to(self.clock())
        try:
            schedule = self.scheduler.schedule()
        except SchedulingError as exc:
            logger.exception("scheduling failed: failing the requests that it had changed")
            touched = map(self.sequences.get, exc.request_ids)
            self.sequences.contain([sequence for sequence in touched if sequence is not None])
            return Schedule()
        for launched in self._in_flight:
            launched.lost.update(schedule.preempted)
        for sequence in schedule.admitted:
            self.stats.prefix_queries += len(sequence.token_ids)
            self.stats.prefix_hits += sequence.num_cached_tokens or 0
        return schedule

    def _launch(self, schedule: Schedule, plan: StepPlan) -> StepPlan | None:
        """Launch a plan; returns it, or None if the launch failed."""
        now, parts = self.clock(), (*schedule.entries, *schedule.chunks)
        for part in parts:
            if part.sequence.first_scheduled_s is None:
                part.sequence.first_scheduled_s = now
        self.steps.begin(schedule)  # first: a step that is launched may already run
        try:
            for hook in self.hooks:
                hook.before_launch(plan)
            pending = self.executor.execute(plan)
        except Exception as exc:
            logger.exception("a step failed to launch")
            self.scheduler.carry_over(schedule)
            self._fail_step(schedule, exc)
            self.steps.withdraw()
            return None
        if not plan.has_rows:
            self.steps.withdraw()
            return plan  # a plan without rows has no result
        self.stats.steps += 1
        self.stats.prompt_tokens_computed += sum([part.num_prompt_tokens for part in parts])
        self._in_flight.append(Launched(schedule, pending, plan.awaits_masks))
        return plan

    def _sample(self, wait: bool) -> bool:
        """Launch the sampling of a step that awaits masks, if its masks can be filled now.

        Masks depend on all earlier tokens, so the step must be the only one in flight.

        Returns:
            Whether the sampling was launched.
        """
        if len(self._in_flight) != 1 or not self._in_flight[0].awaits_masks:
            return False
        launched = self._in_flight[0]
        if (masked := self.constraints.fill(launched, wait, self.steps.usual_s)) is None:
            return False
        for sequence, problem in masked.failed:
            self.sequences.fail(sequence, problem, "grammar")
        for sequence, problem in masked.too_late:
            self.sequences.fail(sequence, problem, is_busy=True)
        launched.skipped.update(masked.skipped.values())
        for sequence in launched.skipped:
            self.scheduler.skip_row(sequence)
        launched.awaits_masks = False
        self.stats.rows_skipped += len(masked.skipped)
        try:
            self.executor.sample(GrammarMasks(launched.number, masked.masks, list(masked.skipped)))
        except Exception as exc:
            logger.exception("a step's sampling failed to launch")
            self._in_flight.pop()
            self._fail_step(launched.schedule, exc, launched)
            self.steps.withdraw()
        return True

    def _postprocess(self, launched: Launched) -> None:
        try:
            result = launched.pending.wait()
        except Exception as exc:
            logger.exception("a step failed")
            self._fail_step(launched.schedule, exc, launched)
            self.steps.fail()
            return
        if launched.schedule.is_spoilt:
            self.steps.fail()
            return
        self._failures.clear()
        self.steps.finish(result.times)
        try:
            self.stats.tokens_generated += accept(launched, result, self.sequences)
        except Exception:
            logger.exception("reading a step's result failed: failing this step's requests")
            self.sequences.contain(launched.schedule.sequences)

    def _fail_step(
        self, schedule: Schedule, error: Exception, launched: Launched | None = None
    ) -> None:
        """Fail the requests that may have made a step fail, and have the others computed again.

        Args:
            schedule: the step's.
            error: why it failed.
            launched: the step, if it was launched. If it is spoilt, nothing happens; otherwise the
                steps that were launched after it are spoilt now.

        Raises:
            Exception: the error, if too many steps in a row have failed, or if a rank of the model
                is lost, without which no step runs.
        """
        if isinstance(error, RankError):
            self.steps.end_with(schedule)
            raise error
        if launched is None:
            later, verdict = [], self._failures.judge_launch(schedule)
        elif schedule.is_spoilt:
            return
        else:
            later = list(self._in_flight)
            verdict = self._failures.judge_result(launched, later)
        for sequence in verdict.failed:
            self.sequences.fail(sequence)
        for sequence in verdict.suspected:
            sequence.strikes += 1
        for sequence in reversed(verdict.again):  # each is put before its owner's others
            self.sequences.run_again(sequence)
        for sequence in verdict.tokenless:
            sequence.num_late_tokens -= 1
        for step in later:
            step.schedule.is_spoilt = True
        if self._failures.are_too_many():
            self.steps.end_with(schedule)
            raise error
