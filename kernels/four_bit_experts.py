"""A mixture of experts with weights in four bits, which are dequantised in registers.

Two grouped products and a weighted sum, as in `experts.py`.
"""

from __future__ import annotations

import torch

from pagewire.kernels._launch import LEAST_ROWS
from pagewire.kernels.errors import UnsupportedShapeError
from pagewire.kernels.expert_sizes import MOST_ROWS, rows_in_four_bits
from pagewire.kernels.expert_tiles import TileList, list_tiles
from pagewire.kernels.experts import sum_choices
from pagewire.kernels.four_bit_product import Tiling, multiply
from pagewire.kernels.four_bits import FourBitWeights
from pagewire.kernels.gated_silu import SILU, GatedSilu

_FEW_ROWS = 64


def _choose_tiling(dtype: torch.dtype, rows: int, is_e2m1: bool) -> Tiling:
    """Return what was fastest on an H200 with the experts of Qwen3-30B-A3B."""
    if dtype == torch.float32:  # no tensor cores: tiles that fit into registers
        return Tiling(32, 32, 1, 2, 8)
    if rows == LEAST_ROWS:
        return Tiling(64, 256, 1, 3, 4)
    if rows <= _FEW_ROWS:
        return Tiling(64, 128, 1, 3, 4)
    if rows == MOST_ROWS and not is_e2m1:
        return Tiling(128, 128, 1, 3, 8)
    return Tiling(128, 64, 1, 3 if rows > MOST_ROWS else 4, 8)


def four_bit_experts(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    gate_up: FourBitWeights,
    down: FourBitWeights,
    activation: GatedSilu = SILU,
    interleaved: bool = False,
    tile_rows: int | None = None,
) -> torch.Tensor:
    """Return the weighted sum of the outputs of each token's experts, `[T, H]`.

    Shapes are those of `pagewire.kernels.FourBitExperts`. `tile_rows` is how many pairs a tile has;
    None chooses by the batch.

    Raises:
        UnsupportedShapeError: the last dimension of x has gaps.
    """
    if x.stride(1) != 1:
        raise UnsupportedShapeError("experts need rows of stride 1")
    if not len(x):
        return torch.empty_like(x)
    count, top_k = len(gate_up.pairs), chosen.shape[1]
    rows = tile_rows or rows_in_four_bits(chosen.numel(), count)
    tiles = list_tiles(chosen, count, rows)
    inner = _project(x, gate_up, tiles, top_k, activation, interleaved)
    return sum_choices(_project(inner, down, tiles, top_k), weights, x)


def _project(
    x: torch.Tensor,
    weights: FourBitWeights,
    tiles: TileList,
    top_k: int,
    activation: GatedSilu | None = None,
    interleaved: bool = False,
) -> torch.Tensor:
    """Return the gated first projections of tokens, or the second ones of pairs.

    Args:
        x: `[T, in]`, or `[pairs, in]` in the order of the tiles.
        weights: of all experts.
        tiles: pairs by expert.
        top_k: experts of a token.
        activation: of the first projections, which are `[pairs, out / 2]` in the order of the
            tiles; None: these are the second ones, `[pairs, out]` in the order of pairs.
        interleaved: whether rows of gate and up alternate.
    """
    outs = weights.pairs.shape[1]
    width = outs if activation is None else outs // 2
    out = torch.empty((len(tiles.order), width), dtype=x.dtype, device=x.device)
    tiling = _choose_tiling(x.dtype, tiles.rows, weights.zeros is None)
    return multiply(x, weights, out, tiles.rows, tiling, tiles, top_k, activation, interleaved)
