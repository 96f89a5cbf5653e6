"""Who fails when a step fails, who is computed again, and when too many steps have failed.

This is a pure decision, which `EngineCore` carries out.

    step n     launched --------> its result fails: its suspects fail, the others run again
    step n + 1     launched ------------------> its result does not count, whatever it is

If the step has one suspect, that one fails. Several suspects are computed again one by one: the
next step that fails because of one of them has no other suspect. With overlap, a later step may be
on the device by then. It has used what the failed step should have left, so all that it computes
is computed again, too, and nobody is suspected because of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from pagewire.shared.engine.launched import Launched
from pagewire.shared.engine.scheduling.schedule import Schedule
from pagewire.shared.engine.scheduling.sequence import Sequence
from pagewire.shared.engine.scheduling.status import RequestStatus
from pagewire.shared.engine.step_clock import suspects_of

# Steps that fail in a row because of different prompts, and in all. The same prompt may fail again
# and again, since its client tries again, while the device is as good as before.
MAX_FAILED_PROMPTS = 3
MAX_FAILED_STEPS = 10


@dataclass(slots=True)
class Verdict:
    """What becomes of the sequences of a failed step, and of the steps launched after it.

    Attributes:
        failed: sequences that end with an error.
        again: sequences that are computed again, in the order of the queue.
        suspected: those of `again` that may be why the step failed.
        tokenless: sequences that were to get a token and do not get it, once for each token.
    """

    failed: list[Sequence] = field(default_factory=list)
    again: list[Sequence] = field(default_factory=list)
    suspected: list[Sequence] = field(default_factory=list)
    tokenless: list[Sequence] = field(default_factory=list)


@dataclass(slots=True)
class FailedSteps:
    """Decides about failed steps, and counts those that fail in a row."""

    # Of each step in a row that failed: a hash of the one prompt that may be why, else None.
    _prompts: list[int | None] = field(default_factory=list)

    def clear(self) -> None:
        """Begin to count again: a step has succeeded."""
        self._prompts.clear()

    def are_too_many(self) -> bool:
        """Whether the device is probably lost. Then all steps fail, until a new process uses it."""
        num_different = len({*self._prompts} - {None})
        return len(self._prompts) >= MAX_FAILED_STEPS or num_different >= MAX_FAILED_PROMPTS

    def judge_launch(self, schedule: Schedule) -> Verdict:
        """Count a step that failed to launch, and decide about its sequences.

        Its changes of device slots and blocks may not have been applied, so what it prepares is
        prepared again. What it reserves fails, because it may be why: a step hook sees it first.
        """
        verdict, suspects = Verdict(), self._count(schedule)
        for sequence in schedule.sequences:
            if sequence.status is RequestStatus.RESERVED:
                verdict.failed.append(sequence)
            elif sequence.status is RequestStatus.RUNNING:
                _decide(sequence, suspects, verdict)
        verdict.tokenless += schedule.sampled
        return verdict

    def judge_result(self, step: Launched, later: Iterable[Launched]) -> Verdict:
        """Count a step whose result failed, and decide about its sequences and later ones.

        What the steps only prepare or reserve goes on: their changes of device slots and blocks
        have been applied.

        Args:
            step: the one that failed.
            later: those that were launched after it, oldest first.
        """
        verdict, suspects = Verdict(), self._count(step.schedule)
        exporting, seen = set[str](), set[Sequence]()
        steps = [step, *later]
        for each in steps:
            exporting |= each.schedule.exporting
        for each in steps:
            for sequence in each.schedule.computed:
                if sequence.is_finished or sequence in seen:
                    continue
                if sequence.prefill_only and sequence.request_id in exporting:
                    verdict.failed.append(sequence)  # wrong blocks of it may have been sent
                elif sequence not in each.lost:
                    _decide(sequence, suspects, verdict)
                else:
                    continue  # what it has lost is computed again anyway
                seen.add(sequence)
            verdict.tokenless += set(each.schedule.sampled) - each.skipped
        return verdict

    def _count(self, schedule: Schedule) -> list[Sequence]:
        """Count a failed step; returns its suspects."""
        suspects = suspects_of(schedule)
        is_certain = len(suspects) == 1
        self._prompts.append(hash(tuple(suspects[0].prompt_ids)) if is_certain else None)
        return suspects


def _decide(sequence: Sequence, suspects: list[Sequence], verdict: Verdict) -> None:
    """Decide about a sequence of a failed step that has not lost its blocks."""
    is_suspect = sequence in suspects
    if is_suspect and (len(suspects) == 1 or sequence.strikes):
        verdict.failed.append(sequence)
        return
    verdict.again.append(sequence)
    if is_suspect:
        verdict.suspected.append(sequence)
