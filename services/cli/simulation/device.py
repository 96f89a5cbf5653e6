"""An executor whose steps take as long as a machine's prices say. It computes nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

from pagewire.services.cli.simulation.events import Events
from pagewire.services.cli.simulation.machine import MachinePrices
from pagewire.services.cli.simulation.workload import ANSWER_TOKEN
from pagewire.shared.costs.step_work import NOTHING, StepWork, products_of
from pagewire.shared.engine.scheduling.step import Export, GrammarMasks, StepPlan, StepResult


@dataclass(slots=True)
class SimulatedStep:
    """A launched step.

    Attributes:
        began_s: when the device began it.
        ends_s: when its result is there.
    """

    events: Events
    result: StepResult
    began_s: float
    ends_s: float

    def is_done(self) -> bool:
        """Whether virtual time has passed the step's end."""
        return self.events.now >= self.ends_s

    def wait(self) -> StepResult:
        """Return the result; it does not wait, since a worker reads it when it is done."""
        return self.result


@dataclass(slots=True)
class PlanReader:
    """Finds out what plans compute; it must see all plans of an engine, in order.

    A plan does not say how long the contexts of its decode rows are, since the device knows.
    """

    _num_steps: int = 0
    # Of a device slot that continues from step to step: position of its input in a step, less the
    # step's number.
    _starts: dict[int, int] = field(default_factory=dict)
    _rows: list[int] = field(default_factory=list)  # rows of the last step
    _contexts: int = 0  # tokens that all rows of the last step attended to

    def work_of(self, plan: StepPlan) -> StepWork:
        """Return the work of the next plan."""
        starts, number = self._starts, self._num_steps
        for each in plan.inputs:
            starts[each.slot] = each.position - number
        if not plan.has_rows:
            return NOTHING
        rows = plan.decodes
        if rows is self._rows:  # the same ones as in the step before, each with a token more
            self._contexts += len(rows)
        else:
            lengths = [starts[row] + number + 1 for row in rows]
            self._rows, self._contexts = rows, sum(lengths)
        tokens = products = 0
        for chunk in plan.chunks:
            count = chunk.length
            tokens += count
            products += products_of(chunk.start, count)
            if chunk.samples:
                starts[chunk.slot] = chunk.end - number - 1
        self._num_steps += 1
        chunks = len(plan.chunks)
        return StepWork(len(rows), self._contexts, tokens, products, chunks)


@dataclass(slots=True)
class SimulatedDevice:
    """Runs plans one after the other, in virtual time.

    Attributes:
        last: the newest step.
        busy_s: time of all steps.
    """

    events: Events
    machine: MachinePrices
    last: SimulatedStep | None = None
    busy_s: float = 0.0
    _reader: PlanReader = field(default_factory=PlanReader)

    def execute(self, plan: StepPlan) -> SimulatedStep:
        """Begin a step, which ends after the time that the prices say."""
        work, prices = self._reader.work_of(plan), self.machine
        result = StepResult(plan.number, [ANSWER_TOKEN] * plan.num_samples)
        if not plan.has_rows:
            return SimulatedStep(self.events, result, 0.0, 0.0)
        exported = sum(len(change.block_ids) for change in plan.kv if isinstance(change, Export))
        seconds = prices.steps.step_s(work)
        seconds += exported * prices.block_size * prices.wire.export_us * 1e-6
        free_s = 0.0 if self.last is None else self.last.ends_s
        began_s = max(free_s, self.events.now + prices.host.launch_ms * 1e-3)
        self.busy_s += seconds
        self.last = SimulatedStep(self.events, result, began_s, began_s + seconds)
        return self.last

    def sample(self, masks: GrammarMasks) -> None:
        """Do nothing: no simulated request has a grammar."""
