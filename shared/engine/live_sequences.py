"""The live sequences of an engine by name: how they come, go on after another worker, and end."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from pagewire.shared.base.errors import InvalidRequestError
from pagewire.shared.engine.constraints import Constraints
from pagewire.shared.engine.launched import Launched
from pagewire.shared.engine.scheduling.sequence import Sequence
from pagewire.shared.engine.scheduling.sequence_table import SequenceTable
from pagewire.shared.engine.scheduling.status import RequestStatus
from pagewire.shared.engine.step_output import OutputBuffer, StepOutput


@dataclass(slots=True)
class LiveSequences:
    """Sequences that have not ended, and the steps that compute them.

    Attributes:
        table: the scheduler's; where each sequence stands.
        constraints: the grammars of sequences, and the masks of steps; by default, no grammar can
            be followed.
        clock: returns a time in seconds.
        in_flight: the steps on the device, oldest first.
        outputs: of all sequences.
        has_news: something has changed since the scheduler's last decision.
    """

    table: SequenceTable
    constraints: Constraints = field(default_factory=Constraints)
    clock: Callable[[], float] = time.monotonic
    in_flight: deque[Launched] = field(default_factory=deque)
    outputs: OutputBuffer = field(default_factory=OutputBuffer)
    has_news: bool = False
    _by_name: dict[str, Sequence] = field(default_factory=dict)

    def add(self, sequence: Sequence, children: tuple[Sequence, ...] = ()) -> None:
        """Queue a sequence; see `SequenceTable.add` for its children.

        Raises:
            InvalidRequestError: a name is in use, or see `SequenceTable.add`.
            OverloadedError: see `SequenceTable.add`.
        """
        named = {each.request_id: each for each in (sequence, *children)}
        for name in named:
            if name in self._by_name or name in self.table.awaiting_send:
                raise InvalidRequestError(f"another request has the id {name}", "request_id")
        self.constraints.check(sequence)
        self.table.add(sequence, children)
        for each in named.values():
            each.arrival_s = self.clock()
            self.constraints.open(each)
        self._by_name |= named
        self.has_news = True  # if a hook has called this, the scheduler has already decided

    def get(self, request_id: str) -> Sequence | None:
        """Return the live sequence of this name; None if there is none."""
        return self._by_name.get(request_id)

    def abort(self, request_id: str) -> None:
        """End a sequence in any state and free all its resources; ignore unknown ids."""
        sequence = self._by_name.get(request_id)
        if sequence is not None:
            self.end(sequence, RequestStatus.FINISHED_ABORTED)
        self.table.forget(request_id)

    # Another worker computes a prompt

    def activate(self, sequence: Sequence, first_token: int) -> None:
        """Let a reserved sequence, whose KV has arrived, continue after its first token.

        The prefill worker has already delivered that token, so it is not an output here. If it is
        also the last one, only the end is reported.
        """
        self.table.activate(sequence, first_token)
        sequence.scored_until = sequence.num_prompt_tokens  # delivered before the first token
        self.table.fork_children(sequence)
        self.has_news = True
        self._end_silently(sequence, first_token)

    def unpin(self, blocks: list[int]) -> None:
        """Release blocks that nothing writes to any more; those of ended sequences become free."""
        pool = self.table.blocks.pool
        used = pool.counts().used
        self.table.blocks.unpin(blocks)
        self.has_news |= pool.counts().used < used

    def recompute_locally(self, sequence: Sequence, first_token: int | None) -> None:
        """Compute a reserved sequence's prompt on this worker after all.

        Args:
            sequence: a reserved sequence whose KV will not arrive.
            first_token: the token that a prefill worker has sampled and delivered, if there is one:
                generation continues after it.
        """
        self.table.recompute_locally(sequence)
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
            self.end(sequence, status)
            self.outputs.individual.append(
                StepOutput(sequence.request_id, [], status.finish_reason)
            )

    # Sequences end, or are computed again

    def end(self, sequence: Sequence, status: RequestStatus) -> None:
        """End a sequence and free all its resources."""
        if not sequence.is_finished:  # it is, if an error interrupted an earlier call
            self.table.finish(sequence, status)
        del self._by_name[sequence.request_id]
        self.constraints.close(sequence)
        self._lose(sequence)

    def run_again(self, sequence: Sequence) -> None:
        """Take a running sequence out of all steps; it waits, first of its owner's."""
        self.table.preempt(sequence)
        self._lose(sequence)

    def _lose(self, sequence: Sequence) -> None:
        for launched in self.in_flight:
            launched.lost.add(sequence)

    def fail(
        self,
        sequence: Sequence,
        error: str = "the model step failed",
        param: str | None = None,
        is_busy: bool = False,
    ) -> None:
        """End a sequence with an error, unless it has ended."""
        if self._by_name.get(name := sequence.request_id) is sequence:
            self.end(sequence, RequestStatus.FINISHED_ERROR)
            self.outputs.individual.append(
                StepOutput(name, [], "error", error=error, param=param, is_busy=is_busy)
            )

    def contain(self, touched: list[Sequence]) -> None:
        """Fail the sequences that an error may have left in an inconsistent state.

        Raises:
            IntegrityError: the block accounting is still wrong afterwards.
        """
        for sequence in touched:
            self.fail(sequence)
        self.table.check_integrity()


def end_of(sequence: Sequence, token: int) -> RequestStatus | None:
    """Return the status with which a sequence ends after its newest token; None: it goes on."""
    if sequence.prefill_only:
        return RequestStatus.FINISHED_LENGTH
    if token in sequence.stop_token_ids:
        return RequestStatus.FINISHED_STOPPED
    if len(sequence.token_ids) > sequence.run_until:
        return RequestStatus.FINISHED_LENGTH
    return None
