"""What a worker will need of a GPU's memory, from a model's configuration alone."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from pagewire.kernels import fp8_numbers, load_ops
from pagewire.kernels.rank_memory import buffer_bytes
from pagewire.shared.base.errors import ModelLoadError
from pagewire.shared.engine.choices import choose_max_model_len
from pagewire.shared.engine.execution.device_state import DeviceState
from pagewire.shared.engine.execution.sampling_stage import SamplingStage
from pagewire.shared.engine.execution.scoring import TILE_ROWS
from pagewire.shared.engine.loading import choose_dtype
from pagewire.shared.engine.memory import MIN_BLOCKS, pool_bytes, trial_blocks
from pagewire.shared.kv.kv_layout import KvLayout
from pagewire.shared.model.config import FP8_KV
from pagewire.shared.model.experts_config import MoeConfig
from pagewire.shared.model.loader import build_model
from pagewire.shared.model.model_config import ModelConfig
from pagewire.shared.model.shard import WHOLE, Shard
from pagewire.shared.settings.config import WorkerSettings
from pagewire.shared.worker.staging_size import staging_bytes

META = torch.device("meta")
# Of a GPU's libraries, in torch's memory: cuBLAS, and the partial results of split attention.
WORKSPACE_BYTES = 64 << 20
RANKS = (1, 2, 4, 8)  # GPUs of one host among which a model is divided


@dataclass(frozen=True, slots=True)
class Estimate:
    """A worker's memory on one GPU, in bytes unless it says tokens.

    Attributes:
        dtype: of activations.
        kv_dtype: of the KV pool.
        weight_format: of most weights: that dtype, "fp8", "int4" or "mxfp4".
        weights: exactly those of the parameters.
        tables: device slots, sampling, rotary angles, what ranks exchange.
        activations: of the largest step.
        trial_pool: KV blocks with which the worker measures that step.
        staging: of KV transfer.
        kv_pool: what is left; 0 if the worker would refuse to start.
        kv_bytes_per_token: in all layers.
        kv_blocks: of the pool.
        kv_tokens: that the pool holds, in whole blocks.
        context: tokens of the longest sequence.
    """

    dtype: str
    kv_dtype: str
    weight_format: str
    total: int
    weights: int
    tables: int
    activations: int
    trial_pool: int
    staging: int
    kv_pool: int
    kv_bytes_per_token: int
    kv_blocks: int
    kv_tokens: int
    context: int


def estimate(config: ModelConfig, settings: WorkerSettings, total: int) -> Estimate:
    """Estimate the memory of a worker on a GPU of `total` bytes, or of one of its ranks.

    Of ranks that differ, the last one has most.

    Raises:
        ConfigError: the settings ask for what the model cannot do.
    """
    dtype = choose_dtype(settings.dtype, config)
    model_len = choose_max_model_len(settings.max_model_len, config)
    ranks = settings.tensor_parallel_size
    shard, name = Shard(ranks - 1, ranks), str(dtype).removeprefix("torch.")
    layout = config.kv_layout(settings.block_size, name, shard)
    stored = _stored(config, dtype, shard)
    tables = _table_bytes(config, settings, model_len, len(layout.groups))
    if ranks > 1:
        tables += buffer_bytes(ranks)
    activations = _activation_bytes(config, settings.max_num_batched_tokens, dtype, ranks)
    activations += _dequantised_bytes(stored, dtype)
    if layout.dtype == FP8_KV:
        activations += fp8_numbers.WORKSPACE_BYTES
    weights = sum(each.nbytes for each in stored)
    trial = trial_blocks(settings.max_num_batched_tokens, layout) * layout.block_bytes
    staging = staging_bytes(settings, layout, total)
    left = pool_bytes(
        total,
        settings.gpu_memory_utilization,
        weights + tables + activations + trial,
        cuda_graphs=settings.cuda_graphs,
        staging=staging,
    )
    blocks = max(0, left // layout.block_bytes)
    blocks = blocks if blocks >= MIN_BLOCKS else 0
    longest = layout.longest_sequence(blocks, settings.max_num_batched_tokens)
    context = min(model_len, longest)
    return Estimate(
        dtype=name,
        kv_dtype=layout.dtype,
        weight_format=name if config.quantization is None else config.quantization.kinds,
        total=total,
        weights=weights,
        tables=tables,
        activations=activations,
        trial_pool=trial,
        staging=staging,
        kv_pool=blocks * layout.block_bytes,
        kv_bytes_per_token=len(layout.groups) * layout.block_bytes // settings.block_size,
        kv_blocks=blocks,
        kv_tokens=_pool_tokens(blocks, layout, context),
        context=context,
    )


def fitting_ranks(config: ModelConfig, settings: WorkerSettings, total: int) -> int | None:
    """Return the smallest number of GPUs of `total` bytes that fit a model together, if some do.

    Raises:
        ConfigError: the settings ask for what the model cannot do.
    """
    for ranks in RANKS:
        shared = settings.model_copy(update={"tensor_parallel_size": ranks})
        try:
            if estimate(config, shared, total).kv_blocks:
                return ranks
        except ModelLoadError:  # this number cannot share the heads, or a quantised weight
            continue
    return None


def _pool_tokens(blocks: int, layout: KvLayout, context: int) -> int:
    """Return the tokens that a pool holds, in sequences as long as can be."""
    if not (layout.has_windows and context):
        return blocks * layout.block_size
    return blocks * context // layout.held_blocks(context)


def weight_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Return the bytes of a model's parameters, each counted once."""
    return sum(each.nbytes for each in _stored(config, dtype))


def _stored(config: ModelConfig, dtype: torch.dtype, shard: Shard = WHOLE) -> list[torch.Tensor]:
    """Return a model's parameters on a rank, which have no memory here."""
    ops = load_ops("torch", "cpu")
    model = build_model(config, META, dtype, ops, max_positions=1, shard=shard)
    return list(model.stored())


def _dequantised_bytes(stored: list[torch.Tensor], dtype: torch.dtype) -> int:
    """Return what a product of many rows needs whose weights are in INT4, of which bytes have two.

    Those of experts, all in one tensor, are dequantised in registers.
    """
    numbers = [2 * each.numel() for each in stored if each.dtype == torch.uint8 and each.dim() == 2]
    return dtype.itemsize * max(numbers, default=0)


def _table_bytes(
    config: ModelConfig, settings: WorkerSettings, model_len: int, num_groups: int
) -> int:
    max_blocks = -(-model_len // settings.block_size)
    state = DeviceState(settings.max_num_seqs, max_blocks, META, num_groups)
    stage = SamplingStage(load_ops("torch", "cpu"), state, config.vocab_size)
    angles = model_len * config.rope.rotated(config.head_dim) * torch.float32.itemsize
    return angles + sum(_storages(stage).values())


def _storages(thing: Any) -> dict[int, int]:
    """Return the bytes of each allocation that an object and its parts have."""
    if isinstance(thing, torch.Tensor):
        storage = thing.untyped_storage()
        return {storage._cdata: storage.nbytes()}
    parts: list[Any] = []
    if dataclasses.is_dataclass(thing):
        parts = [getattr(thing, field.name) for field in dataclasses.fields(thing)]
    elif isinstance(thing, tuple):
        parts = list(thing)
    found: dict[int, int] = {}
    for part in parts:
        found |= _storages(part)
    return found


def _activation_bytes(config: ModelConfig, tokens: int, dtype: torch.dtype, ranks: int = 1) -> int:
    """Return what a prefill step of `tokens` needs at most, scored as a worker's first one is.

    Each rank has all of a token's hidden state and logits, and its part of the rest.
    """
    size = dtype.itemsize
    config = dataclasses.replace(
        config,
        num_heads=config.num_heads // ranks,
        num_kv_heads=max(1, config.num_kv_heads // ranks),
        intermediate_size=-(-config.intermediate_size // ranks),
    )
    row, inner = tokens * config.hidden_size * size, tokens * config.intermediate_size * size
    feed_forward = 3 * inner
    if isinstance(config, MoeConfig):  # both projections' outputs, of each token's experts
        experts = config.experts
        width = experts.intermediate_size + config.hidden_size
        feed_forward = max(feed_forward, tokens * experts.routing.top_k * width * size)
    attention = config.attention_bytes(tokens, size) + row
    logits = TILE_ROWS * config.vocab_size * size
    return 2 * row + max(attention, feed_forward) + logits + WORKSPACE_BYTES
