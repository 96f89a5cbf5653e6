"""What an engine chooses by its settings, its machine and its model: device, ranks, context."""

from __future__ import annotations

import itertools
import logging

import torch

from pagewire.shared.base.errors import ConfigError
from pagewire.shared.kv.kv_layout import KvLayout
from pagewire.shared.model.model_config import ModelConfig
from pagewire.shared.settings.config import EngineSettings

logger = logging.getLogger(__name__)


def choose_device(settings: EngineSettings, rank: int = 0) -> torch.device:
    """Return the device that settings select for a rank of the model.

    One rank alone takes the current GPU. Of several each has its own, in their order.

    Raises:
        ConfigError: CUDA was asked for and there is none.
    """
    name = settings.device
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("no CUDA device was found: install a driver, or use --device cpu")
    if settings.tensor_parallel_size == 1:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cuda", 0 if settings.ranks_share_gpu else rank)


def check_ranks(settings: EngineSettings) -> None:
    """Check that this machine can run as many ranks as the settings ask for.

    Raises:
        ConfigError: it cannot; says what is missing.
    """
    count = settings.tensor_parallel_size
    if count == 1 or choose_device(settings).type == "cpu" or settings.ranks_share_gpu:
        return
    asked = f"--tensor-parallel-size {count}"
    if (gpus := torch.cuda.device_count()) < count:
        raise ConfigError(
            f"{asked} needs {count} GPUs, and {gpus} can be used: lower it, "
            "or see CUDA_VISIBLE_DEVICES"
        )
    names = {torch.cuda.get_device_name(gpu) for gpu in range(count)}
    if len(names) > 1:
        raise ConfigError(
            f"{asked} needs GPUs of one type, since all ranks must compute the same bits; the "
            f"first {count} are {' and '.join(sorted(names))}: choose others in "
            "CUDA_VISIBLE_DEVICES"
        )
    for one, other in itertools.permutations(range(count), 2):
        if not torch.cuda.can_device_access_peer(one, other):
            raise ConfigError(
                f"{asked} needs GPUs that read each other's memory, and GPU {one} cannot read GPU "
                f"{other}'s (see nvidia-smi topo -p2p r): choose others in CUDA_VISIBLE_DEVICES"
            )


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


def log_pool(layout: KvLayout, num_blocks: int, device: torch.device) -> None:
    """Log how large a KV pool is."""
    gib = num_blocks * layout.block_bytes / (1 << 30)
    logger.info(
        "the KV pool has %d blocks of %d tokens (%.2f GiB, %s) on %s",
        num_blocks,
        layout.block_size,
        gib,
        layout.dtype,
        device,
    )


def fit_context(
    settings: EngineSettings, full_model_len: int, num_blocks: int, layout: KvLayout
) -> int:
    """Return the length of the longest sequence; log it if the KV pool shortens it.

    Args:
        settings: if `max_model_len` was set, a pool that is too small for it is an error.
        full_model_len: the length that was set, else the model's own.
        num_blocks: blocks of the pool.
        layout: of the blocks.

    Raises:
        ConfigError: the pool does not hold the length that was set, or not even one token.
    """
    fits = layout.longest_sequence(num_blocks, settings.max_num_batched_tokens)
    if full_model_len <= fits:
        return full_model_len
    if not fits:
        least = len(layout.groups)
        raise ConfigError(f"a sequence needs at least {least} KV blocks: raise --num-blocks")
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
