# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""A mixture of experts for few tokens: matrix-vector products, without a list of tiles.

If few tokens share an expert, most rows of the matrix instruction would be empty, and sorting pairs
would take longer than it saves. So each program computes some outputs of one pair (of token and
expert): the product of their weights and the token's vector. Programs of one range of outputs are
neighbours, so that pairs of the same expert read weights from the L2 cache. In the second product,
a program computes outputs of one token for all of its experts and adds them, without atomics and
without another launch. vLLM's fused_moe calls this "naive block assignment" and uses a matrix
instruction.

The result of a program depends only on its own token, not on the number of tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagewire.kernels._launch import await_predecessor, next_power_of_2, overlap_options
from pagewire.kernels.gated_silu import GatedSilu

_MOST_CHOSEN = 64  # experts of a token, whose sums a program has in registers
_ROW_BYTES = 512  # bytes of a tile's row: one read of a warp, so that sums stay within a warp
_ROWS = 16  # rows of a tile
_STAGES = 4
_WARPS = 4


@triton.jit
def _few_gate_up_kernel(
    x_ptr,  # [tokens, ins]
    chosen_ptr,  # [pairs] int32
    weight_ptr,  # [experts, 2 * inner, ins] contiguous
    bias_ptr,  # [experts, 2 * inner] contiguous
    out_ptr,  # [pairs, inner]
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
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    pair = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    wanted = columns < inner
    gates = columns * GATE_STEP
    ups = gates + (1 if UP_AFTER_GATE else inner)
    inputs = tl.arange(0, BLOCK_IN)
    gate_tile = weight_ptr + gates.to(tl.int64)[:, None] * ins + inputs[None, :]
    up_tile = weight_ptr + ups.to(tl.int64)[:, None] * ins + inputs[None, :]
    x_row = x_ptr + (pair // top_k).to(tl.int64) * x_stride + inputs
    await_predecessor(OVERLAPS)
    expert = tl.load(chosen_ptr + pair).to(tl.int64)
    start = expert * 2 * inner * ins
    gate = tl.zeros([BLOCK_OUT, BLOCK_IN], dtype=tl.float32)
    up = tl.zeros([BLOCK_OUT, BLOCK_IN], dtype=tl.float32)
    for first in tl.range(0, ins, BLOCK_IN, num_stages=STAGES):
        there = inputs < ins - first
        mask = wanted[:, None] & there[None, :]
        x = tl.load(x_row + first, mask=there, other=0.0).to(tl.float32)[None, :]
        gate += tl.load(gate_tile + start + first, mask=mask, other=0.0).to(tl.float32) * x
        up += tl.load(up_tile + start + first, mask=mask, other=0.0).to(tl.float32) * x
    gate_sum = tl.sum(gate, 1)
    up_sum = tl.sum(up, 1)
    if HAS_BIAS:
        bias = bias_ptr + expert * 2 * inner
        gate_sum += tl.load(bias + gates, mask=wanted, other=0.0).to(tl.float32)
        up_sum += tl.load(bias + ups, mask=wanted, other=0.0).to(tl.float32)
    if HAS_LIMIT:
        gate_sum = tl.minimum(gate_sum, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up_sum = tl.clamp(up_sum, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    result = gate_sum / (1.0 + tl.exp(-ALPHA * gate_sum)) * (up_sum + UP_OFFSET)
    out = out_ptr + pair.to(tl.int64) * inner + columns
    tl.store(out, result.to(out_ptr.dtype.element_ty), mask=wanted)


@triton.jit
def _few_down_kernel(
    x_ptr,  # [tokens, top_k, ins] contiguous
    chosen_ptr,  # [tokens, top_k] int32
    weights_ptr,  # [tokens, top_k] float32
    weight_ptr,  # [experts, outs, ins] contiguous
    bias_ptr,  # [experts, outs] contiguous
    out_ptr,  # [tokens, outs] contiguous
    ins,
    outs,
    TOP_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_CHOSEN: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    wanted = columns < outs
    choice = tl.arange(0, BLOCK_CHOSEN)
    is_one = choice < TOP_K
    inputs = tl.arange(0, BLOCK_IN)
    pairs = token * TOP_K + choice
    await_predecessor(OVERLAPS)
    expert = tl.load(chosen_ptr + pairs, mask=is_one, other=0).to(tl.int64)
    rows = expert[:, None] * outs + columns[None, :]  # of all experts' weights: [CHOSEN, OUT]
    seen = is_one[:, None] & wanted[None, :]
    tile = weight_ptr + rows[:, :, None] * ins + inputs[None, None, :]
    x_tile = x_ptr + pairs[:, None] * ins + inputs[None, :]
    acc = tl.zeros([BLOCK_CHOSEN, BLOCK_OUT, BLOCK_IN], dtype=tl.float32)
    for first in tl.range(0, ins, BLOCK_IN, num_stages=STAGES):
        there = inputs < ins - first
        x = tl.load(x_tile + first, mask=is_one[:, None] & there[None, :], other=0.0)
        weight = tl.load(tile + first, mask=seen[:, :, None] & there[None, None, :], other=0.0)
        acc += weight.to(tl.float32) * x.to(tl.float32)[:, None, :]
    outputs = tl.sum(acc, 2)
    if HAS_BIAS:
        outputs += tl.load(bias_ptr + rows, mask=seen, other=0.0).to(tl.float32)
    outputs = outputs.to(out_ptr.dtype.element_ty).to(tl.float32)
    weights = tl.load(weights_ptr + pairs, mask=is_one, other=0.0)
    total = tl.sum(outputs * weights[:, None], 0)
    out = out_ptr + token * outs + columns
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=wanted)


def are_few(tokens: int, top_k: int, num_experts: int) -> bool:
    """Return whether a step's tokens are so few that they rarely share an expert.

    It depends on shapes alone, so that one CUDA graph serves any routing. With half as many pairs
    as experts, a balanced routing has 1.24 pairs an expert that is chosen.
    """
    return top_k <= _MOST_CHOSEN and (tokens == 1 or 2 * tokens * top_k <= num_experts)


def few_experts(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    activation: GatedSilu,
    interleaved: bool,
) -> torch.Tensor:
    """Return what `pagewire.kernels.Experts` does, for tokens that `are_few`; there is one."""
    chosen = chosen.contiguous()
    inner = _gate_and_up(x, chosen, gate_up, gate_up_bias, activation, interleaved)
    return _project_down(inner, chosen, weights.contiguous(), down, down_bias)


def _gate_and_up(
    x: torch.Tensor,
    chosen: torch.Tensor,
    gate_up: torch.Tensor,
    bias: torch.Tensor | None,
    activation: GatedSilu,
    interleaved: bool,
) -> torch.Tensor:
    """Return the gated first projection, `[pairs, I]`."""
    (tokens, width), inner, top_k = x.shape, gate_up.shape[1] // 2, chosen.shape[1]
    out = torch.empty((tokens * top_k, inner), dtype=x.dtype, device=x.device)
    _few_gate_up_kernel[(tokens * top_k, triton.cdiv(inner, _ROWS))](
        x,
        chosen,
        gate_up,
        gate_up if bias is None else bias,
        out,
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
        BLOCK_OUT=_ROWS,
        BLOCK_IN=_ROW_BYTES // x.element_size(),
        STAGES=_STAGES,
        num_warps=_WARPS,
        **overlap_options(x.device, tokens),
    )
    return out


def _project_down(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    down: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Return the weighted sum of the second projection of `[pairs, I]`, `[T, H]`."""
    (outs, ins), (tokens, top_k) = down.shape[1:], chosen.shape
    block_chosen = next_power_of_2(top_k)
    block_out = max(_ROWS // block_chosen, 1)
    out = torch.empty((tokens, outs), dtype=x.dtype, device=x.device)
    _few_down_kernel[(tokens, triton.cdiv(outs, block_out))](
        x,
        chosen,
        weights,
        down,
        down if bias is None else bias,
        out,
        ins,
        outs,
        TOP_K=top_k,
        HAS_BIAS=bias is not None,
        BLOCK_CHOSEN=block_chosen,
        BLOCK_OUT=block_out,
        BLOCK_IN=_ROW_BYTES // x.element_size(),
        STAGES=_STAGES,
        num_warps=_WARPS,
        **overlap_options(x.device, tokens),
    )
    return out
