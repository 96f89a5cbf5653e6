"""The live sequences of an engine by name: how they come, go on after another worker, and end."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from pagewire.shared.base.errors import InvalidRequestError
from pagewire.shared.engine.constraints import Constraints
from pagewire.shared.engine.launched import Launched
from pagewire.shared.engine.scheduling.scheduler import Scheduler
from pagewire.shared.engine.scheduling.sequence import Sequence
from pagewire.shared.engine.scheduling.status import RequestStatus
from pagewire.shared.engine.step_output import StepOutput


@dataclass(slots=True)
class LiveSequences:
    """Sequences that have not ended, and the steps that compute them.

    Attributes:
        constraints: the grammars of sequences, and the masks of steps.
    """

    scheduler: Scheduler
    constraints: Constraints = field(default_factory=Constraints, init=False)
    clock: Callable[[], float] = field(default=time.monotonic, init=False)
    _sequences: dict[str, Sequence] = field(default_factory=dict, init=False)
    _in_flight: deque[Launched] = field(default_factory=deque, init=False)  # oldest first
    _other_outputs: list[StepOutput] = field(default_factory=list, init=False)
    # Something has changed since the scheduler's last decision.
    _has_news: bool = field(default=False, init=False)

    def add(self, sequence: Sequence, children: tuple[Sequence, ...] = ()) -> None:
        """Queue a sequence; see `SequenceTable.add` for its children.

        Raises:
            InvalidRequestError: a name is in use, or see `SequenceTable.add`.
            OverloadedError: see `SequenceTable.add`.
        """
        named = {each.request_id: each for each in (sequence, *children)}
        for name in named:
            if name in self._sequences or name in self.scheduler.awaiting_send:
                raise InvalidRequestError(f"another request has the id {name}", "request_id")
        self.constraints.check(sequence)
        self.scheduler.add(sequence, children)
        for each in named.values():
            each.arrival_s = self.clock()
            self.constraints.open(each)
        self._sequences |= named
        self._has_news = True  # if a hook has called this, the scheduler has already decided

    def get(self, request_id: str) -> Sequence | None:
        """Return a live sequence."""
        return self._sequences.get(request_id)

    def abort(self, request_id: str) -> None:
        """End a sequence in any state and free all its resources; ignore unknown ids."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._end(sequence, RequestStatus.FINISHED_ABORTED)
        self.scheduler.forget(request_id)

    # Another worker computes a prompt

    def activate(self, sequence: Sequence, first_token: int) -> None:
        """Let a reserved sequence, whose KV has arrived, continue after its first token.

        The prefill worker has already delivered that token, so it is not an output here. If it is
        also the last one, only the end is reported.
        """
        self.scheduler.activate(sequence, first_token)
        sequence.scored_until = sequence.num_prompt_tokens  # delivered before the first token
        self.scheduler.fork_children(sequence)
        self._has_news = True
        self._end_silently(sequence, first_token)

    def unpin(self, blocks: list[int]) -> None:
        """Release blocks that nothing writes to any more; those of ended sequences become free."""
        pool = self.scheduler.pool
        used = pool.counts().used
        self.scheduler.unpin(blocks)
        self._has_news |= pool.counts().used < used

    def recompute_locally(self, sequence: Sequence, first_token: int | None) -> None:
        """Compute a reserved sequence's prompt on this worker after all.

        Args:
            sequence: a reserved sequence whose KV will not arrive.
            first_token: the token that a prefill worker has sampled and delivered, if there is one:
                generation continues after it.
        """
        self.scheduler.recompute_locally(sequence)
        if first_token is None:
            return
        sequence.token_ids.append(first_token)
        sequence.scored_until = sequence.num_prompt_tokens  # delivered before the first token
        sequence.num_replayed_tokens += 1
        self._end_silently(sequence, first_token)

    def _end_silently(self, sequence: Sequence, token: int) -> None:
        """End a sequence if this token, which a prefill worker has delivered, is its last."""
        status = end_of(sequence, token)
        if status is not None:
            self._end(sequence, status)
            self._other_outputs.append(StepOutput(sequence.request_id, [], status.finish_reason))

    # Sequences end, or are computed again

    def _end(self, sequence: Sequence, status: RequestStatus) -> None:
        if not sequence.is_finished:  # it is, if an error interrupted an earlier call
            self.scheduler.finish(sequence, status)
        del self._sequences[sequence.request_id]
        self.constraints.close(sequence)
        self._lose(sequence)

    def _run_again(self, sequence: Sequence) -> None:
        """Take a running sequence out of all steps; it waits, first of its owner's."""
        self.scheduler.preempt(sequence)
        self._lose(sequence)

    def _lose(self, sequence: Sequence) -> None:
        for launched in self._in_flight:
            launched.lost.add(sequence)

    def _fail(
        self,
        sequence: Sequence,
        error: str = "the model step failed",
        param: str | None = None,
        is_busy: bool = False,
    ) -> None:
        """End a sequence with an error, unless it has ended."""
        if self._sequences.get(name := sequence.request_id) is sequence:
            self._end(sequence, RequestStatus.FINISHED_ERROR)
            self._other_outputs.append(
                StepOutput(name, [], "error", error=error, param=param, is_busy=is_busy)
            )

    def _contain(self, touched: list[Sequence]) -> None:
        """Fail the sequences that an error may have left in an inconsistent state.

        Raises:
            IntegrityError: the block accounting is still wrong afterwards.
        """
        for sequence in touched:
            self._fail(sequence)
        self.scheduler.check_integrity()


def end_of(sequence: Sequence, token: int) -> RequestStatus | None:
    """Return the status with which a sequence ends after its newest token; None: it goes on."""
    if sequence.prefill_only:
        return RequestStatus.FINISHED_LENGTH
    if token in sequence.stop_token_ids:
        return RequestStatus.FINISHED_STOPPED
    if len(sequence.token_ids) > sequence.run_until:
        return RequestStatus.FINISHED_LENGTH
    return None
