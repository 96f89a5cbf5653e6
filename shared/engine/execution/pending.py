"""Results of launched steps, on their way from the device to the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from pagewire.shared.base.errors import IntegrityError
from pagewire.shared.engine.execution.pooling import DeviceEmbedding
from pagewire.shared.engine.execution.sampling_stage import Sampled
from pagewire.shared.engine.execution.scoring import DeviceScores
from pagewire.shared.engine.scheduling.step import StepResult, StepScores


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Launch a copy to the host: a later step may overwrite the tensor."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return host.copy_(tensor, non_blocking=True)


@dataclass(frozen=True, slots=True)
class LaunchedRows:
    """Rows whose forward has been launched, and whose sampling has not.

    Attributes:
        slots: device slots of the rows.
        sample: launches their sampling, shaped or not.
    """

    slots: list[int]
    sample: Callable[[bool], Sampled]


class PendingTokens:
    """Tokens of a launched step, and the log probabilities that requests asked for."""

    __slots__ = ("_event", "_host", "_number", "_scores")

    def __init__(
        self,
        number: int,
        tokens: torch.Tensor,
        scores: Sequence[DeviceScores | DeviceEmbedding] = (),
    ) -> None:
        self._number = number
        self._event: torch.cuda.Event | None = None
        self._host = _to_host(tokens)
        self._scores = [each.map(_to_host) for each in scores] if scores else None
        if tokens.is_cuda:
            self._event = torch.cuda.Event()
            self._event.record()

    def is_done(self) -> bool:
        """Whether the tokens are here, without waiting."""
        return self._event is None or self._event.query()

    def wait(self) -> StepResult:
        """Wait for the step and return its tokens."""
        if self._event is not None:
            self._event.synchronize()
        if self._scores is None:
            return StepResult(self._number, self._host.tolist())
        found = StepScores()
        for scores in self._scores:
            scores.add_to(found)
        return StepResult(self._number, self._host.tolist(), found)


@dataclass(slots=True)
class PendingMasks:
    """A step whose forward has been launched, and whose sampling waits for masks.

    Attributes:
        rows: in the order of the step's tokens.
        tokens: once they are sampled.
    """

    number: int
    rows: LaunchedRows
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
