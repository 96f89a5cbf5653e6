"""Steps that are padded, cut in two and run again as CUDA graphs are, without CUDA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pagewire.shared.engine.execution.cuda_graph import GraphPool, Progress
from pagewire.shared.engine.execution.model_runner import ModelRunner
from pagewire.shared.engine.execution.sampling_stage import Sampled


class Rerun:
    """Stands in for a CUDA graph: runs its step again, with the results in the same tensors."""

    def __init__(self, step: Callable[[], Any]) -> None:
        self._step = step
        self.result = step()

    @torch.inference_mode()
    def replay(self) -> None:
        new = self._step()
        if isinstance(self.result, Sampled):
            self.result.tokens.copy_(new.tokens)


class Reruns(GraphPool):
    """Captures each step as a `Rerun`."""

    def __init__(self, device: torch.device, progress: Progress) -> None:
        assert device.type == "cpu"
        self.device, self.progress = device, progress

    @torch.inference_mode()
    def capture(self, step: Callable[[], Any], name: str = "a step") -> Any:
        rerun = Rerun(step)
        return rerun, rerun.result


def run_padded(runner: ModelRunner, max_tokens: int = 512) -> None:
    """Let a runner's steps, of up to `max_tokens`, run as if they were captured."""
    runner.capture_graphs(max_tokens, lambda _step: None, Reruns)
