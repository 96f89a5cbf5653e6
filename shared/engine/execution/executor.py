"""The interfaces between the engine, its device and KV transfer.

`ModelRunner` (model_runner.py) is the executor of a worker.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from pagewire.shared.engine.scheduling.step import GrammarMasks, StepPlan, StepResult

if TYPE_CHECKING:  # the loop and the scheduler run without torch, as in `pagewire simulate`
    from pagewire.shared.engine.execution.block_mover import BlockMove, PendingCheck, PendingMove


class PendingStep(Protocol):
    """A step that has been launched."""

    def is_done(self) -> bool:
        """Whether the result has arrived, without waiting."""
        ...

    def wait(self) -> StepResult:
        """Wait until the step has ended, and return its result.

        Raises:
            Exception: the error that made the step fail.
        """
        ...


class Executor(Protocol):
    """Runs plans in the order in which they come; knows device slots and blocks, not sequences."""

    def execute(self, plan: StepPlan) -> PendingStep:
        """Launch a step; the work of later plans comes after it.

        A plan that awaits masks gets them before the next plan comes. A plan's changes of device
        slots and blocks are applied even if its rows fail later, which `PendingStep.wait` reports.

        Raises:
            Exception: the plan failed to launch. Its changes may not have been applied, so later
                plans free its device slots again. Its sequences end, or are admitted again.
        """
        ...

    def sample(self, masks: GrammarMasks) -> None:
        """Launch the sampling of the step that awaits these masks."""
        ...


class BlockMoves(Protocol):
    """Moves KV blocks between the device's pool and staging, at the same time as steps run."""

    def has_group_events(self, plan: int) -> bool:
        """Whether this plan records an event for each layer group of the blocks that it exports.

        If not, there is only one event, at the plan's end.
        """
        ...

    def pack(self, move: BlockMove, after: int) -> PendingMove:
        """Gather blocks into staging, once their layer groups are final in plan `after`.

        Args:
            move: of blocks that this plan or an earlier one exported.
            after: number of a plan.
        """
        ...

    def unpack(self, move: BlockMove, after: int) -> PendingCheck:
        """Scatter staging into blocks and check them, once plan `after` has run.

        The arguments are those of `pack`.
        """
        ...

    def queue(self, work: Callable[[], object]) -> PendingMove:
        """Queue other work on the device after the moves so far, and before later ones.

        Args:
            work: launches it, e.g. a copy between staging and the host; called at once.
        """
        ...

    def fence(self) -> None:
        """Have plans that are launched from now on wait for the moves so far."""
        ...

    def warm_launch_path(self) -> None:
        """Do parts of a move and a launch, without effect: after a pause they take longer."""
        ...


class StepHook(Protocol):
    """Work that belongs between steps, e.g. moving KV blocks."""

    def before_launch(self, plan: StepPlan) -> None:
        """Read a plan before it is launched. Must be quick, because the device waits.

        Args:
            plan: the plan that is launched next. If the launch fails, its sequences end or are
                admitted again, and the next plan withdraws the blocks that this one expects.
        """
        ...

    def after_launch(self, plan: StepPlan | None) -> bool:
        """Do the work between two steps; called once per iteration.

        Args:
            plan: the plan that was launched in this iteration, if any.

        Returns:
            Whether it has unfinished work, so that `poll` is to be called soon.
        """
        ...

    def poll(self) -> bool:
        """Go on with what is under way; return whether `after_launch` has something to do.

        Must be quick and never wait, because it is called again and again.
        """
        ...
