"""Builds an engine from settings.

Chooses device and dtype (`auto`), loads weights, sizes the KV pool from free GPU memory, warms up.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from pagewire.kernels import Ops
from pagewire.shared.base.errors import ConfigError
from pagewire.shared.control.protocol import BlockLayout
from pagewire.shared.engine.calibration import calibrate
from pagewire.shared.engine.core import EngineCore
from pagewire.shared.engine.execution.builds import count_kernels
from pagewire.shared.engine.execution.device_state import DeviceState
from pagewire.shared.engine.execution.kernel_choice import check_invariance, choose_ops
from pagewire.shared.engine.execution.model_runner import ModelRunner
from pagewire.shared.engine.execution.torch_threads import settle_threads
from pagewire.shared.engine.memory import MIN_BLOCKS, pool_bytes, trial_blocks
from pagewire.shared.engine.scheduling.schedule import SchedulerLimits
from pagewire.shared.engine.scheduling.scheduler import Scheduler
from pagewire.shared.engine.warm_up import Progress, prepare, warm_up
from pagewire.shared.grammar.masks import MaskFiller
from pagewire.shared.grammar.tokens import load_vocabulary
from pagewire.shared.kv.block_hash import BlockHasher
from pagewire.shared.kv.block_pool import BlockPool, CacheListener
from pagewire.shared.kv.cache_groups import CacheGroups
from pagewire.shared.kv.layer_groups import LayerGroups
from pagewire.shared.kv.storage import KvShape
from pagewire.shared.model.config import load_config, model_fingerprint
from pagewire.shared.model.loaded_model import LoadedModel
from pagewire.shared.model.loader import load_model
from pagewire.shared.model.model_config import ModelConfig
from pagewire.shared.model.source import resolve_model
from pagewire.shared.model.transformers_model.config import TransformersConfig, require_transformers
from pagewire.shared.settings.config import EngineSettings

logger = logging.getLogger(__name__)

CPU_POOL_BYTES = 256 << 20
# Steps on a CPU may be long. With this length, other requests do not wait long for their tokens,
# and a step that hangs is soon noticed.
CPU_STEP_S = 1.0
OtherMemory = Callable[[LayerGroups, int], int]


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """An engine, and facts about it that its worker or `LLM` needs.

    Attributes:
        max_model_len: longest prompt plus answer.
        full_model_len: what `max_model_len` would be if the KV pool were large enough.
    """

    core: EngineCore
    runner: ModelRunner
    config: ModelConfig
    model_path: Path
    layout: BlockLayout
    device: torch.device
    max_model_len: int
    full_model_len: int


def build_engine(
    settings: EngineSettings,
    hash_secret: str | None = None,
    listener: CacheListener | None = None,
    local_prefill_tokens: int = 0,
    progress: Progress = lambda _stage: None,
    other_memory: OtherMemory = lambda _groups, _total_bytes: 0,
) -> BuiltEngine:
    """Load a model and make an engine with it.

    Args:
        settings: validated settings.
        hash_secret: keys of block hashes derive from it; the same in all workers of a cluster. None
            takes a random one, for an engine whose hashes nobody else reads.
        listener: notified of blocks that enter and leave the prefix cache.
        local_prefill_tokens: see `SchedulerLimits`.
        progress: called with a line for people at each stage.
        other_memory: returns the bytes that the caller will allocate on the device itself, given
            the layer groups of a KV block and the device's memory in bytes.

    Raises:
        ConfigError: this machine does not have what the settings ask for.
    """
    loaded = _load(settings, progress)
    settings, config, device, groups = loaded.settings, loaded.config, loaded.device, loaded.groups
    progress("sizing the KV pool")
    num_blocks = settings.num_blocks or _fitting_blocks(loaded, other_memory)
    max_model_len = fit_context(settings, loaded.full_model_len, num_blocks, groups)
    _log_pool(loaded.shape, num_blocks, device)
    runner = _make_runner(loaded, num_blocks, max_model_len)
    if device.type == "cuda":
        prepare(runner, config, settings, max_model_len, progress)
    layout = _layout(loaded)
    pool = BlockPool(num_blocks, groups, settings.enable_prefix_caching, listener)
    is_timed = device.type == "cpu" and loaded.ops.backend == "torch"  # not Triton's interpreter
    limits = SchedulerLimits(
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_model_len=max_model_len,
        max_waiting=settings.max_waiting,
        watermark_blocks=num_blocks // 100,
        local_prefill_tokens=local_prefill_tokens,
        step_s=CPU_STEP_S if is_timed else math.inf,
    )
    scheduler = Scheduler(limits, pool, _hasher(hash_secret or secrets.token_hex(32), layout))
    core = EngineCore(scheduler, runner, overlap=device.type == "cuda")
    if limits.step_s != math.inf:
        calibrate(runner, scheduler.costs, max_model_len)
    vocabulary = partial(load_vocabulary, loaded.path, config.vocab_size, config.eos_token_ids)
    core.constraints.filler = MaskFiller(vocabulary, config.vocab_size)
    return BuiltEngine(
        core=core,
        runner=runner,
        config=config,
        model_path=loaded.path,
        layout=layout,
        device=device,
        max_model_len=max_model_len,
        full_model_len=loaded.full_model_len,
    )


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A model on its device, and the shape of its KV blocks.

    Attributes:
        settings: as given, without what cannot be done for this model.
        full_model_len: see `BuiltEngine`.
    """

    settings: EngineSettings
    path: Path
    config: ModelConfig
    device: torch.device
    ops: Ops
    model: LoadedModel
    shape: KvShape
    groups: CacheGroups
    full_model_len: int


def _load(settings: EngineSettings, progress: Progress) -> _Loaded:
    """Choose device, dtype and kernels, and load the model."""
    progress("reading the model's configuration")
    path = resolve_model(settings.model, revision=settings.revision)
    config = load_config(path, settings.model_impl)
    device = choose_device(settings.device)
    dtype = choose_dtype(settings.dtype, config)
    full_model_len = choose_max_model_len(settings.max_model_len, config)
    check_invariance(config, settings.batch_invariant)
    ops = choose_ops(settings.kernels, device, settings.batch_invariant)
    if ops.backend == "triton":
        count_kernels()
    progress("loading weights")
    if isinstance(config, TransformersConfig):
        settings = settings.model_copy(update={"cuda_graphs": False})
        model = _load_by_transformers(path, config, device, dtype, ops, settings)
    else:
        load_format = settings.load_format
        model = load_model(path, config, device, dtype, ops, load_format, full_model_len, progress)
    settle_threads(model, device)
    return _Loaded(
        settings=settings,
        path=path,
        config=config,
        device=device,
        ops=ops,
        model=model,
        shape=KvShape.of(config, settings.block_size, dtype),
        groups=CacheGroups.of(config.windows, settings.block_size),
        full_model_len=full_model_len,
    )


def _load_by_transformers(
    path: Path,
    config: TransformersConfig,
    device: torch.device,
    dtype: torch.dtype,
    ops: Ops,
    settings: EngineSettings,
) -> LoadedModel:
    require_transformers()
    from pagewire.shared.model.transformers_model.load import load_transformers_model

    logger.warning(
        "%s runs by transformers' code: steps are slower than by ours, and no CUDA graph replays "
        "them",
        config.architecture,
    )
    return load_transformers_model(path, config, device, dtype, ops, settings.load_format)


def _layout(loaded: _Loaded) -> BlockLayout:
    settings, shape = loaded.settings, loaded.shape
    return BlockLayout(
        fingerprint=model_fingerprint(
            loaded.path, loaded.config, settings.load_format, loaded.full_model_len
        ),
        dtype=str(shape.dtype).removeprefix("torch."),
        block_size=shape.block_size,
        num_layers=shape.num_layers,
        num_components=shape.token.components,
        num_kv_heads=shape.token.heads,
        head_dim=shape.token.size,
        block_bytes=shape.block_bytes,
        resume_blocks=loaded.groups.resume_blocks,
        batch_invariant=settings.batch_invariant,
    )


def _hasher(secret: str, layout: BlockLayout) -> BlockHasher:
    return BlockHasher(secret, layout.fingerprint, layout.dtype, layout.block_size)


def choose_device(name: str) -> torch.device:
    """Return the device that a setting selects.

    Raises:
        ConfigError: CUDA was asked for and there is none.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("no CUDA device was found: install a driver, or use --device cpu")
    return torch.device("cuda", torch.cuda.current_device())


def choose_dtype(name: str, config: ModelConfig) -> torch.dtype:
    """Return the dtype of weights, activations and KV cache."""
    dtype: torch.dtype = getattr(torch, config.dtype if name == "auto" else name)
    return dtype


def choose_max_model_len(asked: int | None, config: ModelConfig) -> int:
    """Return the longest sequence.

    Raises:
        ConfigError: more was asked for than the model has positions.
    """
    if asked is not None and asked > config.max_position_embeddings:
        raise ConfigError(
            f"--max-model-len {asked} is more than the model's "
            f"{config.max_position_embeddings} positions{config.rope.why_no_longer}"
        )
    return asked or config.max_position_embeddings


def _log_pool(shape: KvShape, num_blocks: int, device: torch.device) -> None:
    gib = num_blocks * shape.block_bytes / (1 << 30)
    dtype = str(shape.dtype).removeprefix("torch.")
    logger.info(
        "the KV pool has %d blocks of %d tokens (%.2f GiB, %s) on %s",
        num_blocks,
        shape.block_size,
        gib,
        dtype,
        device,
    )


def fit_context(
    settings: EngineSettings, full_model_len: int, num_blocks: int, groups: CacheGroups
) -> int:
    """Return the length of the longest sequence; log it if the KV pool shortens it.

    Args:
        settings: if `max_model_len` was set, a pool that is too small for it is an error.
        full_model_len: the length that was set, else the model's own.
        num_blocks: blocks of the pool.
        groups: the cache groups that share the pool.

    Raises:
        ConfigError: the pool does not hold the length that was set.
    """
    fits = groups.longest_sequence(num_blocks, settings.max_num_batched_tokens)
    if full_model_len <= fits:
        return full_model_len
    if settings.max_model_len is not None:
        raise ConfigError(
            f"--max-model-len {full_model_len} does not fit: the KV pool holds {fits} tokens. "
            "Lower it, raise --gpu-memory-utilization, or lower --max-num-batched-tokens"
        )
    logger.warning(
        "the context is %d tokens, not the model's %d: the KV pool of %d blocks holds no more; "
        "raise --num-blocks or --gpu-memory-utilization",
        fits,
        full_model_len,
        num_blocks,
    )
    return fits


def _make_runner(loaded: _Loaded, num_blocks: int, max_model_len: int) -> ModelRunner:
    settings, device, groups = loaded.settings, loaded.device, loaded.groups
    max_blocks = -(-max_model_len // settings.block_size)
    state = DeviceState(settings.max_num_seqs, max_blocks, device, len(groups))
    kv_pool = loaded.shape.allocate(num_blocks, device)
    return ModelRunner(loaded.model, loaded.ops, kv_pool, groups, state, loaded.config.vocab_size)


def _fitting_blocks(loaded: _Loaded, other_memory: OtherMemory) -> int:
    """Size the KV pool: the memory that weights, a full step's activations and other uses leave.

    Raises:
        ConfigError: nothing is left.
    """
    settings, device, shape = loaded.settings, loaded.device, loaded.shape
    max_tokens = settings.max_num_batched_tokens
    if device.type != "cuda":
        longest = loaded.groups.most_blocks(loaded.full_model_len, max_tokens)
        return max(CPU_POOL_BYTES // shape.block_bytes, longest)
    blocks = trial_blocks(max_tokens, loaded.groups)
    torch.cuda.reset_peak_memory_stats(device)
    runner = _make_runner(loaded, blocks, loaded.full_model_len)
    warm_up(runner, min(max_tokens, loaded.full_model_len - 1))
    peak = torch.cuda.max_memory_allocated(device)
    del runner
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    in_use_by_others = total - free - torch.cuda.memory_reserved(device)
    budget = pool_bytes(
        total,
        settings.gpu_memory_utilization,
        peak,
        cuda_graphs=settings.cuda_graphs,
        staging=other_memory(shape.groups, total),
        in_use_by_others=in_use_by_others,
    )
    num_blocks = budget // shape.block_bytes
    if num_blocks < MIN_BLOCKS:
        raise ConfigError(
            f"the model leaves no memory for KV blocks on {torch.cuda.get_device_name(device)}: "
            "raise --gpu-memory-utilization or lower --max-num-batched-tokens"
        )
    return num_blocks
