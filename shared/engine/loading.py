"""Loads a model, or a rank's part of it, and finds out how many KV blocks fit on its device."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from pagewire.kernels import Ops
from pagewire.shared.base.errors import ConfigError
from pagewire.shared.engine.choices import choose_device, choose_max_model_len
from pagewire.shared.engine.execution.builds import count_kernels
from pagewire.shared.engine.execution.cuda_graph import Progress
from pagewire.shared.engine.execution.device_state import DeviceState
from pagewire.shared.engine.execution.kernel_choice import (
    check_invariance,
    check_kv_dtype,
    choose_ops,
)
from pagewire.shared.engine.execution.model_runner import ModelRunner
from pagewire.shared.engine.execution.torch_threads import settle_threads
from pagewire.shared.engine.memory import MIN_BLOCKS, pool_bytes, trial_blocks
from pagewire.shared.engine.ranks.communicator import RankCommunicator, SocketCommunicator
from pagewire.shared.engine.ranks.gpu_communicator import GpuCommunicator
from pagewire.shared.engine.warm_up import warm_up
from pagewire.shared.kv.kv_layout import KvLayout
from pagewire.shared.kv.storage import allocate_pool
from pagewire.shared.model.config import load_config
from pagewire.shared.model.loaded_model import LoadedModel
from pagewire.shared.model.loader import load_model
from pagewire.shared.model.model_config import ModelConfig
from pagewire.shared.model.shard import Shard
from pagewire.shared.model.source import resolve_model
from pagewire.shared.model.transformers_model.config import TransformersConfig, require_transformers
from pagewire.shared.settings.config import EngineSettings

logger = logging.getLogger(__name__)

CPU_POOL_BYTES = 256 << 20
OtherMemory = Callable[[KvLayout, int], int]


@dataclass(frozen=True, slots=True)
class ModelPart:
    """A model on its device, and the layout of its KV blocks.

    Attributes:
        settings: as given, without what cannot be done for this model.
        full_model_len: see `BuiltEngine`.
        communicator: adds up what the model's ranks compute; None with one rank.
    """

    settings: EngineSettings
    path: Path
    config: ModelConfig
    device: torch.device
    dtype: torch.dtype
    ops: Ops
    model: LoadedModel
    layout: KvLayout
    full_model_len: int
    communicator: RankCommunicator | None


def load_part(
    settings: EngineSettings,
    progress: Progress,
    shard: Shard,
    control: SocketCommunicator | None,
) -> ModelPart:
    """Choose device, dtype and kernels, and load the model, or a rank's part of it.

    Args:
        settings: the engine's.
        progress: called with a line for people at each stage.
        shard: which part.
        control: the sockets to the other ranks; None with one rank.

    Raises:
        ConfigError: this machine does not have what the settings ask for.
        RankError: a rank is lost.
    """
    progress("reading the model's configuration")
    path = resolve_model(settings.model, revision=settings.revision)
    config = load_config(path, settings.model_impl, settings.quantization, settings.kv_cache_dtype)
    device = choose_device(settings, shard.rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # kernels are launched on the current device
    dtype = choose_dtype(settings.dtype, config)
    full_model_len = choose_max_model_len(settings.max_model_len, config)
    check_invariance(config, settings.batch_invariant)
    ops = choose_ops(settings.kernels, device, settings.batch_invariant)
    check_kv_dtype(config, ops, device)
    if ops.backend == "triton":
        count_kernels()
    communicator = _communicator(control, device, shard.count, config.vocab_size)
    progress("loading weights")
    if isinstance(config, TransformersConfig):
        settings = settings.model_copy(update={"cuda_graphs": False})
        model = _load_by_transformers(path, config, device, dtype, ops, settings)
    else:
        how = settings.load_format, full_model_len, progress, shard, communicator
        model = load_model(path, config, device, dtype, ops, *how)
    settle_threads(model, device, shard.count)
    layout = config.kv_layout(settings.block_size, str(dtype).removeprefix("torch."), shard)
    if communicator is not None:
        communicator.open(device)
    return ModelPart(
        settings, path, config, device, dtype, ops, model, layout, full_model_len, communicator
    )


def _communicator(
    control: SocketCommunicator | None, device: torch.device, count: int, vocab_size: int
) -> RankCommunicator | None:
    """Return what adds up the ranks' parts on this device; None with one rank."""
    if control is None or device.type == "cpu":
        return control
    return GpuCommunicator(control, count, vocab_size)


def _load_by_transformers(
    path: Path,
    config: TransformersConfig,
    device: torch.device,
    dtype: torch.dtype,
    ops: Ops,
    settings: EngineSettings,
) -> LoadedModel:
    if settings.tensor_parallel_size > 1:
        raise ConfigError("transformers' code runs on one rank: leave --tensor-parallel-size 1")
    require_transformers()
    from pagewire.shared.model.transformers_model.load import load_transformers_model

    logger.warning(
        "%s runs by transformers' code: steps are slower than by ours, and no CUDA graph replays "
        "them",
        config.architecture,
    )
    return load_transformers_model(path, config, device, dtype, ops, settings.load_format)


def choose_dtype(name: str, config: ModelConfig) -> torch.dtype:
    """Return the dtype of weights and activations."""
    dtype: torch.dtype = getattr(torch, config.dtype if name == "auto" else name)
    return dtype


def make_runner(loaded: ModelPart, num_blocks: int, max_model_len: int) -> ModelRunner:
    """Return what runs a model's steps, with a KV pool of `num_blocks` blocks.

    Raises:
        ConfigError: the device has no memory for the pool.
    """
    settings, device, layout = loaded.settings, loaded.device, loaded.layout
    max_blocks = -(-max_model_len // settings.block_size)
    state = DeviceState(settings.max_num_seqs, max_blocks, device, len(layout.groups))
    kv_pool = allocate_pool(layout, num_blocks, device)
    return ModelRunner(loaded.model, loaded.ops, kv_pool, layout, state, loaded.config.vocab_size)


def fitting_blocks(loaded: ModelPart, other_memory: OtherMemory) -> int:
    """Size the KV pool: the memory that weights, a full step's activations and other uses leave.

    A rank takes that step alone.

    Raises:
        ConfigError: nothing is left.
    """
    settings, device, layout = loaded.settings, loaded.device, loaded.layout
    max_tokens = settings.max_num_batched_tokens
    if device.type != "cuda":
        longest = layout.most_blocks(loaded.full_model_len, max_tokens)
        return max(CPU_POOL_BYTES // layout.block_bytes, longest)
    blocks = trial_blocks(max_tokens, layout)
    torch.cuda.reset_peak_memory_stats(device)
    runner = make_runner(loaded, blocks, loaded.full_model_len)
    warm_up(runner, loaded.config, min(max_tokens, loaded.full_model_len - 1))
    peak = torch.cuda.max_memory_allocated(device)
    del runner
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    in_use_by_others = total - free - torch.cuda.memory_reserved(device)
    on_device = layout.ranks if settings.ranks_share_gpu else 1
    budget = pool_bytes(
        total,
        settings.gpu_memory_utilization / on_device,
        peak,
        cuda_graphs=settings.cuda_graphs,
        staging=other_memory(layout, total),
        in_use_by_others=in_use_by_others,
    )
    num_blocks = budget // layout.block_bytes
    if num_blocks < MIN_BLOCKS:
        raise ConfigError(
            f"the model leaves no memory for KV blocks on {torch.cuda.get_device_name(device)}: "
            "raise --gpu-memory-utilization, lower --max-num-batched-tokens, or divide the model "
            "among GPUs by --tensor-parallel-size (`pagewire estimate` says how many fit it)"
        )
    return num_blocks
