"""Times a few steps of an engine before it has work, so that its first prices are known."""

from __future__ import annotations

from typing import NamedTuple

from pagewire.shared.costs.step_work import NOTHING, StepWork

FAR = 1024  # tokens before a chunk or a row, which show what attention takes


class TimedStep(NamedTuple):
    """A step of equal decode rows, or of one chunk.

    Attributes:
        rows: its decode rows.
        before: tokens before each row, or before the chunk.
        tokens: of the chunk; 0 if there are rows.
    """

    rows: int
    before: int
    tokens: int

    @property
    def work(self) -> StepWork:
        """What the step computes when it runs for the second time."""
        if self.tokens:
            return NOTHING.with_chunk(self.before, self.tokens)
        return StepWork(self.rows, self.rows * (self.before + 2))


# All engines on a CPU run these.
FIRST = (TimedStep(0, 0, 16), TimedStep(0, 0, 64), TimedStep(0, FAR, 16))
# Workers run these if there is time, the most important first. Few and many rows or tokens, each
# with little and with much before them: from these follows the price of each part of a step.
FURTHER = (
    TimedStep(8, 32, 0),
    TimedStep(0, 0, 256),
    TimedStep(8, FAR, 0),
    TimedStep(1, 32, 0),
    TimedStep(32, 32, 0),
    TimedStep(32, FAR, 0),
    TimedStep(0, 0, 512),
    TimedStep(128, 32, 0),
    TimedStep(128, FAR, 0),
    TimedStep(0, 8 * FAR, 512),
    TimedStep(0, 0, 2048),
)
