"""The table of rotary angles, computed step by step in float32 as Hugging Face does."""

from __future__ import annotations

import math

import torch

from pagewire.shared.model.config import RopeConfig


def cos_sin_table(rope: RopeConfig, head_dim: int, max_positions: int) -> torch.Tensor:
    """Return cosines and sines of every position, `[max_positions, D]` float32, on the CPU.

    Cosines lie in `[:, :D/2]`, sines in `[:, D/2:]`. On the CPU whatever the model's device:
    so all workers turn by the same angles.
    """
    positions = torch.arange(max_positions, dtype=torch.float32)
    angles = positions[:, None] * _inverse_frequencies(rope, head_dim)  # [max_positions, D/2]
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def _inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Return the angle per position of each pair, `[D/2]`."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.rope_type == "linear":
        return frequencies / rope.factor
    if rope.rope_type == "llama3":
        return _scale_llama3(rope, frequencies)
    return frequencies


def _scale_llama3(rope: RopeConfig, frequencies: torch.Tensor) -> torch.Tensor:
    """Divide long wavelengths by the factor, keep short ones, and go smoothly between."""
    original = rope.original_max_position_embeddings
    longest_kept = original / rope.high_freq_factor
    shortest_divided = original / rope.low_freq_factor
    wavelengths = 2 * math.pi / frequencies
    divided = torch.where(wavelengths > shortest_divided, frequencies / rope.factor, frequencies)
    smooth = (original / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    smoothed = (1 - smooth) * divided / rope.factor + smooth * divided
    between = ~(wavelengths < longest_kept) & ~(wavelengths > shortest_divided)
    return torch.where(between, smoothed, divided)
