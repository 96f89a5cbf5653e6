"""Results of launched steps, on their way from the device to the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from pagewire.shared.base.errors import IntegrityError
from pagewire.shared.engine.execution.host_copies import downloaded
from pagewire.shared.engine.execution.pooling import DeviceEmbedding
from pagewire.shared.engine.execution.sampling_stage import Sampled
from pagewire.shared.engine.execution.scoring import DeviceScores
from pagewire.shared.engine.scheduling.step import DeviceTimes, StepResult, StepScores


@dataclass(frozen=True, slots=True)
class LaunchedRows:
    """Rows whose forward has been launched, and whose sampling has not.

    Attributes:
        slots: device slots of the rows.
        sample: launches their sampling, shaped or not.
    """

    slots: list[int]
    sample: Callable[[bool], Sampled]


class StepEvents:
    """When a step starts and ends on a GPU, by its own clock.

    The host notes the end of a step late if it launches another one meanwhile, kernel by kernel.
    """

    __slots__ = ("end", "last_end", "start")

    def __init__(self, last: StepEvents | None) -> None:
        """Record the start of a step; `last` is the step before."""
        self.start, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.start.record()
        self.last_end = self.start if last is None else last.end

    def times(self) -> DeviceTimes:
        """Return how long the step took; it has ended."""
        since_ms = [event.elapsed_time(self.end) for event in (self.start, self.last_end)]
        return DeviceTimes(*(each / 1e3 for each in since_ms))


class PendingTokens:
    """Tokens of a launched step, and the log probabilities that requests asked for.

    Args:
        number: of the step's plan.
        tokens: on the device.
        scores: likewise.
        events: of the step; None on a CPU, where it has ended.
    """

    __slots__ = ("_events", "_host", "_number", "_scores")

    def __init__(
        self,
        number: int,
        tokens: torch.Tensor,
        scores: Sequence[DeviceScores | DeviceEmbedding] = (),
        events: StepEvents | None = None,
    ) -> None:
        self._number, self._events = number, events
        self._host = downloaded(tokens)  # a later step may overwrite them
        self._scores = [each.map(downloaded) for each in scores] if scores else None
        if events is not None:
            events.end.record()

    def is_done(self) -> bool:
        """Whether the tokens are here, without waiting."""
        return self._events is None or self._events.end.query()

    def wait(self) -> StepResult:
        """Wait for the step and return its tokens."""
        times, found = None, None
        if self._events is not None:
            self._events.end.synchronize()
            times = self._events.times()
        if self._scores is not None:
            found = StepScores()
            for scores in self._scores:
                scores.add_to(found)
        return StepResult(self._number, self._host.tolist(), found, times)


@dataclass(slots=True)
class PendingMasks:
    """A step whose forward has been launched, and whose sampling waits for masks.

    Attributes:
        rows: in the order of the step's tokens.
        events: of the step; None on a CPU.
        tokens: once they are sampled.
    """

    number: int
    rows: LaunchedRows
    events: StepEvents | None = None
    tokens: PendingTokens | None = None

    def is_done(self) -> bool:
        """Whether the tokens are here, without waiting."""
        return self.tokens is not None and self.tokens.is_done()

    def wait(self) -> StepResult:
        """Wait for the step and return its tokens.

        Raises:
            IntegrityError: no masks came, so that they would never come.
        """
        if self.tokens is None:
            raise IntegrityError(f"step {self.number} waits for masks")
        return self.tokens.wait()
