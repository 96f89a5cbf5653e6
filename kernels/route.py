# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Chooses the experts of each token in one launch: a program per token, logits in registers.

The best experts are found one after another, by the maximum of their keys (`_score_keys.py`). For
any logits, a token has K different experts from 0 to E - 1, and equal scores are ordered by expert
number. torch.topk, which Hugging Face's models use, has no defined order of equal scores.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagewire.kernels._launch import await_predecessor, next_power_of_2, overlap_options
from pagewire.kernels._score_keys import id_of, score_of, to_keys
from pagewire.kernels.errors import UnsupportedShapeError
from pagewire.kernels.routing import Routing

_MOST_SCORES = 1 << 15  # scores of a program, padded
_SCORES_OF_A_WARP = 256
_TAKEN = tl.constexpr(-(1 << 63))  # below the key of any score


@triton.jit
def _to_scores(logits, highest, total, SOFTMAX: tl.constexpr):
    return tl.exp(logits - highest) / total if SOFTMAX else 1.0 / (1.0 + tl.exp(-logits))


@triton.jit
def _route_kernel(
    logits_ptr,  # [tokens, experts]
    correction_ptr,  # [experts] float32
    chosen_ptr,  # [tokens, top_k] int32
    weights_ptr,  # [tokens, top_k] float32
    stride,
    scale,
    OF_GROUP: tl.constexpr,  # experts of a group
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    TOP_K: tl.constexpr,
    SOFTMAX: tl.constexpr,  # else a sigmoid
    CORRECTED: tl.constexpr,
    BEST_TWO: tl.constexpr,
    RENORMALISE: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_CHOSEN: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, BLOCK_GROUPS)
    place = tl.arange(0, BLOCK)
    expert = group[:, None] * OF_GROUP + place[None, :]
    exists = (group < GROUPS)[:, None] & (place < OF_GROUP)[None, :]
    row = logits_ptr + token * stride
    await_predecessor(OVERLAPS)
    candidates = tl.load(row + expert, mask=exists, other=-float("inf")).to(tl.float32)
    highest, total = 0.0, 1.0
    if SOFTMAX:
        highest = tl.max(tl.max(candidates, 1), 0)
        total = tl.sum(tl.sum(tl.exp(candidates - highest), 1), 0)
    if CORRECTED or BEST_TWO or not SOFTMAX:  # a softmax keeps the order of its logits
        candidates = _to_scores(candidates, highest, total, SOFTMAX)
    if CORRECTED:
        candidates += tl.load(correction_ptr + expert, mask=exists, other=0.0)
    candidates = tl.where(candidates == candidates, candidates, -float("inf"))
    keys = tl.where(exists, to_keys(candidates, expert), _TAKEN)
    if GROUPS > 1:
        best = tl.max(keys, 1)
        scores = score_of(best)
        if BEST_TWO:
            scores += score_of(tl.max(tl.where(keys == best[:, None], _TAKEN, keys), 1))
        group_keys = tl.where(group < GROUPS, to_keys(scores, group), _TAKEN)
        is_in = group < 0
        for _ in range(TOP_GROUPS):
            found = group_keys == tl.max(group_keys, 0)
            is_in = is_in | found
            group_keys = tl.where(found, _TAKEN, group_keys)
        candidates = tl.where(is_in[:, None], candidates, -float("inf"))
        keys = tl.where(exists, to_keys(candidates, expert), _TAKEN)
    choice = tl.arange(0, BLOCK_CHOSEN)
    chosen = tl.zeros([BLOCK_CHOSEN], dtype=tl.int32)
    for n in range(TOP_K):
        key = tl.max(tl.max(keys, 1), 0)
        chosen = tl.where(choice == n, id_of(key), chosen)
        keys = tl.where(keys == key, _TAKEN, keys)
    wanted = choice < TOP_K
    logits = tl.load(row + chosen, mask=wanted, other=-float("inf")).to(tl.float32)
    weights = _to_scores(logits, highest, total, SOFTMAX)
    if RENORMALISE:
        weights = weights / (tl.sum(weights, 0) + 1e-20)
    tl.store(chosen_ptr + token * TOP_K + choice, chosen, mask=wanted)
    tl.store(weights_ptr + token * TOP_K + choice, weights * scale, mask=wanted)


def route(
    logits: torch.Tensor, routing: Routing, correction: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the experts of each token, `[T, K]` int32, and their weights, `[T, K]` float32.

    Shapes are those of `pagewire.kernels.Route`.

    Raises:
        UnsupportedShapeError: there are too many experts, or logits or correction have gaps.
    """
    tokens, num_experts = logits.shape
    of_group = num_experts // routing.groups
    block_groups, block = next_power_of_2(routing.groups), next_power_of_2(of_group)
    if block_groups * block > _MOST_SCORES:
        raise UnsupportedShapeError(
            f"{num_experts} experts in groups of {of_group}: routing takes {_MOST_SCORES} at most, "
            "both numbers rounded up to powers of two"
        )
    if logits.stride(1) != 1 or not (correction is None or correction.is_contiguous()):
        raise UnsupportedShapeError("routing needs logits and a correction of stride 1")
    chosen = torch.empty((tokens, routing.top_k), dtype=torch.int32, device=logits.device)
    weights = torch.empty((tokens, routing.top_k), dtype=torch.float32, device=logits.device)
    if tokens == 0:
        return chosen, weights
    _route_kernel[(tokens,)](
        logits,
        logits if correction is None else correction,
        chosen,
        weights,
        logits.stride(0),
        routing.scale,
        OF_GROUP=of_group,
        GROUPS=routing.groups,
        TOP_GROUPS=routing.top_groups,
        TOP_K=routing.top_k,
        SOFTMAX=routing.scores == "softmax",
        CORRECTED=correction is not None,
        BEST_TWO=routing.group_score == "best two",
        RENORMALISE=routing.renormalise,
        BLOCK_GROUPS=block_groups,
        BLOCK=block,
        BLOCK_CHOSEN=next_power_of_2(routing.top_k),
        num_warps=min(max(block_groups * block // _SCORES_OF_A_WARP, 1), 32),
        **overlap_options(logits.device, tokens),
    )
    return chosen, weights
