"""The interfaces between the engine, its device and KV transfer.

`ModelRunner` (model_runner.py) is the executor that serves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from pagewire.shared.engine.block_mover import PendingCheck, PendingMove
from pagewire.shared.engine.step import StepPlan, StepResult, Supply


class PendingStep(Protocol):
    """A step that has been launched."""

    def is_done(self) -> bool:
        """Whether the result is here, without waiting."""
        ...

    def wait(self) -> StepResult:
        """Wait for the result.

        Raises:
            Exception: whatever made the step fail.
        """
        ...


class Executor(Protocol):
    """Runs plans in the order in which they come; knows device slots and blocks, not sequences."""

    def execute(self, plan: StepPlan) -> PendingStep:
        """Launch a step; later plans' work comes after it.

        A plan that awaits a supply gets it before the next plan comes. What a plan changes in
        device slots and blocks is applied even if its rows fail, as `PendingStep.wait` reports.

        Raises:
            Exception: the plan failed to launch, and may not have been applied: the next one
                frees its device slots again. All that it computes or prepares ends.
        """
        ...

    def supply(self, supply: Supply) -> None:
        """Let the step that awaits it sample."""
        ...


class BlockMoves(Protocol):
    """Moves KV blocks between the device's pool and staging, at the same time as steps run."""

    def has_group_events(self, plan: int) -> bool:
        """Whether it is known where in this plan each layer group of the exported blocks is final.

        Otherwise nothing but the plan's end is known.
        """
        ...

    def pack(
        self, block_ids: list[int], groups: range, staging: torch.Tensor, seed: int, after: int
    ) -> PendingMove:
        """Gather blocks into staging, once these layer groups are final in plan `after`.

        Args:
            block_ids: of the pool; the plan exported them, or an earlier one did.
            groups: layer groups of each of them.
            staging: bytes of a staging slot; nobody else touches them before the move is done.
            seed: of the checksums, signed 64 bit.
            after: number of a plan.
        """
        ...

    def unpack(
        self, staging: torch.Tensor, block_ids: list[int], groups: range, seed: int, after: int
    ) -> PendingCheck:
        """Scatter staging into blocks and check them, once plan `after` has run, likewise."""
        ...

    def queue(self, work: Callable[[], object]) -> PendingMove:
        """Queue other work on the device after the moves so far, and before later ones.

        Args:
            work: launches it, e.g. a copy between staging and the host; called at once.
        """
        ...


class StepHook(Protocol):
    """Work that belongs between steps, e.g. moving KV blocks."""

    def before_launch(self, plan: StepPlan) -> None:
        """Take what a plan says, on its way to the device. To be quick: the device waits.

        Args:
            plan: is launched next; if that fails, its sequences end.
        """
        ...

    def after_launch(self, plan: StepPlan | None) -> bool:
        """Do what is to be done between two steps; runs once an iteration.

        Args:
            plan: what was launched in this iteration, if anything was.

        Returns:
            Whether it has unfinished work, so that `is_due` is asked soon.
        """
        ...

    def is_due(self) -> bool:
        """Whether the device has done what `after_launch` waits for. Asked often: to be quick."""
        ...
