"""Runs an engine's first steps, so that no request waits for what they compile and capture."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch

from pagewire.shared.config import EngineSettings
from pagewire.shared.engine.execution.model_runner import ModelRunner
from pagewire.shared.engine.scheduling.step import (
    DecodeInput,
    NewDeviceSlot,
    PrefillChunk,
    StepPlan,
    TableEntries,
)
from pagewire.shared.errors import IntegrityError
from pagewire.shared.sampling import RequestSpec

logger = logging.getLogger(__name__)

Progress = Callable[[str], None]


def prepare(
    runner: ModelRunner, settings: EngineSettings, max_model_len: int, progress: Progress
) -> None:
    """Compile kernels and capture CUDA graphs, so that no request waits for that."""
    progress("compiling kernels")
    most = min(settings.max_num_batched_tokens, max_model_len - 1)
    # Attention of short, of longer and of long chunks may be kernels of their own. The shorter ones
    # are captured as graphs.
    shorter = [] if settings.cuda_graphs else [16 << n for n in range(20) if 16 << n < most]
    for tokens in (*shorter, most):
        warm_up(runner, tokens)
    if settings.cuda_graphs:
        _capture_graphs(runner, settings.max_num_batched_tokens, progress)


def _capture_graphs(runner: ModelRunner, max_tokens: int, progress: Progress) -> None:
    """Capture the CUDA graphs of steps; logs their time, and by how much free memory shrank."""
    device = runner.kv_pool.device
    torch.cuda.empty_cache()  # as a capture does first: what that frees is not counted
    start_s, (free_before, _) = time.monotonic(), torch.cuda.mem_get_info(device)
    runner.capture_graphs(max_tokens, lambda step: progress(f"capturing CUDA graphs: {step}"))
    gib = (free_before - torch.cuda.mem_get_info(device)[0]) / (1 << 30)
    seconds = time.monotonic() - start_s
    logger.info("the CUDA graphs of steps take %.2f GiB, captured in %.1f s", gib, seconds)


def warm_up(runner: ModelRunner, most_tokens: int) -> None:
    """Run a prefill step that fits into the pool, a decode step, and pack and unpack a block.

    They write only to blocks that are free.
    """
    num_groups = len(runner.groups)
    length = min(most_tokens, runner.kv_pool.shape[0] // num_groups * runner.block_size - 1)
    spec = RequestSpec(temperature=1.0, top_p=0.9, top_k=8, seed=0, logprobs=1, prompt_logprobs=1)
    blocks, count = TableEntries(), runner.groups.blocks_for(length + 1)
    for group in range(num_groups):
        ids = list(range(group * count, (group + 1) * count))
        blocks.add(0, group * runner.state.max_blocks, ids)
    prefill = StepPlan(
        number=0,
        new_slots=[NewDeviceSlot(0, spec)],
        blocks=blocks,
        chunks=[PrefillChunk(0, 0, [0] * length, samples=True, scored=[0] * (length - 1))],
    )
    runner.execute(prefill).wait()
    runner.execute(StepPlan(number=0, decodes=[0])).wait()
    shaped = NewDeviceSlot(0, RequestSpec(seed=0, presence_penalty=1.0), [0] * length)
    again = [DecodeInput(0, 0, length)]
    plan = StepPlan(number=0, freed=[0], new_slots=[shaped], inputs=again, decodes=[0])
    runner.execute(plan).wait()
    runner.execute(StepPlan(number=0, freed=[0]))
    groups = runner.mover.groups
    size = groups.packed_bytes(1)
    staging = torch.empty(size, dtype=torch.uint8, device=runner.kv_pool.device)
    runner.pack([0], groups.whole, staging, 1, after=0)
    if not runner.unpack(staging, [0], groups.whole, 1, after=0).is_intact():
        raise IntegrityError("a KV block was changed by packing and unpacking it on this device")
