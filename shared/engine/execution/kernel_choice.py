"""Chooses the kernels that an engine runs: Triton's, or the reference in PyTorch."""

from __future__ import annotations

import importlib

import torch

from pagewire.kernels import BackendName, Ops, load_ops
from pagewire.shared.base.errors import ConfigError
from pagewire.shared.model.model_config import ModelConfig
from pagewire.shared.model.transformers_model.config import TransformersConfig


def choose_ops(name: BackendName, device: torch.device, batch_invariant: bool = False) -> Ops:
    """Return the kernels that the settings select.

    Raises:
        ConfigError: Triton was asked for where it cannot run.
    """
    try:
        ops = load_ops(name, device.type, batch_invariant)
        # Its interpreter, for tests, runs anywhere.
        if ops.backend == "triton" and device.type == "cpu" and not _triton_is_interpreted():
            raise ConfigError("the Triton kernels need a GPU: use --kernels torch on the CPU")
    except ImportError as exc:
        raise ConfigError(f"Triton is not installed ({exc}): use --kernels torch") from exc
    return ops


def _triton_is_interpreted() -> bool:
    knobs = importlib.import_module("triton").knobs  # not available on every platform
    return bool(knobs.runtime.interpret)


def check_kv_dtype(config: ModelConfig, ops: Ops, device: torch.device) -> None:
    """Refuse a KV cache in FP8 where the kernels cannot convert its numbers.

    Raises:
        ConfigError: one line.
    """
    if config.kv_dtype is None or ops.backend != "triton" or device.type == "cpu":
        return
    if torch.cuda.get_device_capability(device) < (8, 9):
        raise ConfigError(
            f"{torch.cuda.get_device_name(device)} does not convert FP8: --kv-cache-dtype fp8 "
            "needs a GPU of compute capability 8.9 or newer (Ada, Hopper); leave it out"
        )


def check_invariance(config: ModelConfig, batch_invariant: bool) -> None:
    """Refuse batch invariance for models that transformers' code computes.

    Raises:
        ConfigError: one line.
    """
    if batch_invariant and isinstance(config, TransformersConfig):
        raise ConfigError(
            "--batch-invariant is only for models that Pagewire's own code computes: transformers' "
            "modules multiply matrices in ways that depend on the batch"
        )
