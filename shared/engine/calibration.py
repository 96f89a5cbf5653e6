"""Times small steps on a CPU, so that the first prompt is cut into chunks of the right size."""

from __future__ import annotations

import time

from pagewire.shared.costs.step_costs import StepCosts
from pagewire.shared.costs.step_work import StepWork
from pagewire.shared.engine.execution.model_runner import ModelRunner
from pagewire.shared.engine.scheduling.step import (
    NewDeviceSlot,
    PrefillChunk,
    StepPlan,
    TableEntries,
)
from pagewire.shared.request.sampling import RequestSpec

SMALL, LARGER = 16, 64
FAR = 1024  # tokens before the last chunk, which shows what attention takes


def calibrate(runner: ModelRunner, costs: StepCosts, max_model_len: int) -> None:
    """Learn how long a chunk takes, a larger one, and one far from its sequence's beginning.

    The first runs twice, since the first time takes longer. All write only to blocks that are free.
    """
    layout, max_blocks = runner.layout, runner.state.max_blocks
    per_group = min(max_blocks, runner.kv_pool.shape[0] // len(layout.groups))
    count = min(per_group, layout.blocks_for(FAR + SMALL))
    blocks = TableEntries()
    for group in range(len(layout.groups)):
        blocks.add(0, group * max_blocks, list(range(group * count, (group + 1) * count)))
    slot = NewDeviceSlot(0, RequestSpec(seed=0))
    runner.execute(StepPlan(number=0, new_slots=[slot], blocks=blocks)).wait()
    length = min(count * runner.block_size, max_model_len)
    small, larger = min(SMALL, length), min(LARGER, length)
    chunks = ((0, small), (0, small), (0, larger), (length - small, small))
    for index, (start, size) in enumerate(chunks):
        plan = StepPlan(number=0, chunks=[PrefillChunk(0, start, [0] * size, samples=False)])
        began_s = time.perf_counter()
        runner.execute(plan).wait()
        if index > 0:
            costs.observe(StepWork().with_chunk(start, size), time.perf_counter() - began_s)
    runner.execute(StepPlan(number=0, freed=[0])).wait()
