"""Runs an engine's first steps, so that no request waits for what they compile and capture.

    warm_up        a prompt and two decode rows: also shows how much memory a full step takes
    prepare        that, then CUDA graphs, then `FirstSteps`: steps of every kind that traffic has
    prepare_ranks  that on a rank of several: first alone, then with the others

A step that no CUDA graph replays is padded (`Rounding`), so that a few numbers of rows and tokens
stand for all. tests/unit/engine/test_warm_up.py shows that no traffic needs another kernel.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, get_args

import torch

from pagewire.kernels.expert_sizes import steps_of_each_kind
from pagewire.kernels.prefill_tiles import LEAST_COPIED, LONGEST_UNSPLIT, MOST_KINDS, forced
from pagewire.shared.base.errors import IntegrityError
from pagewire.shared.control.protocol import PoolingMode
from pagewire.shared.engine.execution.block_mover import BlockMove
from pagewire.shared.engine.execution.cuda_graph import (
    STEP_TOKENS,
    GraphPool,
    Progress,
    batch_buckets,
)
from pagewire.shared.engine.execution.model_runner import ModelRunner
from pagewire.shared.engine.ranks.communicator import RankCommunicator
from pagewire.shared.engine.scheduling.step import (
    DecodeInput,
    GrammarMasks,
    NewDeviceSlot,
    PrefillChunk,
    StepPlan,
    TableEntries,
)
from pagewire.shared.kv.packing import packed_bytes
from pagewire.shared.model.config import FP8_KV
from pagewire.shared.model.experts_config import ExpertsConfig
from pagewire.shared.model.latent_config import LatentConfig
from pagewire.shared.model.model_config import ModelConfig
from pagewire.shared.request.sampling import RequestSpec
from pagewire.shared.settings.config import EngineSettings

logger = logging.getLogger(__name__)

MakePool = Callable[[torch.device, Progress], GraphPool]
Meet = Callable[[], None]

# Steps of more tokens than CUDA graphs are captured for, for cuBLAS, which chooses kernels by size.
_LARGE_STEPS = [size << n for n in range(12) for size in (1536, 2048)]
# Of a prompt that is scored: the kernels of its logits are chosen by these numbers.
_SCORED = (1, 16, 32, 64, 65)
# What the sampling of a row, and what follows it, may compute.
_REQUESTS = (
    RequestSpec(temperature=0.0, seed=0, logprobs=20, prompt_logprobs=20),
    RequestSpec(temperature=1.0, seed=0, logprobs=0, logprobs_mode="processed"),
    RequestSpec(
        temperature=1.0,
        top_p=0.9,
        top_k=8,
        min_p=0.01,
        seed=0,
        logprobs=20,
        logprobs_mode="processed",
        repetition_penalty=1.1,
        logit_bias={0: 1.0},
        min_tokens=3,
        allowed_token_ids=(0, 1, 2),
        bad_words=((1, 2), (2,)),
    ),
)


def prepare(
    runner: ModelRunner,
    config: ModelConfig,
    settings: EngineSettings,
    max_model_len: int,
    progress: Progress,
    make_pool: MakePool = GraphPool,
    meet: Meet = lambda: None,
) -> None:
    """Compile kernels and capture CUDA graphs, so that no request waits for that.

    Args:
        runner: runs the steps.
        config: the model's shape.
        settings: the engine's.
        max_model_len: longest sequence.
        progress: called with a line for people at each stage.
        make_pool: makes what captures graphs.
        meet: waits until all ranks of the model have captured theirs; steps would not wait so long.
    """
    progress("compiling kernels")
    most = min(settings.max_num_batched_tokens, max_model_len - 1)
    warm_up(runner, config, most)
    if settings.cuda_graphs:
        _capture_graphs(runner, settings.max_num_batched_tokens, progress, make_pool)
    meet()
    progress("running steps of every kind")
    FirstSteps(runner, config, settings.max_num_batched_tokens, max_model_len).run()


def prepare_ranks(
    runner: ModelRunner,
    config: ModelConfig,
    settings: EngineSettings,
    max_model_len: int,
    progress: Progress,
    ranks: RankCommunicator,
    make_pool: MakePool = GraphPool,
) -> None:
    """Prepare a rank of a model; all ranks call this, and take the same steps.

    A step waits for other ranks, but not for as long as they may compile. So a rank first takes
    steps of all kinds alone.

    Args:
        runner: runs the rank's steps.
        config: the model's shape.
        settings: the engine's.
        max_model_len: longest sequence.
        progress: called with a line for people at each stage.
        ranks: connects this rank with the others.
        make_pool: makes what captures graphs.

    Raises:
        RankError: a rank is lost.
    """
    alone = settings.model_copy(update={"cuda_graphs": False})
    prepare(runner, config, alone, max_model_len, progress)
    ranks.join()
    prepare(runner, config, settings, max_model_len, progress, make_pool, ranks.meet)
    ranks.check()


def _capture_graphs(
    runner: ModelRunner, max_tokens: int, progress: Progress, make_pool: MakePool
) -> None:
    """Capture the CUDA graphs of steps; logs their time, and by how much free memory shrank."""
    device = runner.kv_pool.device
    torch.cuda.empty_cache()  # as a capture does first: what that frees is not counted
    start_s, free_before = time.monotonic(), _free_bytes(device)
    report = "capturing CUDA graphs: {}".format
    runner.capture_graphs(max_tokens, lambda step: progress(report(step)), make_pool)
    gib = (free_before - _free_bytes(device)) / (1 << 30)
    seconds = time.monotonic() - start_s
    logger.info("the CUDA graphs of steps take %.2f GiB, captured in %.1f s", gib, seconds)


def _free_bytes(device: torch.device) -> int:
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else 0


def warm_up(runner: ModelRunner, config: ModelConfig, most_tokens: int) -> None:
    """Run a prefill step that fits into the pool, a decode step, and pack and unpack a block.

    They write only to blocks that are free.
    """
    length = min(most_tokens, _tokens_of_pool(runner) - 1)
    spec = RequestSpec(temperature=1.0, top_p=0.9, top_k=8, seed=0, logprobs=1, prompt_logprobs=1)
    prefill = StepPlan(
        number=0,
        new_slots=[NewDeviceSlot(0, spec)],
        blocks=_free_blocks(runner, length + 1),
        chunks=[PrefillChunk(0, 0, [0] * length, samples=True, scored=[0] * (length - 1))],
    )
    runner.execute(prefill).wait()
    if isinstance(config, LatentConfig):  # short chunks are computed in another way
        short = list(_short_chunks(runner, length, config.longest_absorbed))
        runner.execute(StepPlan(number=0, chunks=short)).wait()
    runner.execute(StepPlan(number=0, decodes=[0])).wait()
    shaped = NewDeviceSlot(0, RequestSpec(seed=0, presence_penalty=1.0), [0] * length)
    again = [DecodeInput(0, 0, length)]
    plan = StepPlan(number=0, freed=[0], new_slots=[shaped], inputs=again, decodes=[0])
    runner.execute(plan).wait()
    runner.execute(StepPlan(number=0, freed=[0]))
    layout = runner.layout
    size = packed_bytes(layout, 1)
    staging = torch.empty(size, dtype=torch.uint8, device=runner.kv_pool.device)
    move = BlockMove([0], layout.layer_groups, staging, seed=1)
    runner.pack(move, after=0)
    if not runner.unpack(move, after=0).verify():
        raise IntegrityError("a KV block was changed by packing and unpacking it on this device")


def _short_chunks(runner: ModelRunner, most_tokens: int, longest: int) -> Iterator[PrefillChunk]:
    """Yield chunks of at most these tokens together; only the first has blocks of its own."""
    for slot in range(runner.state.num_slots):
        length = min(longest, most_tokens)
        if length:
            yield PrefillChunk(slot, 0, [0] * length, samples=False)
        most_tokens -= length


def _tokens_of_pool(runner: ModelRunner) -> int:
    """Return how many tokens of one sequence the KV pool holds."""
    return int(runner.kv_pool.shape[0]) // len(runner.layout.groups) * runner.block_size


def _free_blocks(runner: ModelRunner, tokens: int) -> TableEntries:
    """Return the table entries with which device slot 0 holds this many tokens."""
    blocks, count = TableEntries(), runner.layout.blocks_for(tokens)
    for group in range(len(runner.layout.groups)):
        ids = list(range(group * count, (group + 1) * count))
        blocks.add(0, group * runner.state.max_blocks, ids)
    return blocks


@dataclass(slots=True)
class FirstSteps:
    """Steps of every kind that traffic has, in blocks and device slots that are free.

    Attributes:
        runner: runs them.
        config: the model's shape.
        most_tokens: of a step.
        max_model_len: longest sequence.
    """

    runner: ModelRunner
    config: ModelConfig
    most_tokens: int
    max_model_len: int

    def run(self) -> None:
        """Run them, and leave the device slots without owners."""
        room = min(self.most_tokens + LONGEST_UNSPLIT, self.max_model_len)
        room = min(room, _tokens_of_pool(self.runner))
        few = max(1, min(4, room // 2))
        blocks = _free_blocks(self.runner, room)
        self._run(new_slots=[NewDeviceSlot(0, _REQUESTS[0])], blocks=blocks)
        prompts = self._prompts(few, min(room - 1, self.most_tokens))
        for plan in (*self._rows(), *self._sizes(room), *prompts, *self._answers(few)):
            self._run(**plan)
        for plan in self._rows():  # device slot 0 now asks for more than the others
            self._run(**plan)
        self._run_tiles(room)
        self._run(copies=[(0, int(self.runner.kv_pool.shape[0]) - 1)])
        self._run(freed=[0])
        self.runner.warm_launch_path()

    def _run(self, masks: GrammarMasks | None = None, **fields: Any) -> None:
        plan = StepPlan(number=0, awaits_masks=masks is not None, **fields)
        pending = self.runner.execute(plan)
        if masks is not None:
            self.runner.sample(masks)
        pending.wait()

    def _sizes(self, room: int) -> Iterator[dict[str, Any]]:
        """Yield steps of each number of tokens that is not captured, also on longer contexts."""
        small = STEP_TOKENS if self.runner.prefill_graphs is None else ()
        most = self.most_tokens
        for tokens in sorted({min(size, most) for size in (*small, *self._large_steps())}):
            longest = min(tokens, room - 1)
            for start in sorted({0, min(LONGEST_UNSPLIT, room - 1 - longest)}):
                yield {"chunks": list(self._chunks(tokens, longest, start))}

    def _chunks(self, tokens: int, longest: int, start: int) -> Iterator[PrefillChunk]:
        """Yield chunks of this many tokens: one, or several if sequences are shorter."""
        for slot in range(self.runner.state.num_slots):
            length = min(tokens, longest)
            if length:
                yield PrefillChunk(slot, start, [0] * length, samples=True)
            tokens, start = tokens - length, 0

    def _run_tiles(self, room: int) -> None:
        """Run short chunks on a longer context with all tiles that attention chooses from."""
        # Over a cache in FP8, a longer chunk takes the Hopper kernel.
        wanted = (1, LEAST_COPIED) if self.runner.layout.dtype == FP8_KV else (1,)
        for length in (min(each, self.most_tokens, room - 1) for each in wanted):
            start = max(0, min(LONGEST_UNSPLIT, room - 1 - length))
            # Its hidden state is read, so that no CUDA graph replays it.
            chunk = PrefillChunk(0, start, [0] * length, samples=True, pooling="last")
            for number in range(MOST_KINDS):
                for is_split in (False, True):
                    with forced(number, is_split):
                        self._run(chunks=[chunk])

    def _rows(self) -> Iterator[dict[str, Any]]:
        """Yield decode steps of each number of rows, unless they are captured."""
        if self.runner.decode_graphs is None:
            for rows in batch_buckets(self.runner.state.num_slots):
                inputs = [DecodeInput(slot, 0, 0) for slot in range(rows)]
                yield {"inputs": inputs, "decodes": list(range(rows))}

    def _large_steps(self) -> list[int]:
        """Return numbers of tokens above those that are rounded: one for each set of kernels."""
        experts: ExpertsConfig | None = getattr(self.config, "experts", None)
        if experts is None:
            return _LARGE_STEPS
        numbers = range(STEP_TOKENS[-1] + 1, self.most_tokens + 1)
        return _LARGE_STEPS + steps_of_each_kind(numbers, experts.routing.top_k, experts.count)

    def _prompts(self, few: int, most: int) -> Iterator[dict[str, Any]]:
        """Yield steps that read a prompt's hidden states: log probabilities, embeddings.

        Args:
            few: tokens of a chunk of which there are two.
            most: tokens of one.
        """
        for length in sorted({few, *(size for size in _SCORED if size <= most)}):
            chunk = PrefillChunk(0, 0, [0] * length, samples=True, scored=[0] * length)
            yield {"chunks": [chunk]}
        modes: tuple[PoolingMode, ...] = get_args(PoolingMode)
        for mode in modes:
            for start, samples in ((0, False), (few, True)):
                yield {"chunks": [PrefillChunk(0, start, [0] * few, samples, pooling=mode)]}

    def _answers(self, few: int) -> Iterator[dict[str, Any]]:
        """Yield decode steps of each kind of request, and with masks.

        Args:
            few: tokens before the row's.
        """
        row: dict[str, Any] = {"inputs": [DecodeInput(0, 0, few)], "decodes": [0]}
        for spec in _REQUESTS:
            slot = NewDeviceSlot(0, spec)
            if spec.is_shaped:
                slot = NewDeviceSlot(0, spec, [0] * few, few // 2, [0])
            yield {"freed": [0], "new_slots": [slot], **row}
        mask = bytes([255]) * (-(-self.runner.vocab_size // 8))
        for masks in (GrammarMasks(0, masks={0: mask}), GrammarMasks(0, skipped_rows=[0])):
            yield {"masks": masks, **row}
