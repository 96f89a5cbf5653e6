"""The engine's step loop: schedule, run, postprocess. One thread calls it.

With overlap, step n + 1 is launched before the tokens of step n are read, so that the host's work
hides behind the device's. Stop conditions are then seen a step late; the one token too many is
dropped.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from pagewire.shared.engine.model_runner import Executor, PendingTokens
from pagewire.shared.engine.scheduler import ScheduledBatch, ScheduledTokens, Scheduler
from pagewire.shared.engine.sequence import Sequence
from pagewire.shared.errors import InvalidRequestError
from pagewire.shared.request import FinishReason, RequestStatus

logger = logging.getLogger(__name__)

MAX_FAILED_STEPS = 3  # in a row


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step gave one sequence.

    Attributes:
        cached_tokens: prompt tokens found in the prefix cache; with the first output only.
        queue_s, prefill_s: time waited and computed until the first token; likewise.
    """

    request_id: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    cached_tokens: int | None = None
    queue_s: float = 0.0
    prefill_s: float = 0.0
    error: str | None = None


class StepHook(Protocol):
    """Work that belongs between steps, e.g. moving KV blocks.

    `after_launch` runs once a loop turn, behind the launch of a step if there was one. It returns
    whether it has unfinished work, so that `is_due` is asked soon.
    """

    def after_launch(self) -> bool:
        """Do what is to be done between two steps."""
        ...

    def is_due(self) -> bool:
        """Whether the device has done what `after_launch` waits for. Asked often: to be quick."""
        ...


@dataclass(slots=True)
class EngineStats:
    """Counters since the start."""

    steps: int = 0
    prompt_tokens_computed: int = 0
    tokens_generated: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0


@dataclass(slots=True)
class EngineCore:
    """Scheduler and executor, joined.

    Attributes:
        overlap: launch a step before the tokens of the one before are read.
        hooks_busy: a hook waits for the device.
    """

    scheduler: Scheduler
    executor: Executor
    overlap: bool
    hooks: list[StepHook] = field(default_factory=list)
    stats: EngineStats = field(default_factory=EngineStats)
    clock: Callable[[], float] = time.monotonic
    hooks_busy: bool = False
    _sequences: dict[str, Sequence] = field(default_factory=dict)
    _in_flight: deque[tuple[ScheduledBatch, PendingTokens]] = field(default_factory=deque)
    _outputs: list[StepOutput] = field(default_factory=list)
    _failed_steps: int = 0
    _has_news: bool = False  # for the scheduler, which has had its turn

    def __post_init__(self) -> None:
        self.scheduler.on_admitted = self._count_admission

    def add(self, sequence: Sequence) -> None:
        """Take a sequence into the queue.

        Raises:
            InvalidRequestError: the name is in use, or see `Scheduler.add`.
            OverloadedError: see `Scheduler.add`.
        """
        request_id = sequence.request_id
        if request_id in self._sequences or request_id in self.scheduler.held:
            raise InvalidRequestError(f"there is a request {request_id} already", "request_id")
        sequence.arrival_s = self.clock()
        self.scheduler.add(sequence)
        self._sequences[request_id] = sequence

    def get(self, request_id: str) -> Sequence | None:
        """Return a live sequence."""
        return self._sequences.get(request_id)

    def abort(self, request_id: str) -> None:
        """End a sequence wherever it is and free all of it; unknown ids are fine."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._end(sequence, RequestStatus.FINISHED_ABORTED)
        self.scheduler.forget(request_id)

    @property
    def has_work(self) -> bool:
        """Whether a further step could change anything."""
        scheduler = self.scheduler
        return bool(scheduler.running or scheduler.waiting or self._in_flight or self._outputs)

    @property
    def awaits_step(self) -> bool:
        """Whether a step is on the device."""
        return bool(self._in_flight)

    def is_due(self) -> bool:
        """Whether the device has done something that the next step waits for; quickly told."""
        if self._in_flight and self._in_flight[0][1].is_done():
            return True
        return any(hook.is_due() for hook in self.hooks)

    def step(self, wait: bool = True) -> tuple[list[StepOutput], bool]:
        """Launch the next step and postprocess the one before (without overlap: the same).

        Args:
            wait: for the step that is due; without, a step that still runs on the device is
                looked for again at the next call, and the hooks get their turns in between.

        Returns:
            The outputs, and whether anything was done that the next call may build on.

        Raises:
            Exception: whatever the executor raises, when step after step fails.
        """
        depth = 2 if self.overlap else 1
        batch = self.scheduler.schedule() if len(self._in_flight) < depth else None
        if batch is not None:
            self._launch(batch)
        hooks_busy = [hook.after_launch() for hook in self.hooks]
        due = len(self._in_flight) == depth or (self._in_flight and batch is None)
        finished = bool(due and (wait or self._in_flight[0][1].is_done()))
        if finished:
            self._postprocess(*self._in_flight.popleft())
        self.hooks_busy = any(hooks_busy)
        outputs, self._outputs = self._outputs, []
        has_news, self._has_news = self._has_news, False
        return outputs, bool(batch or finished or outputs or has_news)

    def _launch(self, batch: ScheduledBatch) -> None:
        now = self.clock()
        for part in batch:
            if part.sequence.first_scheduled_s is None:
                part.sequence.first_scheduled_s = now
        try:
            pending = self.executor.execute(batch)
        except Exception as exc:
            logger.exception("a step failed to launch, and with it its requests")
            self._fail_batch(batch, exc)
            return
        self.stats.steps += 1
        self.stats.prompt_tokens_computed += sum(
            part.length for part in batch if part.start < part.sequence.num_prompt_tokens
        )
        self._in_flight.append((batch, pending))

    def _postprocess(self, batch: ScheduledBatch, pending: PendingTokens) -> None:
        try:
            tokens = pending.wait()
        except Exception as exc:
            logger.exception("a step failed, and with it its requests")
            self._fail_batch(batch, exc)
            return
        self._failed_steps = 0
        for part in batch.prefills:
            if not part.samples:
                self._register(part)
        for part, token in zip(batch.sampled(), tokens, strict=True):
            self._accept(part, token)

    def _register(self, part: ScheduledTokens) -> None:
        sequence = part.sequence
        if not part.is_stale and not sequence.is_finished:
            self.scheduler.register_blocks(sequence, part.start, part.end)

    def _accept(self, part: ScheduledTokens, token: int) -> None:
        """Append a sampled token to its sequence, or drop it if the sequence has ended."""
        sequence = part.sequence
        sequence.num_in_flight_tokens -= 1
        if sequence.is_finished or (sequence.prefill_only and part.is_stale):
            return  # what a prefill job is for is its blocks: without them it runs again
        self._register(part)
        first = len(sequence.token_ids) == sequence.num_prompt_tokens + sequence.num_resumed_tokens
        sequence.token_ids.append(token)
        self.stats.tokens_generated += 1
        status = self._end_of(sequence, token)
        if status is not None:
            self._end(sequence, status)
        self._outputs.append(self._output_of(sequence, token, first, status))

    def _end_of(self, sequence: Sequence, token: int) -> RequestStatus | None:
        if sequence.prefill_only:
            return RequestStatus.FINISHED_LENGTH
        if token in sequence.stop_token_ids:
            return RequestStatus.FINISHED_STOPPED
        if (
            sequence.num_output_tokens - sequence.num_in_flight_tokens
            >= sequence.sampling.max_tokens
            or len(sequence.token_ids) >= self.scheduler.limits.max_model_len
        ):
            return RequestStatus.FINISHED_LENGTH
        return None

    def _output_of(
        self, sequence: Sequence, token: int, first: bool, status: RequestStatus | None
    ) -> StepOutput:
        reason = status.finish_reason if status is not None else None
        if not first:
            return StepOutput(sequence.request_id, [token], reason)
        started = sequence.first_scheduled_s or sequence.arrival_s
        return StepOutput(
            sequence.request_id,
            [token],
            reason,
            cached_tokens=min(sequence.num_cached_tokens or 0, sequence.num_prompt_tokens),
            queue_s=started - sequence.arrival_s,
            prefill_s=self.clock() - started,
        )

    def activate(self, sequence: Sequence, first_token: int) -> None:
        """Let a reserved sequence run on from its first token.

        The token's own output has been delivered by whoever computed it; only its end is told.
        """
        self.scheduler.activate(sequence, first_token)
        self._has_news = True
        status = self._end_of(sequence, first_token)
        if status is not None:
            self._finish_silently(sequence, status)

    def unpin(self, blocks: list[int]) -> None:
        """Nothing writes to these blocks any more; those of an ended sequence go to who waits."""
        pool = self.scheduler.pool
        used = pool.counts().used
        self.scheduler.unpin(blocks)
        self._has_news |= pool.counts().used < used

    def fall_back(self, sequence: Sequence, first_token: int | None) -> None:
        """Compute a reserved sequence's prompt here after all.

        Args:
            sequence: reserved for KV that does not come.
            first_token: if it was sampled elsewhere and delivered, generation goes on behind it.
        """
        self.scheduler.fall_back(sequence)
        if first_token is None:
            return
        sequence.token_ids.append(first_token)
        sequence.num_resumed_tokens += 1
        status = self._end_of(sequence, first_token)
        if status is not None:
            self._finish_silently(sequence, status)

    def _finish_silently(self, sequence: Sequence, status: RequestStatus) -> None:
        """End a sequence whose last token was delivered by somebody else."""
        self._end(sequence, status)
        self._outputs.append(StepOutput(sequence.request_id, [], status.finish_reason))

    def _end(self, sequence: Sequence, status: RequestStatus) -> None:
        self.scheduler.finish(sequence, status)
        del self._sequences[sequence.request_id]

    def _fail_batch(self, batch: ScheduledBatch, error: Exception) -> None:
        """Fail a step's requests.

        Raises:
            Exception: the error, if one step after another fails. A lost device fails them all,
                and only a new process gets it back.
        """
        for part in batch:
            if part.samples:
                part.sequence.num_in_flight_tokens -= 1
            if not part.sequence.is_finished:
                self._fail(part.sequence)
        self._failed_steps += 1
        if self._failed_steps >= MAX_FAILED_STEPS:
            raise error

    def _fail(self, sequence: Sequence) -> None:
        self._end(sequence, RequestStatus.FINISHED_ERROR)
        self._outputs.append(
            StepOutput(
                sequence.request_id, [], finish_reason="error", error="the model step failed"
            )
        )

    def _count_admission(self, sequence: Sequence) -> None:
        self.stats.prefix_queries += len(sequence.token_ids)
        self.stats.prefix_hits += sequence.num_cached_tokens or 0
