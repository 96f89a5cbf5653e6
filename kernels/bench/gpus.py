"""Times sums among ranks with a GPU each, in a process each, and those of NCCL and torch.

    python -P -m pagewire.kernels.bench.gpus RANK RANKS FILE REPETITIONS

`run.py` starts one for each rank. FILE does not exist yet; the processes meet there. Rank 0 prints
a line of JSON for each size. NVLink multicast is not used, by anyone.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric

from pagewire.kernels.all_reduce import all_reduce
from pagewire.kernels.bench.case import DTYPE
from pagewire.kernels.bench.rank_cases import HIDDEN, SIZES, label_of
from pagewire.kernels.rank_memory import RankMemory, buffer_bytes, make_rank_memory
from pagewire.kernels.reduce_norm import reduce_norm, reduces_and_norms
from pagewire.kernels.reference import all_reduce as plain
from pagewire.kernels.rms_norm import rms_norm

# Torch's sum is one-shot, in symmetric memory. The last one is ours, with residual and RMSNorm.
MORE = ("NCCL us", "torch us", "with norm us")
_CALLS = 20  # of a CUDA graph
_REPLAYS = 10  # of a repetition
_TIMEOUT_S = 300.0
_EPS = 1e-5
_ENVIRONMENT = ("NCCL_NVLS_ENABLE=0", "TORCH_SYMM_MEM_DISABLE_MULTICAST=1")


def measure(ranks: int, repetitions: int) -> Iterator[dict[str, Any]]:
    """Yield a row of the bench's table for each size.

    Raises:
        RuntimeError: a process has failed; it has printed why.
    """
    with tempfile.TemporaryDirectory() as directory:
        module = ("-P", "-m", "pagewire.kernels.bench.gpus")
        arguments = [str(ranks), str(Path(directory) / "store"), str(repetitions)]
        processes = [
            subprocess.Popen(
                ["env", *_ENVIRONMENT, sys.executable, *module, str(rank), *arguments],
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]
        try:
            outputs = [each.communicate(timeout=_TIMEOUT_S)[0] for each in processes]
        finally:
            for each in processes:
                each.kill()
                each.wait()
    if any(each.returncode for each in processes):
        raise RuntimeError(f"the bench of {ranks} GPUs has failed")
    yield from map(json.loads, outputs[0].splitlines())


def _shared_memory(buffer: torch.Tensor, group: dist.ProcessGroup) -> RankMemory:
    """Return a view of the buffers of all ranks, which torch maps; `buffer` is this one's."""
    buffer.zero_()
    addresses = symmetric.rendezvous(buffer, group.group_name).buffer_ptrs
    torch.cuda.synchronize()
    dist.barrier()
    return make_rank_memory(group.rank(), addresses, buffer.device, _TIMEOUT_S)


def _microseconds(call: Callable[[], object], repetitions: int) -> tuple[float, float]:
    """Return the median time of a call in a CUDA graph, and the spread in percent."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_CALLS):
            call()
    times = []
    for _ in range(1 + repetitions):  # the first one warms up
        dist.barrier()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(_REPLAYS):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / (_CALLS * _REPLAYS))
    median = statistics.median(times[1:])
    return median, 100 * (max(times[1:]) - min(times[1:])) / median


def _row(
    size: int, memory: RankMemory, group: dist.ProcessGroup, repetitions: int
) -> dict[str, Any]:
    """Return the times of sums of `size` bytes, or that ours is wrong."""
    device = memory.state.device
    row: dict[str, Any] = {"op": "all_reduce", "shape": f"{group.size()} GPUs, {label_of(size)}"}
    x = torch.randn(size // (HIDDEN * DTYPE.itemsize), HIDDEN, device=device, dtype=DTYPE)
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x)
    is_right = torch.equal(all_reduce(x, memory), plain.all_reduce(parts))
    all_are_right = torch.tensor(int(is_right), device=device)
    dist.all_reduce(all_are_right, dist.ReduceOp.MIN)
    if not all_are_right:
        return row | {"wrong": f"on rank {group.rank()}" if not is_right else "on another rank"}
    shared = symmetric.empty(x.shape, dtype=DTYPE, device=device).zero_()
    symmetric.rendezvous(shared, group.group_name)
    one_shot = torch.ops.symm_mem.one_shot_all_reduce
    x.zero_()
    us, spread = _microseconds(lambda: all_reduce(x, memory), repetitions)
    nccl_us, _ = _microseconds(lambda: dist.all_reduce(x), repetitions)
    torch_us, _ = _microseconds(lambda: one_shot(shared, "sum", group.group_name), repetitions)
    norm_us, _ = _microseconds(_with_norm(x, memory), repetitions)
    row |= {"us": us, "spread %": spread, "rate": size / us / 1e6, "unit": "TB/s"}
    best = min(nccl_us, torch_us)
    row |= {"peer us": best, "of peer": best / us}
    return row | dict(zip(MORE, (nccl_us, torch_us, norm_us), strict=True))


def _with_norm(x: torch.Tensor, memory: RankMemory) -> Callable[[], object]:
    """Return a sum of the ranks' `x` that is added to a residual and normalised, as in a model."""
    weight, residual = torch.ones_like(x[0]), torch.zeros_like(x)
    if reduces_and_norms(x, memory):
        return partial(reduce_norm, x, weight, _EPS, residual, memory)
    return lambda: rms_norm(all_reduce(x, memory), weight, _EPS, residual)


def main(arguments: list[str]) -> int:
    """Run one rank; returns the exit code, 1 if a sum was wrong."""
    rank, ranks, repetitions = int(arguments[0]), int(arguments[1]), int(arguments[3])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    torch.manual_seed(rank)
    dist.init_process_group(
        "nccl",
        init_method=f"file://{arguments[2]}",
        rank=rank,
        world_size=ranks,
        device_id=device,
    )
    group = dist.group.WORLD
    if group is None:
        return 1
    buffer = symmetric.empty(buffer_bytes(ranks), dtype=torch.uint8, device=device)
    memory = _shared_memory(buffer, group)
    rows = []
    for size in SIZES:
        rows.append(_row(size, memory, group, repetitions))
        if rank == 0:
            print(json.dumps(rows[-1]), flush=True)
    dist.destroy_process_group()
    return int(any("wrong" in row for row in rows))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
