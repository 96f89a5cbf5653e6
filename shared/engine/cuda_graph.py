"""Decode steps captured as CUDA graphs, one a batch size.

A step reads all that changes from the device state through a buffer of slots, so a replay needs
one small copy, and none when the batch is the same as before. A batch between two captured sizes
is padded with the slot that belongs to nobody.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass, field

import torch


def batch_buckets(max_num_seqs: int) -> list[int]:
    """Return the batch sizes to capture: dense where a step is short, every 16 above 32."""
    sizes = [1, 2, 4, 8, 12, 16, 20, 24, 28, 32, *range(48, max_num_seqs + 16, 16)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


@dataclass(slots=True)
class DecodeGraphs:
    """Captured graphs and their static buffers.

    Attributes:
        sizes: captured batch sizes, ascending.
        slots: [largest] int64, read by every graph.
    """

    sizes: list[int]
    slots: torch.Tensor
    padding_slot: int
    _graphs: dict[int, torch.cuda.CUDAGraph] = field(default_factory=dict)
    _tokens: dict[int, torch.Tensor] = field(default_factory=dict)
    _current: list[int] = field(default_factory=list)

    @classmethod
    def capture(
        cls,
        step: Callable[[torch.Tensor], torch.Tensor],
        sizes: list[int],
        padding_slot: int,
        device: torch.device,
        progress: Callable[[int], None],
    ) -> DecodeGraphs:
        """Capture `step(slots) -> tokens` at each size, largest first so that memory is shared."""
        slots = torch.full((max(sizes),), padding_slot, dtype=torch.int64, device=device)
        graphs = cls(sorted(sizes), slots, padding_slot)
        pool = None
        with torch.inference_mode():
            for size in reversed(graphs.sizes):
                view = slots[:size]
                step(view)  # compiles kernels and fills caches outside the capture
                torch.cuda.synchronize(device)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool):
                    graphs._tokens[size] = step(view)
                pool = pool or graph.pool()
                graphs._graphs[size] = graph
                progress(size)
        graphs._current = [padding_slot] * max(sizes)
        return graphs

    def fits(self, num_rows: int) -> bool:
        """Whether a batch of this size can be replayed."""
        return num_rows <= self.sizes[-1]

    def replay(self, slots: list[int]) -> torch.Tensor:
        """Run a decode step of these slots; returns their tokens, [len(slots)] int64."""
        size = self.sizes[bisect.bisect_left(self.sizes, len(slots))]
        padded = slots + [self.padding_slot] * (size - len(slots))
        if padded != self._current[:size]:
            host = torch.tensor(padded, dtype=torch.int64).pin_memory()
            self.slots[:size].copy_(host, non_blocking=True)
            self._current[:size] = padded
        self._graphs[size].replay()
        return self._tokens[size][: len(slots)]
