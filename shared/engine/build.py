"""Builds an engine from settings.

Loads weights, sizes the KV pool from free GPU memory, warms up.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pagewire.kernels import Ops
from pagewire.shared.base.errors import ConfigError
from pagewire.shared.engine.calibration import calibrate
from pagewire.shared.engine.choices import (
    check_ranks,
    choose_device,
    choose_max_model_len,
    fit_context,
    log_pool,
)
from pagewire.shared.engine.core import EngineCore
from pagewire.shared.engine.execution.builds import count_kernels
from pagewire.shared.engine.execution.cuda_graph import LARGEST_STEP, STEP_TOKENS
from pagewire.shared.engine.execution.device_state import DeviceState
from pagewire.shared.engine.execution.kernel_choice import (
    check_invariance,
    check_kv_dtype,
    choose_ops,
)
from pagewire.shared.engine.execution.model_runner import ModelRunner
from pagewire.shared.engine.execution.torch_threads import settle_threads
from pagewire.shared.engine.memory import MIN_BLOCKS, pool_bytes, trial_blocks
from pagewire.shared.engine.ranks.executor import RanksExecutor
from pagewire.shared.engine.ranks.group import RankGroup, start_ranks
from pagewire.shared.engine.ranks.messages import Begin
from pagewire.shared.engine.scheduling.schedule import SchedulerLimits
from pagewire.shared.engine.scheduling.scheduler import Scheduler
from pagewire.shared.engine.warm_up import Progress, prepare, warm_up
from pagewire.shared.grammar.masks import MaskFiller
from pagewire.shared.grammar.tokens import load_vocabulary
from pagewire.shared.kv.block_hash import BlockHasher
from pagewire.shared.kv.block_pool import BlockPool, CacheListener
from pagewire.shared.kv.kv_layout import KvLayout
from pagewire.shared.kv.model_identity import ModelIdentity
from pagewire.shared.kv.storage import allocate_pool
from pagewire.shared.model.config import load_config, model_fingerprint
from pagewire.shared.model.load_progress import quiet
from pagewire.shared.model.loaded_model import LoadedModel
from pagewire.shared.model.loader import load_model
from pagewire.shared.model.model_config import ModelConfig
from pagewire.shared.model.shard import Communicator, Shard
from pagewire.shared.model.source import resolve_model
from pagewire.shared.model.transformers_model.config import TransformersConfig, require_transformers
from pagewire.shared.settings.config import EngineSettings

logger = logging.getLogger(__name__)

CPU_POOL_BYTES = 256 << 20
# Steps on a CPU may be long. With this length, other requests do not wait long for their tokens,
# and a step that hangs is soon noticed.
CPU_STEP_S = 1.0
# How long a worker's first steps may take from which it learns what steps cost.
GPU_CALIBRATION_S, CPU_CALIBRATION_S = 0.8, 0.2
OtherMemory = Callable[[KvLayout, int], int]


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """An engine, and facts about it that its worker or `LLM` needs.

    Attributes:
        runner: runs steps on this process's device: all of the model, or rank 0's part of it.
        ranks: the processes of the other ranks, which end with `close`.
        max_model_len: longest prompt plus answer.
        full_model_len: what `max_model_len` would be if the KV pool were large enough.
    """

    core: EngineCore
    runner: ModelRunner
    ranks: RankGroup
    config: ModelConfig
    model_path: Path
    model_identity: ModelIdentity
    layout: KvLayout
    device: torch.device
    max_model_len: int
    full_model_len: int


def build_engine(
    settings: EngineSettings,
    hash_secret: str | None = None,
    listener: CacheListener | None = None,
    local_prefill_tokens: int = 0,
    retained_share: float = 0.0,
    progress: Progress = lambda _stage: None,
    other_memory: OtherMemory = lambda _layout, _total_bytes: 0,
    learns_prices: bool = False,
) -> BuiltEngine:
    """Load a model and make an engine with it.

    Args:
        settings: validated settings.
        hash_secret: keys of block hashes derive from it; the same in all workers of a cluster. None
            takes a random one, for an engine whose hashes nobody else reads.
        listener: notified of blocks that enter and leave the prefix cache.
        local_prefill_tokens: see `SchedulerLimits`.
        retained_share: of the KV pool; how many blocks one owner may retain.
        progress: called with a line for people at each stage.
        other_memory: returns the bytes that the caller will allocate on the device itself, given
            the layout of KV blocks and the device's memory in bytes.
        learns_prices: steps of all kinds are timed, so that others can predict this engine's.

    Raises:
        ConfigError: this machine does not have what the settings ask for.
        RankError: a rank has ended while it loaded.
    """
    others = (hash_secret, listener, local_prefill_tokens, retained_share)
    check_ranks(settings)
    ranks = start_ranks(settings)
    try:
        return _build(settings, ranks, *others, progress, other_memory, learns_prices)
    except BaseException:
        ranks.close()
        raise


def _build(
    settings: EngineSettings,
    ranks: RankGroup,
    hash_secret: str | None,
    listener: CacheListener | None,
    local_prefill_tokens: int,
    retained_share: float,
    progress: Progress,
    other_memory: OtherMemory,
    learns_prices: bool,
) -> BuiltEngine:
    report = partial(_report, progress, ranks)
    loaded = _load(settings, report, ranks.shard, ranks.communicator)
    settings, config, device, layout = loaded.settings, loaded.config, loaded.device, loaded.layout
    progress("sizing the KV pool")
    num_blocks = settings.num_blocks or _fitting_blocks(loaded, other_memory)
    num_blocks = ranks.fewest_blocks(num_blocks)
    max_model_len = fit_context(settings, loaded.full_model_len, num_blocks, layout)
    log_pool(layout, num_blocks, device)
    ranks.begin(Begin(num_blocks, max_model_len, torch.get_num_threads()))
    runner = _make_runner(loaded, num_blocks, max_model_len)
    if device.type == "cuda":
        prepare(runner, config, settings, max_model_len, progress)
    ranks.wait_until_ready()
    identity = _identity(loaded)
    retained = int(retained_share * num_blocks)
    pool = BlockPool(num_blocks, layout, settings.enable_prefix_caching, listener, retained)
    limits = _limits(loaded, num_blocks, max_model_len, local_prefill_tokens)
    hasher = BlockHasher(hash_secret or secrets.token_hex(32), identity)
    scheduler = Scheduler(limits, pool, hasher)
    core = _core(scheduler, runner, ranks, overlap=device.type == "cuda")
    _learn_prices(core, runner, learns_prices)
    vocabulary = partial(load_vocabulary, loaded.path, config.vocab_size, config.eos_token_ids)
    core.constraints.filler = MaskFiller(vocabulary, config.vocab_size)
    return BuiltEngine(
        core=core,
        runner=runner,
        ranks=ranks,
        config=config,
        model_path=loaded.path,
        model_identity=identity,
        layout=layout,
        device=device,
        max_model_len=max_model_len,
        full_model_len=loaded.full_model_len,
    )


def _report(progress: Progress, ranks: RankGroup, stage: str) -> None:
    """Report progress of this rank, unless another one has failed meanwhile.

    Raises:
        ConfigError: it refuses the settings.
        RankError: it is lost.
    """
    ranks.look()
    progress(stage)


def build_rank(
    settings: EngineSettings,
    shard: Shard,
    communicator: Communicator,
    agree: Callable[[int], Begin],
) -> ModelRunner:
    """Load a rank's part of a model, and return what runs its steps; rank 0 has the engine.

    Args:
        settings: those of rank 0.
        shard: which part.
        communicator: of the ranks.
        agree: called with the number of KV blocks for which there is room; returns with what all
            ranks run steps.

    Raises:
        ConfigError: this machine does not have what the settings ask for.
    """
    loaded = _load(settings, quiet, shard, communicator)
    begin = agree(settings.num_blocks or _fitting_blocks(loaded, lambda _layout, _total_bytes: 0))
    if loaded.device.type == "cpu":
        torch.set_num_threads(begin.threads)
    return _make_runner(loaded, begin.num_blocks, begin.max_model_len)


def _core(
    scheduler: Scheduler, runner: ModelRunner, ranks: RankGroup, *, overlap: bool
) -> EngineCore:
    if ranks.count == 1:
        return EngineCore(scheduler, runner, overlap)
    executor = RanksExecutor(runner, ranks)
    return EngineCore(scheduler, executor, overlap, [executor])


def _learn_prices(core: EngineCore, runner: ModelRunner, all_kinds: bool) -> None:
    """Time steps: few on a CPU, so that prompts are cut well; or of all kinds."""
    limits, is_gpu = core.scheduler.limits, runner.kv_pool.is_cuda
    if limits.step_s == math.inf and not (is_gpu and all_kinds):
        return
    limit_s = GPU_CALIBRATION_S if is_gpu else CPU_CALIBRATION_S
    costs, limit_s = core.scheduler.costs, limit_s if all_kinds else 0.0
    calibrate(core.executor, runner, costs, limits, overlap=core.overlap, limit_s=limit_s)


def _limits(
    loaded: _Loaded, num_blocks: int, max_model_len: int, local_prefill_tokens: int
) -> SchedulerLimits:
    settings = loaded.settings
    # Triton's interpreter is too slow for steps of a certain time.
    is_timed = loaded.device.type == "cpu" and loaded.ops.backend == "torch"
    return SchedulerLimits(
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_model_len=max_model_len,
        max_waiting=settings.max_waiting,
        watermark_blocks=num_blocks // 100,
        local_prefill_tokens=local_prefill_tokens,
        step_s=CPU_STEP_S if is_timed else math.inf,
        gap_s=settings.slo_gap_s or math.inf,
        step_sizes=_captured_sizes(settings, loaded.device),
    )


def _captured_sizes(settings: EngineSettings, device: torch.device) -> tuple[int, ...]:
    """Return the numbers of tokens of the steps with decode rows and chunks that are captured."""
    if device.type != "cuda" or not settings.cuda_graphs:
        return ()
    return tuple(size for size in STEP_TOKENS if size <= LARGEST_STEP)


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A model on its device, and the layout of its KV blocks.

    Attributes:
        settings: as given, without what cannot be done for this model.
        full_model_len: see `BuiltEngine`.
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


def _load(
    settings: EngineSettings,
    progress: Progress,
    shard: Shard,
    communicator: Communicator | None,
) -> _Loaded:
    """Choose device, dtype and kernels, and load the model, or a rank's part of it."""
    progress("reading the model's configuration")
    path = resolve_model(settings.model, revision=settings.revision)
    config = load_config(path, settings.model_impl, settings.quantization, settings.kv_cache_dtype)
    device = choose_device(settings.device)
    dtype = choose_dtype(settings.dtype, config)
    full_model_len = choose_max_model_len(settings.max_model_len, config)
    check_invariance(config, settings.batch_invariant)
    ops = choose_ops(settings.kernels, device, settings.batch_invariant)
    check_kv_dtype(config, ops, device)
    if ops.backend == "triton":
        count_kernels()
    progress("loading weights")
    if isinstance(config, TransformersConfig):
        if shard.count > 1:
            raise ConfigError("transformers' code runs on one rank: leave --tensor-parallel-size 1")
        settings = settings.model_copy(update={"cuda_graphs": False})
        model = _load_by_transformers(path, config, device, dtype, ops, settings)
    else:
        load_format = settings.load_format
        parts: dict[str, Any] = {"shard": shard, "communicator": communicator}
        model = load_model(
            path, config, device, dtype, ops, load_format, full_model_len, progress, **parts
        )
    settle_threads(model, device, shard.count)
    return _Loaded(
        settings=settings,
        path=path,
        config=config,
        device=device,
        dtype=dtype,
        ops=ops,
        model=model,
        layout=config.kv_layout(settings.block_size, str(dtype).removeprefix("torch."), shard),
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


def _identity(loaded: _Loaded) -> ModelIdentity:
    settings, layout = loaded.settings, loaded.layout
    return ModelIdentity(
        fingerprint=model_fingerprint(
            loaded.path,
            loaded.config,
            settings.load_format,
            loaded.full_model_len,
            layout.ranks,
        ),
        dtype=str(loaded.dtype).removeprefix("torch."),
        kv_format=layout.dtype,
        block_size=layout.block_size,
        batch_invariant=settings.batch_invariant,
        ranks=layout.ranks if settings.batch_invariant else 1,
    )


def choose_dtype(name: str, config: ModelConfig) -> torch.dtype:
    """Return the dtype of weights and activations."""
    dtype: torch.dtype = getattr(torch, config.dtype if name == "auto" else name)
    return dtype


def _make_runner(loaded: _Loaded, num_blocks: int, max_model_len: int) -> ModelRunner:
    settings, device, layout = loaded.settings, loaded.device, loaded.layout
    max_blocks = -(-max_model_len // settings.block_size)
    state = DeviceState(settings.max_num_seqs, max_blocks, device, len(layout.groups))
    kv_pool = allocate_pool(layout, num_blocks, device)
    return ModelRunner(loaded.model, loaded.ops, kv_pool, layout, state, loaded.config.vocab_size)


def _fitting_blocks(loaded: _Loaded, other_memory: OtherMemory) -> int:
    """Size the KV pool: the memory that weights, a full step's activations and other uses leave.

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
    runner = _make_runner(loaded, blocks, loaded.full_model_len)
    warm_up(runner, loaded.config, min(max_tokens, loaded.full_model_len - 1))
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
        staging=other_memory(layout, total),
        in_use_by_others=in_use_by_others,
    )
    num_blocks = budget // layout.block_bytes
    if num_blocks < MIN_BLOCKS:
        raise ConfigError(
            f"the model leaves no memory for KV blocks on {torch.cuda.get_device_name(device)}: "
            "raise --gpu-memory-utilization or lower --max-num-batched-tokens"
        )
    return num_blocks
