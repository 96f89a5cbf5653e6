"""Cases of exchanges between two ranks on one GPU, each on a stream: what a kernel takes at least.

`gpus.py` has a GPU for each rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial

import torch

from pagewire.kernels import Ops
from pagewire.kernels.all_gather import Columns, all_gather
from pagewire.kernels.all_reduce import all_reduce
from pagewire.kernels.bench.case import DTYPE, TABLES, BenchCase
from pagewire.kernels.rank_memory import RankMemory, buffer_bytes, make_rank_memory
from pagewire.kernels.reference import all_gather as plain_gather
from pagewire.kernels.reference import all_reduce as plain_reduce

HIDDEN = 4096
SIZES: list[int] = TABLES["all_reduce"]  # bytes
_RANKS = 2
_TIMEOUT_S = 5.0

Exchange = Callable[[torch.Tensor, RankMemory], torch.Tensor]


@cache
def _side_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()


class _Ranks:
    """Two ranks on one GPU. Their launches overlap, since each waits for the other."""

    def __init__(self, timeout_s: float) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        size = buffer_bytes(_RANKS)
        self._buffers = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(_RANKS)]
        addresses = [each.data_ptr() for each in self._buffers]
        self._memories = [
            make_rank_memory(rank, addresses, device, timeout_s) for rank in range(_RANKS)
        ]
        self._side = _side_stream()

    def run(self, exchange: Exchange, parts: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return what the exchange returns on each rank."""
        here = torch.cuda.current_stream()
        self._side.wait_stream(here)
        with torch.cuda.stream(self._side):
            second = exchange(parts[1], self._memories[1])
        first = exchange(parts[0], self._memories[0])
        here.wait_stream(self._side)
        return first, second


def label_of(size: int) -> str:
    """Return a number of bytes for people."""
    return f"{size >> 10} KB" if size < 1 << 20 else f"{size >> 20} MB"


def reduce_cases() -> Iterator[BenchCase]:
    """Yield the cases of sums over ranks, of all sizes."""
    for size in SIZES:
        ranks = _Ranks(_TIMEOUT_S)
        rows = size // (HIDDEN * DTYPE.itemsize)
        parts = list(torch.randn(_RANKS, rows, HIDDEN, device="cuda", dtype=DTYPE).unbind())
        zeros = [torch.zeros_like(part) for part in parts]  # which sums leave as they are

        def check(
            ops: Ops, ranks: _Ranks = ranks, parts: list[torch.Tensor] = parts
        ) -> tuple[torch.Tensor, ...]:
            if ops.backend == "torch":
                return (plain_reduce.all_reduce(parts),) * _RANKS
            return ranks.run(all_reduce, [part.clone() for part in parts])

        yield BenchCase(
            "all_reduce",
            f"2 streams, {label_of(size)}",
            partial(_run, ranks, zeros),
            work=2.0 * _RANKS * size,
            check=check,
            tolerance=0.0,
        )


def _run(ranks: _Ranks, parts: list[torch.Tensor], ops: Ops) -> tuple[torch.Tensor, ...]:
    return ranks.run(all_reduce, parts)


def gather_cases() -> Iterator[BenchCase]:
    """Yield joined logits of few and many sequences."""
    widths = (64128, 64128)
    columns = Columns.of(widths, torch.device("cuda", torch.cuda.current_device()))
    exchange = partial(_gather, columns=columns)
    for rows in (1, 64):
        ranks = _Ranks(_TIMEOUT_S)
        parts = list(torch.randn(_RANKS, rows, widths[0], device="cuda", dtype=DTYPE).unbind())

        # Both streams allocate results before a kernel waits: to allocate may wait for kernels.
        _Ranks(timeout_s=0.0).run(exchange, parts)

        def call(
            ops: Ops, ranks: _Ranks = ranks, parts: list[torch.Tensor] = parts
        ) -> tuple[torch.Tensor, ...]:
            if ops.backend == "torch":
                return (plain_gather.all_gather(parts),) * _RANKS
            return ranks.run(exchange, parts)

        work = 2.0 * _RANKS * parts[0].nbytes
        yield BenchCase("all_gather", f"2 streams, {rows} rows", call, work, tolerance=0.0)


def _gather(x: torch.Tensor, memory: RankMemory, columns: Columns) -> torch.Tensor:
    return all_gather(x, columns, memory)
