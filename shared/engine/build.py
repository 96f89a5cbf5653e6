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

import torch

from pagewire.shared.base.errors import IntegrityError, RankError
from pagewire.shared.engine.calibration import calibrate
from pagewire.shared.engine.choices import check_ranks, fit_context, log_pool
from pagewire.shared.engine.constraints import Constraints
from pagewire.shared.engine.core import EngineCore
from pagewire.shared.engine.execution.cuda_graph import LARGEST_STEP, STEP_TOKENS, Progress
from pagewire.shared.engine.execution.executor import Executor, StepHook
from pagewire.shared.engine.execution.model_runner import ModelRunner
from pagewire.shared.engine.live_sequences import LiveSequences
from pagewire.shared.engine.loading import (
    ModelPart,
    OtherMemory,
    fitting_blocks,
    load_part,
    make_runner,
)
from pagewire.shared.engine.ranks.communicator import RankCommunicator, SocketCommunicator
from pagewire.shared.engine.ranks.executor import RanksExecutor
from pagewire.shared.engine.ranks.group import RankGroup, start_ranks
from pagewire.shared.engine.ranks.messages import Begin
from pagewire.shared.engine.scheduling.schedule import SchedulerLimits
from pagewire.shared.engine.scheduling.scheduler import Scheduler
from pagewire.shared.engine.step_clock import OnStepChange, unobserved
from pagewire.shared.engine.warm_up import prepare, prepare_ranks
from pagewire.shared.grammar.masks import MaskFiller
from pagewire.shared.grammar.vocabulary import load_vocabulary
from pagewire.shared.kv.block_hash import BlockHasher
from pagewire.shared.kv.block_pool import BlockPool, CacheListener
from pagewire.shared.kv.kv_layout import KvLayout
from pagewire.shared.kv.model_identity import ModelIdentity
from pagewire.shared.model.config import config_digest, model_fingerprint
from pagewire.shared.model.load_progress import quiet
from pagewire.shared.model.model_config import ModelConfig
from pagewire.shared.model.shard import Shard
from pagewire.shared.settings.config import EngineSettings

logger = logging.getLogger(__name__)

# Steps on a CPU may be long. With this length, other requests do not wait long for their tokens,
# and a step that hangs is soon noticed.
CPU_STEP_S = 1.0
# How long a worker's first steps may take from which it learns what steps cost.
GPU_CALIBRATION_S, CPU_CALIBRATION_S = 0.8, 0.2


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """The parts of an engine, and facts about it that its worker or `LLM` needs.

    Attributes:
        executor: runs steps on all ranks.
        runner: runs steps on this process's device: all of the model, or rank 0's part of it.
        ranks: the processes of the other ranks, which end with `close`.
        max_model_len: longest prompt plus answer.
        full_model_len: what `max_model_len` would be if the KV pool were large enough.
    """

    scheduler: Scheduler
    sequences: LiveSequences
    executor: Executor
    runner: ModelRunner
    ranks: RankGroup
    config: ModelConfig
    model_path: Path
    model_identity: ModelIdentity
    config_digest: str
    layout: KvLayout
    device: torch.device
    max_model_len: int
    full_model_len: int

    def make_core(self, *hooks: StepHook, on_step_change: OnStepChange = unobserved) -> EngineCore:
        """Make the engine's core, once; see `EngineCore` for the arguments."""
        own = (self.executor,) if isinstance(self.executor, RanksExecutor) else ()
        parts, overlap = (self.scheduler, self.sequences, self.executor), self.device.type == "cuda"
        return EngineCore(*parts, overlap, (*own, *hooks), on_step_change)


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
    """Load a model and make the parts of an engine with it.

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
    except RankError as exc:
        if (loss := ranks.loss(exc)) is exc:
            raise
        raise loss from exc
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
    loaded = load_part(settings, report, ranks.shard, ranks.control)
    ranks.own(loaded.communicator)
    settings, config, device, layout = loaded.settings, loaded.config, loaded.device, loaded.layout
    progress("sizing the KV pool")
    num_blocks = ranks.fewest_blocks(settings.num_blocks or fitting_blocks(loaded, other_memory))
    max_model_len = fit_context(settings, loaded.full_model_len, num_blocks, layout)
    log_pool(layout, num_blocks, device)
    ranks.begin(Begin(num_blocks, max_model_len, torch.get_num_threads()))
    runner = make_runner(loaded, num_blocks, max_model_len)
    _prepare(loaded, runner, max_model_len, report)
    ranks.wait_until_ready()
    identity = _identity(loaded)
    retained = int(retained_share * num_blocks)
    pool = BlockPool(num_blocks, layout, settings.enable_prefix_caching, listener, retained)
    limits = _limits(loaded, num_blocks, max_model_len, local_prefill_tokens)
    scheduler = Scheduler(limits, pool, BlockHasher(hash_secret or secrets.token_hex(32), identity))
    executor: Executor = runner
    if loaded.communicator is not None:
        executor = RanksExecutor(runner, ranks, loaded.communicator)
    vocabulary = partial(load_vocabulary, loaded.path, config.vocab_size, config.eos_token_ids)
    constraints = Constraints(MaskFiller(vocabulary, config.vocab_size))
    built = BuiltEngine(
        scheduler=scheduler,
        sequences=LiveSequences(scheduler.table, constraints),
        executor=executor,
        runner=runner,
        ranks=ranks,
        config=config,
        model_path=loaded.path,
        model_identity=identity,
        config_digest=config_digest(loaded.path),
        layout=layout,
        device=device,
        max_model_len=max_model_len,
        full_model_len=loaded.full_model_len,
    )
    _learn_prices(built, learns_prices)
    return built


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
    control: SocketCommunicator,
    agree: Callable[[int], Begin],
) -> tuple[ModelRunner, RankCommunicator]:
    """Load a rank's part of a model; rank 0 has the engine.

    Args:
        settings: those of rank 0.
        shard: which part.
        control: the sockets to the other ranks.
        agree: called with the number of KV blocks for which there is room; returns with what all
            ranks run steps.

    Returns:
        What runs steps, and what adds up the ranks' parts; the caller closes that.

    Raises:
        ConfigError: this machine does not have what the settings ask for.
        RankError: a rank is lost.
    """
    loaded = load_part(settings, quiet, shard, control)
    if loaded.communicator is None:
        raise IntegrityError("a rank has no sockets to the other ranks")
    begin = agree(settings.num_blocks or fitting_blocks(loaded, lambda _layout, _total_bytes: 0))
    if loaded.device.type == "cpu":
        torch.set_num_threads(begin.threads)
    runner = make_runner(loaded, begin.num_blocks, begin.max_model_len)
    _prepare(loaded, runner, begin.max_model_len, quiet)
    return runner, loaded.communicator


def _prepare(
    loaded: ModelPart, runner: ModelRunner, max_model_len: int, progress: Progress
) -> None:
    """Run an engine's first steps on a GPU; all ranks call this."""
    if loaded.device.type != "cuda":
        return
    config, settings, ranks = loaded.config, loaded.settings, loaded.communicator
    if ranks is None:
        prepare(runner, config, settings, max_model_len, progress)
    else:
        prepare_ranks(runner, config, settings, max_model_len, progress, ranks)


def _learn_prices(built: BuiltEngine, all_kinds: bool) -> None:
    """Time steps: few on a CPU, so that prompts are cut well; or of all kinds."""
    scheduler, is_gpu = built.scheduler, built.device.type == "cuda"
    if scheduler.limits.step_s == math.inf and not (is_gpu and all_kinds):
        return
    limit_s = GPU_CALIBRATION_S if is_gpu else CPU_CALIBRATION_S
    limit_s = limit_s if all_kinds else 0.0
    calibrate(built.executor, built.runner, scheduler, overlap=is_gpu, limit_s=limit_s)


def _limits(
    loaded: ModelPart, num_blocks: int, max_model_len: int, local_prefill_tokens: int
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


def _identity(loaded: ModelPart) -> ModelIdentity:
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
