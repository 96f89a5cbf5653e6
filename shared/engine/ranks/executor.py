"""The executor over all ranks: each runs each plan, and rank 0's tokens are the result."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from pagewire.shared.base.errors import BlamelessRankError, RankError
from pagewire.shared.engine.execution.executor import Executor, PendingStep
from pagewire.shared.engine.ranks.communicator import RankCommunicator
from pagewire.shared.engine.ranks.group import RankGroup
from pagewire.shared.engine.ranks.messages import (
    OUT_OF_MEMORY,
    Fence,
    Moved,
    Pack,
    Sampled,
    encode,
)
from pagewire.shared.engine.scheduling.step import GrammarMasks, StepPlan, StepResult

DIGEST_STEPS = 100
MOST_WAITED_S = 0.1  # that counts between two looks at a move

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
class OthersMove:
    """A move of KV blocks on the other ranks.

    Attributes:
        left: ranks that have not made it.
        is_intact: all checksums so far were right.
        waited_s: how long rank 0 has waited for it.
        looked_s: when it last looked, on the monotonic clock.
    """

    left: set[int]
    is_intact: bool = True
    waited_s: float = 0.0
    looked_s: float = field(default_factory=time.monotonic)


@dataclass(slots=True)
class RanksExecutor:
    """Sends plans to all other ranks, and runs them on this one.

    It is a step hook, too: it compares what ranks have sampled, and notices that one is lost while
    no step runs.

    Whatever fails on one rank ends all, because the others would wait for it.

    Attributes:
        own: the executor of rank 0, which is in this process.
        group: the other ranks.
        communicator: adds up what the ranks compute.
    """

    own: Executor
    group: RankGroup
    communicator: RankCommunicator
    _digests: Digests = field(default_factory=Digests)
    _expected: dict[int, int] = field(default_factory=dict)  # number of steps -> rank 0's hash
    _sampled: list[tuple[int, Sampled]] = field(default_factory=list)  # not compared yet
    _moves: dict[int, OthersMove] = field(default_factory=dict)

    def execute(self, plan: StepPlan) -> PendingStep:
        """Launch a step on all ranks.

        Raises:
            RankError: a rank is lost.
        """
        pending = self._together(lambda: self._execute(plan))
        return RanksStep(self, pending) if plan.has_rows else pending

    def sample(self, masks: GrammarMasks) -> None:
        """Launch the sampling of the step that awaits these masks, on all ranks.

        Raises:
            RankError: a rank is lost.
        """
        self._together(lambda: self._sample(masks))

    def before_launch(self, plan: StepPlan) -> None:
        """Do nothing: `execute` sends the plan."""

    def after_launch(self, plan: StepPlan | None) -> bool:
        """Read what other ranks report; return whether there is unfinished work, which is never.

        Raises:
            RankError: a rank is lost, or has sampled other tokens.
        """
        self._together(self._take_reports)
        return False

    def poll(self) -> bool:
        """Return whether a rank reports something, or has ended."""
        return self.group.has_news()

    def result_of(self, pending: PendingStep) -> StepResult:
        """Wait for the result of a step on rank 0.

        Raises:
            RankError: a rank is lost.
        """
        result = self._together(lambda: self._result_of(pending))
        if (sampled := self._digests.add(result)) is not None:
            self._expected[sampled.steps] = sampled.digest
        return result

    def _result_of(self, pending: PendingStep) -> StepResult:
        result = pending.wait()
        self.communicator.check()
        return result

    def _execute(self, plan: StepPlan) -> PendingStep:
        self.group.send(encode(plan))
        return self.own.execute(plan)

    def _sample(self, masks: GrammarMasks) -> None:
        self.group.send(encode(masks))
        self.own.sample(masks)

    def move(self, command: Pack) -> OthersMove:
        """Have the other ranks move their parts of blocks.

        Raises:
            RankError: a rank is lost.
        """
        self._together(lambda: self.group.send(encode(command)))
        left = {pipe.rank for pipe in self.group.pipes}
        move = self._moves[command.number] = OthersMove(left)
        return move

    def fence(self) -> None:
        """Have later plans of the other ranks wait for the moves so far.

        Raises:
            RankError: a rank is lost.
        """
        self._together(lambda: self.group.send(encode(Fence())))

    def look_at(self, move: OthersMove) -> bool:
        """Return whether the other ranks have made a move.

        Raises:
            RankError: a rank is lost, or does nothing for too long.
        """
        if move.left:
            self._together(lambda: self._look_at(move))
        return not move.left

    def _look_at(self, move: OthersMove) -> None:
        self._take_reports()
        # What passes between two looks is counted up to a bound: rank 0 may be in a long step.
        now = time.monotonic()
        move.waited_s += min(now - move.looked_s, MOST_WAITED_S)
        move.looked_s = now
        if move.left and move.waited_s > (patience_s := self.group.patience_s):
            rank = min(move.left)
            raise RankError(f"rank {rank} has not moved KV blocks for {patience_s:g} s", rank)

    def _take_reports(self) -> None:
        self.group.check()
        if not self.group.has_news():
            return
        for rank, report in self.group.reports():
            if isinstance(report, Sampled):
                self._sampled.append((rank, report))
            elif isinstance(report, Moved):
                move = self._moves[report.number]
                move.left.discard(rank)
                move.is_intact &= report.is_intact
                if not move.left:
                    del self._moves[report.number]
        self._compare()

    def _compare(self) -> None:
        for rank, sampled in self._sampled:
            if self._expected.get(sampled.steps, sampled.digest) != sampled.digest:
                problem = f"rank {rank} has sampled other tokens than rank 0"
                raise RankError(f"{problem} within the first {sampled.steps} steps")
        newest = max(self._expected, default=0)
        self._sampled = [each for each in self._sampled if each[1].steps > newest]
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
            kind = BlamelessRankError if isinstance(exc, OUT_OF_MEMORY) else RankError
            raise self.group.loss(kind(f"rank 0: {type(exc).__name__}: {exc}", 0)) from exc
        except BaseException:  # such as KeyboardInterrupt: other ranks may be within this step
            self.group.loss(RankError("rank 0 was interrupted in a step: make a new LLM", 0))
            raise


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
