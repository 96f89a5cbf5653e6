"""The embeddings of prompts: final hidden states, pooled as the prompt's chunks are computed.

A batch without pooled prompts launches nothing for this. A step with a pooled chunk replays no CUDA
graph, because graphs leave only logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from pagewire.shared.engine.scheduling.step import PrefillChunk, StepPlan, StepScores


@dataclass(frozen=True, slots=True)
class DeviceEmbedding:
    """The embedding of a prompt, which is still on the device.

    Attributes:
        vector: [hidden] float32.
        chunk: index of the prompt's last chunk in its plan.
    """

    vector: torch.Tensor
    chunk: int

    def map(self, move: Callable[[torch.Tensor], torch.Tensor]) -> DeviceEmbedding:
        """Return a copy with the tensor moved."""
        return replace(self, vector=move(self.vector))

    def add_to(self, found: StepScores) -> None:
        """Add the embedding to its step's scores; the tensor is on the host and complete."""
        found.embeddings[self.chunk] = self.vector.numpy().tobytes()


@dataclass(slots=True)
class Pooling:
    """Pools the hidden states of chunks, and keeps partial results for a prompt's later chunks."""

    _kept: dict[int, torch.Tensor] = field(default_factory=dict)  # device slot -> [hidden] float32
    _done: list[DeviceEmbedding] = field(default_factory=list)  # of the present step

    def apply(self, plan: StepPlan) -> None:
        """Begin a step: forget the results of device slots that lost their owner."""
        self._done = []
        for slot in plan.freed if self._kept else ():
            self._kept.pop(slot, None)

    def flush(self) -> list[DeviceEmbedding]:
        """Return what has been launched for the current step, and forget it."""
        done, self._done = self._done, []
        return done

    def pool(self, index: int, chunk: PrefillChunk, hidden: torch.Tensor) -> None:
        """Add a chunk's hidden states to its prompt's embedding.

        Args:
            index: index of the chunk in its plan.
            chunk: the prompt's next; its first begins at position 0, its last samples.
            hidden: [T, hidden] of the chunk's tokens, after the model's last normalisation.
        """
        if chunk.start == 0:
            self._kept.pop(chunk.slot, None)
        before = self._kept.pop(chunk.slot, None)
        match chunk.pooling:
            case "mean":
                pooled = hidden.sum(0, dtype=torch.float32)
                pooled = pooled if before is None else pooled + before
            case "cls":
                pooled = hidden[0].float() if before is None else before
            case _:
                pooled = hidden[-1].float()
        if not chunk.samples:
            self._kept[chunk.slot] = pooled
            return
        if chunk.pooling == "mean":
            pooled = pooled / chunk.end
        self._done.append(DeviceEmbedding(pooled, index))
