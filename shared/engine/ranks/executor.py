"""The executor over all ranks: each runs each plan, and rank 0's tokens are the result."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from pagewire.shared.base.errors import RankError
from pagewire.shared.engine.execution.executor import Executor, PendingStep
from pagewire.shared.engine.ranks.group import RankGroup
from pagewire.shared.engine.ranks.messages import Sampled, encode
from pagewire.shared.engine.scheduling.step import StepPlan, StepResult, Supply

DIGEST_STEPS = 100

T = TypeVar("T")


@dataclass(slots=True)
class Digests:
    """Hashes of what a rank samples; other ranks' must be the same.

    Attributes:
        steps: how many have been read.
    """

    steps: int = 0
    _hash: int = 0

    def add(self, result: StepResult) -> Sampled | None:
        """Add a step's tokens; return a hash of all so far, once in some steps."""
        self.steps += 1
        self._hash = zlib.crc32(msgspec.msgpack.encode(result.tokens), self._hash)
        return Sampled(self.steps, self._hash) if self.steps % DIGEST_STEPS == 0 else None


@dataclass(slots=True)
class RanksExecutor:
    """Sends plans to all other ranks, and runs them on this one.

    It is a step hook, too: it compares what ranks have sampled, and notices that one is lost while
    no step runs.

    Whatever fails on one rank ends all, because the others would wait for it.

    Attributes:
        own: the executor of rank 0, which is in this process.
        group: the other ranks.
    """

    own: Executor
    group: RankGroup
    _digests: Digests = field(default_factory=Digests)
    _expected: dict[int, int] = field(default_factory=dict)  # number of steps -> rank 0's hash
    _sampled: list[tuple[int, Sampled]] = field(default_factory=list)  # not compared yet

    def execute(self, plan: StepPlan) -> PendingStep:
        """Launch a step on all ranks.

        Raises:
            RankError: a rank is lost.
        """
        pending = self._together(lambda: self._execute(plan))
        return RanksStep(self, pending) if plan.has_rows else pending

    def supply(self, supply: Supply) -> None:
        """Launch the sampling of the step that awaits this supply, on all ranks.

        Raises:
            RankError: a rank is lost.
        """
        self._together(lambda: self._supply(supply))

    def before_launch(self, plan: StepPlan) -> None:
        """Do nothing: `execute` sends the plan."""

    def after_launch(self, plan: StepPlan | None) -> bool:
        """Read what other ranks report; return whether there is unfinished work, which is never.

        Raises:
            RankError: a rank is lost, or has sampled other tokens.
        """
        if self.is_due():
            self._together(self._compare)
        return False

    def is_due(self) -> bool:
        """Whether a rank reports something, or has ended."""
        return self.group.has_news()

    def result_of(self, pending: PendingStep) -> StepResult:
        """Wait for the result of a step on rank 0.

        Raises:
            RankError: a rank is lost.
        """
        result = self._together(pending.wait)
        if (sampled := self._digests.add(result)) is not None:
            self._expected[sampled.steps] = sampled.digest
        return result

    def _execute(self, plan: StepPlan) -> PendingStep:
        self.group.send(encode(plan))
        return self.own.execute(plan)

    def _supply(self, supply: Supply) -> None:
        self.group.send(encode(supply))
        self.own.supply(supply)

    def _compare(self) -> None:
        for rank, report in self.group.reports():
            if isinstance(report, Sampled):
                self._sampled.append((rank, report))
        for rank, sampled in self._sampled:
            if self._expected.get(sampled.steps, sampled.digest) != sampled.digest:
                problem = f"rank {rank} has sampled other tokens than rank 0"
                raise RankError(f"{problem} within the first {sampled.steps} steps")
        self._sampled = [each for each in self._sampled if each[1].steps not in self._expected]
        # Ranks are at most a step apart, so that all have reported all but the last hash.
        self._expected = dict(list(self._expected.items())[-2:])

    def _together(self, work: Callable[[], T]) -> T:
        """Do something on this rank; if it fails, all ranks end.

        Raises:
            RankError: it has failed, or another rank is lost, now or before.
        """
        try:
            return work()
        except RankError as exc:
            if (loss := self.group.loss(exc)) is exc:
                raise
            raise loss from exc
        except Exception as exc:  # whatever a device raises: the others wait for this rank
            raise self.group.loss(RankError(f"rank 0: {type(exc).__name__}: {exc}", 0)) from exc


@dataclass(frozen=True, slots=True)
class RanksStep:
    """A step that runs on all ranks."""

    executor: RanksExecutor
    pending: PendingStep

    def is_done(self) -> bool:
        """Whether the result has arrived, without waiting."""
        return self.pending.is_done()

    def wait(self) -> StepResult:
        """Wait for the result.

        Raises:
            RankError: a rank is lost.
        """
        return self.executor.result_of(self.pending)
