"""Ranks that exchange values by kernels: processes that share memory, or threads on one GPU.

Triton's interpreter runs one program after the other, so that ranks in it are processes.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from pagewire.kernels.all_gather import Columns, all_gather
from pagewire.kernels.all_reduce import ONE_SHOT_BYTES, all_reduce
from pagewire.kernels.rank_memory import RankMemory, buffer_bytes, make_rank_memory
from pagewire.kernels.reduce_norm import reduce_norm, reduces_and_norms
from pagewire.kernels.reference.all_gather import all_gather as reference_gather
from pagewire.kernels.reference.all_reduce import all_reduce as reference_reduce
from pagewire.kernels.reference.rms_norm import rms_norm
from pagewire.tests.support.child_process import remote
from pagewire.tests.support.interpreter import keep_look_ups

PAGE = mmap.PAGESIZE
WAIT_S = 100.0
GPU_S = 60.0  # other tests may use the GPU, too
_EPS = 1e-5


class Call(NamedTuple):
    """One operation of all ranks: a sum of `[rows, width]`, or joined columns.

    Attributes:
        widths: one: a sum.
        norm: "none", or "alone" or "residual": the sum is normalised, without or with a residual.
    """

    seed: int
    dtype: str
    rows: int
    widths: tuple[int, ...]
    one_shot_bytes: int = ONE_SHOT_BYTES
    norm: str = "none"

    def parts(self, count: int) -> list[torch.Tensor]:
        """Return the values of all ranks, on the CPU; magnitudes differ, so that order counts."""
        generator = torch.Generator().manual_seed(self.seed)
        widths = self.widths * count if len(self.widths) == 1 else self.widths
        return [
            torch.randn(self.rows, width, generator=generator)
            .mul(8.0**rank)
            .to(getattr(torch, self.dtype))
            for rank, width in enumerate(widths)
        ]

    def expected(self, count: int) -> torch.Tensor:
        parts = self.parts(count)
        if self.norm != "none":
            weight, residual = self._norm_inputs(torch.device("cpu"))
            return torch.stack(rms_norm(reference_reduce(parts), weight, _EPS, residual))
        return reference_reduce(parts) if len(self.widths) == 1 else reference_gather(parts)

    def run(self, x: torch.Tensor, memory: RankMemory) -> torch.Tensor:
        if self.norm != "none":
            assert reduces_and_norms(x, memory)
            weight, residual = self._norm_inputs(x.device)
            return torch.stack(reduce_norm(x, weight, _EPS, residual, memory))
        if len(self.widths) == 1:
            return all_reduce(x, memory, self.one_shot_bytes)
        return all_gather(x, Columns.of(self.widths, x.device), memory)

    def is_right(self, found: torch.Tensor, count: int) -> bool:
        """Whether all sums have the reference's bits, and what is normalised is close to it."""
        expected = self.expected(count)
        if self.norm == "none":
            return torch.equal(found, expected)
        tolerance = 4 * torch.finfo(found.dtype).eps
        is_close = torch.allclose(found[0], expected[0], rtol=tolerance, atol=tolerance)
        return is_close and torch.equal(found[1], expected[1])

    def _norm_inputs(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
        dtype, [width] = getattr(torch, self.dtype), self.widths
        weight = torch.linspace(0.5, 1.5, width, dtype=dtype).to(device)
        if self.norm == "alone":
            return weight, None
        generator = torch.Generator().manual_seed(self.seed + 1)
        residual = torch.randn(self.rows, 2 * width, generator=generator).to(device, dtype)
        return weight, residual[:, width:]


class Rank:
    """One rank, and its view of all ranks' buffers."""

    def __init__(self, memory: RankMemory, keeps_alive: object = None) -> None:
        self.memory, self._alive = memory, keeps_alive
        self.device = memory.state.device

    def run(self, calls: Sequence[Call], pause_s: float = 0.0) -> list[Call]:
        """Run the calls, with a pause before each; return those with a wrong result."""
        wrong = []
        for call in calls:
            time.sleep(pause_s)
            x = call.parts(self.memory.num_ranks)[self.memory.rank].to(self.device)
            found = call.run(x, self.memory).cpu()
            if not call.is_right(found, self.memory.num_ranks):
                wrong.append(call)
        return wrong

    def missing(self) -> int | None:
        """Return which rank this one has missed."""
        return int(self.memory.missing) - 1 if self.memory.missing.any() else None


class Answer(Protocol):
    def wait(self) -> Any: ...


class Started(Protocol):
    """A rank that runs at the same time as others."""

    def start(self, method: str, *args: Any) -> Answer: ...

    def call(self, method: str, *args: Any) -> Any: ...


class _Result:
    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def wait(self) -> Any:
        return self._future.result(WAIT_S)


class _StreamRank:
    """A rank with a thread and a stream of its own."""

    def __init__(self, rank: Rank, pool: ThreadPoolExecutor) -> None:
        self._rank, self._pool = rank, pool
        self._stream = torch.cuda.Stream(rank.device)
        with torch.cuda.stream(self._stream):  # later, an allocation could wait for another rank
            torch.empty(1, device=rank.device)

    def start(self, method: str, *args: Any) -> _Result:
        return _Result(self._pool.submit(self._run, method, *args))

    def call(self, method: str, *args: Any) -> Any:
        return self.start(method, *args).wait()

    def _run(self, method: str, *args: Any) -> Any:
        with torch.cuda.stream(self._stream):
            return getattr(self._rank, method)(*args)


def _in_process(path: Path, rank: int, count: int, timeout_s: float, programs: int) -> Rank:
    torch.set_num_threads(1)
    keep_look_ups()
    with path.open("r+b") as file:
        shared = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)
    stride = len(shared) // count
    addresses = [shared.data_ptr() + stride * each for each in range(count)]
    cpu = torch.device("cpu")
    return Rank(make_rank_memory(rank, addresses, cpu, timeout_s, programs), shared)


def rank_views(
    buffers: Sequence[torch.Tensor], device: torch.device, timeout_s: float, programs: int
) -> list[RankMemory]:
    """Return each rank's view of buffers in this process."""
    addresses = [each.data_ptr() for each in buffers]
    ranks = range(len(buffers))
    return [make_rank_memory(rank, addresses, device, timeout_s, programs) for rank in ranks]


@contextmanager
def exchanging_ranks(
    device: str, path: Path, count: int, timeout_s: float = 1000.0, programs: int = 3
) -> Iterator[list[Started]]:
    """Run ranks that exchange values.

    Args:
        device: of all ranks; on the CPU, each is a process.
        path: of a file that they share then.
        count: number of ranks.
        timeout_s: how long a kernel waits for another rank, on a GPU at most `GPU_S`; in the
            interpreter, its looks count.
        programs: of a launch at most.
    """
    size = buffer_bytes(count, programs)
    with ExitStack() as stack:
        if device == "cpu":
            path.touch()
            os.truncate(path, count * -(-size // PAGE) * PAGE)
            make = (_in_process, path)
            yield [
                stack.enter_context(remote(*make, rank, count, timeout_s, programs))
                for rank in range(count)
            ]
            return
        buffers = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(count)]
        pool = stack.enter_context(ThreadPoolExecutor(count))
        torch.cuda.synchronize()
        views = rank_views(buffers, torch.device(device), min(timeout_s, GPU_S), programs)
        yield [_StreamRank(Rank(view, buffers), pool) for view in views]


def compile_kernels(device: str, count: int, programs: int, calls: Sequence[Call]) -> None:
    """Have kernels compiled and loaded, which would have a waiting GPU wait for the host."""
    if device == "cpu":
        return
    size = buffer_bytes(count, programs)
    buffers = [torch.zeros(size, dtype=torch.uint8, device=device)] * count
    for view in rank_views(buffers, torch.device(device), 0.0, programs):
        Rank(view).run(calls)


def start_all(
    ranks: Sequence[Started], calls: Sequence[Call], pauses_s: Sequence[float] = ()
) -> list[Any]:
    """Run the calls on these ranks at the same time; return what each found wrong."""
    pauses = [*pauses_s, *[0.0] * len(ranks)]
    answers = [rank.start("run", calls, pauses[index]) for index, rank in enumerate(ranks)]
    return [answer.wait() for answer in answers]


def sums(seed: int, size: int, dtype: str) -> Call:
    """Return the sum of one row."""
    return Call(seed, dtype, 1, (size,))
