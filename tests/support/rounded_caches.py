"""Hugging Face's models with keys and values rounded as a KV cache in FP8 rounds them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

Scales = list[tuple[float, float]]  # of keys and of values, by layer


def rounded(x: torch.Tensor, scale: float) -> torch.Tensor:
    """Return what a number in FP8 times the scale stands for, of each number."""
    in_fp8 = (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return (in_fp8.float() * scale).to(x.dtype)


@contextmanager
def rounded_caches(model: Any, scales: Scales | None = None) -> Iterator[None]:
    """Let a model's eager attention attend to rounded keys and values, also to the newest.

    Args:
        model: of transformers, loaded with `attn_implementation="eager"`.
        scales: of each layer; None: 1.
    """
    code = sys.modules[type(model).__module__]
    plain = code.eager_attention_forward

    def attention(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any,
        **options: Any,
    ) -> Any:  # fmt: skip
        of_keys, of_values = (1.0, 1.0) if scales is None else scales[module.layer_idx]
        key, value = rounded(key, of_keys), rounded(value, of_values)
        return plain(module, query, key, value, *args, **options)

    code.eager_attention_forward = attention  # type: ignore[attr-defined]
    try:
        yield
    finally:
        code.eager_attention_forward = plain  # type: ignore[attr-defined]
