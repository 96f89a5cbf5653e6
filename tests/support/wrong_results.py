"""An executor whose steps run well, and whose results do not arrive as they are."""

from __future__ import annotations

from pagewire.shared.engine.core import EngineCore
from pagewire.shared.engine.execution.executor import Executor, PendingStep
from pagewire.shared.engine.scheduling.step import GrammarMasks, StepPlan, StepResult


class Failing:
    """A step whose result is an error."""

    def __init__(self, inner: PendingStep) -> None:
        self.inner = inner

    def is_done(self) -> bool:
        return self.inner.is_done()

    def wait(self) -> StepResult:
        self.inner.wait()
        raise RuntimeError("device on fire")


class Wrong:
    """A step whose result is nonsense."""

    def __init__(self, inner: PendingStep) -> None:
        self.inner = inner

    def is_done(self) -> bool:
        return self.inner.is_done()

    def wait(self) -> StepResult:
        result = self.inner.wait()
        return StepResult(result.number, [6 - token for token in result.tokens])


class Results:
    """An executor that replaces the results of some plans, by number, and fails some samplings."""

    def __init__(self, core: EngineCore, kinds: dict[int, type[Failing | Wrong]]) -> None:
        self.inner: Executor = core.executor
        self.kinds = kinds
        self.without_masks: set[int] = set()
        self.number = 0
        core.executor = self

    def execute(self, plan: StepPlan) -> PendingStep:
        pending = self.inner.execute(plan)
        self.number = plan.number
        kind = self.kinds.get(plan.number)
        return pending if kind is None else kind(pending)

    def sample(self, masks: GrammarMasks) -> None:
        self.inner.sample(masks)
        if masks.number in self.without_masks:
            raise RuntimeError("no sampling")

    def break_next(self, later: type[Failing | Wrong]) -> None:
        """Fail the next plan's result, and replace that of the one after it."""
        self.kinds |= {self.number + 1: Failing, self.number + 2: later}
