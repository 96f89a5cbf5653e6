"""Computes the table of rotary angles, step by step in float32 as Hugging Face does."""

from __future__ import annotations

import math

import torch

from pagewire.shared.model.rope_config import RopeConfig


def cos_sin_table(rope: RopeConfig, head_dim: int, max_positions: int) -> torch.Tensor:
    """Return cosines and sines of every position, `[max_positions, R]` float32, on the CPU.

    R numbers of each head are rotated. Cosines lie in `[:, :R/2]`, sines in `[:, R/2:]`, both times
    `RopeConfig.amplitude`. The table is computed on the CPU for any model device, so that all
    workers rotate by the same angles.

    Args:
        rope: the rotary parameters.
        head_dim: size of a head.
        max_positions: longest sequence in tokens; it selects one of the two sets of factors of
            `longrope`, see `RopeConfig.is_long`.
    """
    positions = torch.arange(max_positions, dtype=torch.float32)
    is_long = rope.is_long(max_positions)
    angles = positions[:, None] * _inverse_frequencies(rope, rope.rotated(head_dim), is_long)
    return torch.cat([angles.cos(), angles.sin()], dim=-1) * rope.amplitude


def _inverse_frequencies(rope: RopeConfig, rotated: int, is_long: bool) -> torch.Tensor:
    """Return the angle per position of each pair, `[R/2]`."""
    exponents = torch.arange(0, rotated, 2, dtype=torch.float32) / rotated
    wavelengths = rope.theta**exponents  # over 2 pi
    if rope.rope_type == "longrope":
        factors = rope.long_factors if is_long else rope.short_factors
        return 1.0 / (torch.tensor(factors, dtype=torch.float32) * wavelengths)
    frequencies = 1.0 / wavelengths
    if rope.rope_type == "linear":
        return frequencies / rope.factor
    if rope.rope_type == "llama3":
        return _scale_llama3(rope, frequencies)
    if rope.rope_type == "yarn":
        share = 1 - _yarn_ramp(rope, rotated)
        return 1.0 / (rope.factor * wavelengths) * (1 - share) + frequencies * share
    return frequencies  # "dynamic", too, up to the model's context


def _yarn_ramp(rope: RopeConfig, rotated: int) -> torch.Tensor:
    """Return the share of each frequency that is divided by the factor, from 0 to 1, `[R/2]`.

    YaRN (arXiv 2309.00071), as Hugging Face computes it.
    """

    def pair_that_turns(rotations: float) -> float:
        turns = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
        return rotated * math.log(turns) / (2 * math.log(rope.theta))

    first, last = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotated - 1)
    if first == last:
        last += 0.001
    pairs = torch.arange(rotated // 2, dtype=torch.float32)
    return torch.clamp((pairs - first) / (last - first), 0, 1)


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
