# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""A mixture of experts: two grouped products over pairs of token and expert, and a weighted sum.

Pairs are sorted by expert into tiles (`expert_tiles.py`). A program of either product takes one
tile and some of the outputs, so that each expert's weights are read once a tile. The programs of a
tile are neighbours, and share its rows in the L2 cache. The first product gates its outputs. The
second writes a row for each pair, and the sum adds a token's rows in the order of its choices:
there are no atomics, and a step that runs again gives the same bits.

Few tokens, which rarely share an expert, are computed by `few_experts.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from pagewire.kernels._launch import (
    LEAST_ROWS,
    await_predecessor,
    can_copy_tiles,
    next_power_of_2,
    overlap_options,
)
from pagewire.kernels.errors import UnsupportedShapeError
from pagewire.kernels.expert_sizes import MOST_ROWS, rows_of_a_tile
from pagewire.kernels.expert_tiles import TileList, list_tiles
from pagewire.kernels.few_experts import are_few, few_experts
from pagewire.kernels.gated_silu import SILU, GatedSilu

_MAX_BLOCK = 1024


class _Tiling(NamedTuple):
    """Tiling of the products: outputs and inputs per program, tiles in flight, warps."""

    block_out: int
    block_in: int
    stages: int
    warps: int


@triton.jit
def _gate_up_kernel(
    x_ptr,  # [tokens, ins]
    weight_ptr,  # [experts, 2 * inner, ins] contiguous, or its descriptor
    bias_ptr,  # [experts, 2 * inner] contiguous
    out_ptr,  # [pairs, inner], by their place in `order`
    order_ptr,
    tiles_ptr,
    ins,
    inner,
    top_k,
    x_stride,
    GATE_STEP: tl.constexpr,  # rows of the weight from one gate to the next
    UP_AFTER_GATE: tl.constexpr,  # whether a gate's up is the next row, or `inner` rows later
    HAS_BIAS: tl.constexpr,
    ALPHA: tl.constexpr,
    UP_OFFSET: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    LIMIT: tl.constexpr,
    DESCRIBED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    tile_ptr = tiles_ptr + 3 * tl.program_id(1)
    await_predecessor(OVERLAPS)
    expert = tl.load(tile_ptr)
    if expert < 0:
        return
    place = tl.load(tile_ptr + 1) + tl.arange(0, ROWS)
    seen = place < tl.load(tile_ptr + 2)
    token = tl.load(order_ptr + place, mask=seen, other=0) // top_k
    first_column = tl.program_id(0) * BLOCK_OUT
    columns = first_column + tl.arange(0, BLOCK_OUT)
    wanted = columns < inner
    gates = columns * GATE_STEP
    ups = gates + (1 if UP_AFTER_GATE else inner)
    inputs = tl.arange(0, BLOCK_IN)
    weight_row = expert * 2 * inner
    x_tile = x_ptr + token.to(tl.int64)[None, :] * x_stride + inputs[:, None]
    if not DESCRIBED:
        tile = weight_ptr + weight_row.to(tl.int64) * ins + inputs[None, :]
        gate_tile = tile + gates.to(tl.int64)[:, None] * ins
        up_tile = tile + ups.to(tl.int64)[:, None] * ins
    gate = tl.zeros([BLOCK_OUT, ROWS], dtype=tl.float32)
    up = tl.zeros([BLOCK_OUT, ROWS], dtype=tl.float32)
    # The weights are the left factor: a matrix instruction takes 64 rows of it at least.
    for first in tl.range(0, ins, BLOCK_IN, num_stages=STAGES):
        there = inputs < ins - first
        x = tl.load(x_tile + first, mask=there[:, None] & seen[None, :], other=0.0)
        if DESCRIBED:
            weight = weight_ptr.load([weight_row + first_column, first])
            gate = tl.dot(weight, x, gate, input_precision="ieee")
            weight = weight_ptr.load([weight_row + inner + first_column, first])
            up = tl.dot(weight, x, up, input_precision="ieee")
        else:
            mask = wanted[:, None] & there[None, :]
            weight = tl.load(gate_tile + first, mask=mask, other=0.0)
            gate = tl.dot(weight, x, gate, input_precision="ieee")
            weight = tl.load(up_tile + first, mask=mask, other=0.0)
            up = tl.dot(weight, x, up, input_precision="ieee")
    if HAS_BIAS:
        bias = bias_ptr + weight_row
        gate += tl.load(bias + gates, mask=wanted, other=0.0).to(tl.float32)[:, None]
        up += tl.load(bias + ups, mask=wanted, other=0.0).to(tl.float32)[:, None]
    if HAS_LIMIT:
        gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    result = gate / (1.0 + tl.exp(-ALPHA * gate)) * (up + UP_OFFSET)
    out = out_ptr + place.to(tl.int64)[None, :] * inner + columns[:, None]
    tl.store(out, result.to(out_ptr.dtype.element_ty), mask=wanted[:, None] & seen[None, :])


@triton.jit
def _down_kernel(
    x_ptr,  # [pairs, ins] contiguous, by their place in `order`, or its descriptor
    weight_ptr,  # [experts, outs, ins] contiguous, or its descriptor
    bias_ptr,  # [experts, outs] contiguous
    out_ptr,  # [pairs, outs], by pair
    order_ptr,
    tiles_ptr,
    ins,
    outs,
    HAS_BIAS: tl.constexpr,
    DESCRIBED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    tile_ptr = tiles_ptr + 3 * tl.program_id(1)
    await_predecessor(OVERLAPS)
    expert = tl.load(tile_ptr)
    if expert < 0:
        return
    first_place = tl.load(tile_ptr + 1)
    place = first_place + tl.arange(0, ROWS)
    seen = place < tl.load(tile_ptr + 2)
    pair = tl.load(order_ptr + place, mask=seen, other=0)
    first_column = tl.program_id(0) * BLOCK_OUT
    columns = first_column + tl.arange(0, BLOCK_OUT)
    wanted = columns < outs
    inputs = tl.arange(0, BLOCK_IN)
    weight_row = expert * outs
    if not DESCRIBED:
        weight_tile = weight_ptr + (weight_row.to(tl.int64) + columns[:, None]) * ins
        weight_tile += inputs[None, :]
        x_tile = x_ptr + place.to(tl.int64)[None, :] * ins + inputs[:, None]
    acc = tl.zeros([BLOCK_OUT, ROWS], dtype=tl.float32)
    for first in tl.range(0, ins, BLOCK_IN, num_stages=STAGES):
        if DESCRIBED:
            x = x_ptr.load([first_place, first]).T
            weight = weight_ptr.load([weight_row + first_column, first])
        else:
            there = inputs < ins - first
            x = tl.load(x_tile + first, mask=there[:, None] & seen[None, :], other=0.0)
            mask = wanted[:, None] & there[None, :]
            weight = tl.load(weight_tile + first, mask=mask, other=0.0)
        acc = tl.dot(weight, x, acc, input_precision="ieee")
    if HAS_BIAS:
        bias = tl.load(bias_ptr + weight_row + columns, mask=wanted, other=0.0)
        acc += bias.to(tl.float32)[:, None]
    out = out_ptr + pair.to(tl.int64)[None, :] * outs + columns[:, None]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=wanted[:, None] & seen[None, :])


@triton.jit
def _weighted_sum_kernel(
    x_ptr,  # [tokens, top_k, width] contiguous
    weights_ptr,  # [tokens, top_k] float32
    out_ptr,  # [tokens, width] contiguous
    width,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    await_predecessor(OVERLAPS)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for choice in tl.static_range(TOP_K):
        row = token * TOP_K + choice
        x = tl.load(x_ptr + row * width + columns, mask=mask, other=0.0)
        total += tl.load(weights_ptr + row) * x.to(tl.float32)
    tl.store(out_ptr + token * width + columns, total.to(out_ptr.dtype.element_ty), mask=mask)


def experts(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    activation: GatedSilu = SILU,
    interleaved: bool = False,
    tile_rows: int | None = None,
) -> torch.Tensor:
    """Return the weighted sum of the outputs of each token's experts, `[T, H]`.

    Shapes are those of `pagewire.kernels.Experts`. `tile_rows` is how many pairs a tile has; None
    chooses by the batch.

    Raises:
        UnsupportedShapeError: a weight or bias has gaps, or x a last dimension with gaps.
    """
    parameters = [
        tensor for tensor in (gate_up, down, gate_up_bias, down_bias) if tensor is not None
    ]
    if not all(parameter.is_contiguous() for parameter in parameters) or x.stride(1) != 1:
        raise UnsupportedShapeError("experts need weights without gaps, and rows of stride 1")
    tokens = len(x)
    num_experts, top_k = gate_up.shape[0], chosen.shape[1]
    if tokens == 0:
        return torch.empty_like(x)
    if tile_rows is None and are_few(tokens, top_k, num_experts):
        biases = gate_up_bias, down_bias
        return few_experts(x, chosen, weights, gate_up, down, *biases, activation, interleaved)
    rows = tile_rows or rows_of_a_tile(chosen.numel(), num_experts)
    tiles = list_tiles(chosen, num_experts, rows)
    inner = _gate_and_up(x, gate_up, gate_up_bias, tiles, top_k, activation, interleaved)
    return sum_choices(_project_down(inner, down, down_bias, tiles, top_k), weights, x)


def sum_choices(outputs: torch.Tensor, weights: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the weighted sum of each token's outputs, `[T, H]`.

    Args:
        outputs: `[pairs, H]` contiguous, by pair.
        weights: `[T, K]` float32.
        x: the tokens' inputs, `[T, H]`.
    """
    tokens, width = x.shape
    out = torch.empty((tokens, width), dtype=x.dtype, device=x.device)
    block = min(next_power_of_2(width), _MAX_BLOCK)
    _weighted_sum_kernel[(tokens, triton.cdiv(width, block))](
        outputs,
        weights.contiguous(),
        out,
        width,
        TOP_K=weights.shape[1],
        BLOCK=block,
        num_warps=4,
        **overlap_options(x.device, tokens),
    )
    return out


def _choose_tiling(dtype: torch.dtype, rows: int, large_stages: int) -> _Tiling:
    """Return what was fastest on an H200 with the experts of Qwen3-30B-A3B."""
    if dtype == torch.float32:  # no tensor cores: tiles that fit into registers
        return _Tiling(32, 32, 2, 8)
    if rows == MOST_ROWS:  # products take the time: larger tiles read less from the L2 cache
        return _Tiling(128, 64, large_stages, 8)
    return _Tiling(64, 128 if rows == LEAST_ROWS else 64, 3, 4)


def _can_describe(rows: int, *matrices: torch.Tensor) -> bool:
    """Return whether the GPU's copy engine (TMA) can load large tiles of these.

    The copy engine needs rows and a start that are multiples of 16 bytes.
    """
    return rows == MOST_ROWS and all(
        can_copy_tiles(matrix.device)
        and matrix.dtype.itemsize == 2
        and matrix.shape[-1] % 8 == 0
        and matrix.data_ptr() % 16 == 0
        for matrix in matrices
    )


def _describe(matrices: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Describe contiguous matrices as one, to be loaded by tiles."""
    matrix = matrices.view(-1, matrices.shape[-1])
    return TensorDescriptor.from_tensor(matrix, [rows, columns])


def _gate_and_up(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    bias: torch.Tensor | None,
    tiles: TileList,
    top_k: int,
    activation: GatedSilu,
    interleaved: bool,
) -> torch.Tensor:
    """Return the gated first projection, `[pairs, I]`, in the order of the tiles."""
    width, inner = x.shape[1], gate_up.shape[1] // 2
    tiling = _choose_tiling(x.dtype, tiles.rows, large_stages=4)
    described = not interleaved and _can_describe(tiles.rows, gate_up)
    block = tiling.block_out, tiling.block_in
    out = torch.empty((tiles.order.shape[0], inner), dtype=x.dtype, device=x.device)
    _gate_up_kernel[(triton.cdiv(inner, tiling.block_out), tiles.tiles.shape[0])](
        x,
        _describe(gate_up, *block) if described else gate_up,
        gate_up if bias is None else bias,
        out,
        tiles.order,
        tiles.tiles,
        width,
        inner,
        top_k,
        x.stride(0),
        GATE_STEP=2 if interleaved else 1,
        UP_AFTER_GATE=interleaved,
        HAS_BIAS=bias is not None,
        ALPHA=activation.alpha,
        UP_OFFSET=activation.up_offset,
        HAS_LIMIT=activation.limit is not None,
        LIMIT=activation.limit or 0.0,
        DESCRIBED=described,
        ROWS=tiles.rows,
        BLOCK_OUT=tiling.block_out,
        BLOCK_IN=tiling.block_in,
        STAGES=tiling.stages,
        num_warps=tiling.warps,
        **overlap_options(x.device, x.shape[0]),
    )
    return out


def _project_down(
    x: torch.Tensor, down: torch.Tensor, bias: torch.Tensor | None, tiles: TileList, top_k: int
) -> torch.Tensor:
    """Return the second projection of `[pairs, I]`, `[pairs, H]`, in the order of the pairs."""
    outs, ins = down.shape[1:]
    tiling = _choose_tiling(x.dtype, tiles.rows, large_stages=3)
    described = _can_describe(tiles.rows, x, down)
    block = tiling.block_out, tiling.block_in
    out = torch.empty((x.shape[0], outs), dtype=x.dtype, device=x.device)
    _down_kernel[(triton.cdiv(outs, tiling.block_out), tiles.tiles.shape[0])](
        _describe(x, tiles.rows, tiling.block_in) if described else x,
        _describe(down, *block) if described else down,
        down if bias is None else bias,
        out,
        tiles.order,
        tiles.tiles,
        ins,
        outs,
        HAS_BIAS=bias is not None,
        DESCRIBED=described,
        ROWS=tiles.rows,
        BLOCK_OUT=tiling.block_out,
        BLOCK_IN=tiling.block_in,
        STAGES=tiling.stages,
        num_warps=tiling.warps,
        **overlap_options(x.device, x.shape[0] // top_k),
    )
    return out
