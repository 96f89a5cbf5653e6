"""A mixture of experts with weights in FP8: two grouped products, each of quantised inputs."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pagewire.kernels.expert_sizes import rows_of_a_tile
from pagewire.kernels.expert_tiles import TileList, list_tiles
from pagewire.kernels.experts import experts, sum_choices
from pagewire.kernels.fp8_inputs import quantise
from pagewire.kernels.fp8_linear import multiplies_fp8, multiply
from pagewire.kernels.fp8_numbers import Fp8Weights
from pagewire.kernels.gated_silu import SILU, GatedSilu
from pagewire.kernels.reference.experts import activate
from pagewire.kernels.reference.fp8_linear import dequantised
from pagewire.kernels.silu_and_mul import silu_and_mul


def fp8_experts(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    gate_up: Fp8Weights,
    down: Fp8Weights,
    quantises_inputs: bool = True,
    activation: GatedSilu = SILU,
    interleaved: bool = False,
    mixture: Callable[..., torch.Tensor] = experts,
    tile_rows: int | None = None,
) -> torch.Tensor:
    """Return the weighted sum of the outputs of each token's experts, `[T, H]`.

    Shapes are those of `pagewire.kernels.Fp8Experts`.

    Args:
        x: see there, as the following ones.
        chosen: experts of tokens.
        weights: of their outputs.
        gate_up: first projections.
        down: second projections.
        quantises_inputs: whether inputs are quantised.
        activation: activation between the projections.
        interleaved: whether rows of gate and up alternate.
        mixture: a mixture of experts, as `experts` is, where numbers are not multiplied in FP8.
        tile_rows: pairs of a tile; None chooses by the batch.
    """
    if not len(x):
        return torch.empty_like(x)
    if not (quantises_inputs and multiplies_fp8(x.device)):
        meant = (dequantised(each).to(x.dtype) for each in (gate_up, down))
        biases = (gate_up.bias, down.bias)
        return mixture(x, chosen, weights, *meant, *biases, activation, interleaved)
    rows = tile_rows or rows_of_a_tile(chosen.numel(), len(gate_up.numbers))
    tiles = list_tiles(chosen, len(gate_up.numbers), rows)
    projected = _project(x, gate_up, chosen, tiles)
    if activation == SILU and not interleaved:
        inner = silu_and_mul(projected)
    else:
        inner = activate(projected.float(), activation, interleaved).to(x.dtype)
    outputs = _project(inner, down, chosen, tiles)
    return sum_choices(outputs, weights, x)


def _project(
    x: torch.Tensor, weights: Fp8Weights, chosen: torch.Tensor, tiles: TileList
) -> torch.Tensor:
    """Return the projections of each pair of a row and an expert, `[pairs, out]`.

    Args:
        x: `[T, in]`, or `[pairs, in]`.
        weights: of all experts.
        chosen: `[T, K]`.
        tiles: pairs by expert.
    """
    pairs = chosen.numel()
    scale = weights.input_scale
    if scale is not None:  # an expert has a scale, and pairs do not share rows
        x = x.repeat_interleave(pairs // len(x), 0)
        scale = scale[chosen.flatten().long()]
    inputs = quantise(x, weights.block[1], scale)
    out = torch.empty((pairs, weights.numbers.shape[1]), dtype=x.dtype, device=x.device)
    multiply(inputs, weights, out, tiles.rows, tiles, pairs // len(x))
    return out
