"""Which experts each token has: plain torch of static shapes, which a CUDA graph captures."""

from __future__ import annotations

import torch

from pagewire.shared.model.experts_config import Routing


def route(
    logits: torch.Tensor, routing: Routing, correction: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the experts of each token, `[T, K]` int32, and their weights, `[T, K]` float32.

    Args:
        logits: of the router, [T, E].
        routing: the rule.
        correction: [E] float32, added to scores for the choice alone.
    """
    wide = logits.float()
    scores = wide.softmax(dim=-1) if routing.scores == "softmax" else wide.sigmoid()
    candidates = scores if correction is None else scores + correction
    if routing.groups > 1:
        candidates = _within_best_groups(candidates, routing)
    chosen = candidates.topk(routing.top_k, dim=-1).indices
    weights = scores.gather(1, chosen)
    if routing.renormalise:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    if routing.scale != 1.0:
        weights = weights * routing.scale
    return chosen.int(), weights


def _within_best_groups(candidates: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Return scores [T, E] that are -inf outside of each token's best groups."""
    by_group = candidates.unflatten(1, (routing.groups, -1))
    if routing.group_score == "best":
        group_scores = by_group.amax(dim=-1)
    else:
        group_scores = by_group.topk(2, dim=-1).values.sum(dim=-1)
    best = group_scores.topk(routing.top_groups, dim=-1).indices
    is_out = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, best, False)
    within: torch.Tensor = by_group.masked_fill(is_out.unsqueeze(-1), -torch.inf)
    return within.flatten(1)
