"""Chooses the experts of each token, in plain torch of static shapes."""

from __future__ import annotations

import torch

from pagewire.kernels.routing import Routing
from pagewire.kernels.sigmoid import sigmoid


def route(
    logits: torch.Tensor, routing: Routing, correction: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the experts of each token, `[T, K]` int32, and their weights, `[T, K]` float32.

    Shapes are those of `pagewire.kernels.Route`.
    """
    wide = logits.float()
    scores = wide.softmax(dim=-1) if routing.scores == "softmax" else sigmoid(wide)
    # A softmax keeps the order of its logits, and rounds some that differ to the same score.
    ordered_by_logits = (
        routing.scores == "softmax" and correction is None and routing.group_score == "best"
    )
    candidates = wide if ordered_by_logits else scores
    if correction is not None:
        candidates = candidates + correction
    candidates = candidates.masked_fill(candidates.isnan(), -torch.inf)
    if routing.groups > 1:
        candidates = _within_best_groups(candidates, routing)
    chosen = _best(candidates, routing.top_k)
    weights = scores.gather(1, chosen)
    if routing.renormalise:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return chosen.int(), weights * routing.scale


def _best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Return the columns of the highest scores `[T, count]`; of equal ones the first columns.

    `torch.topk` leaves open which of equal scores it returns.
    """
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def _within_best_groups(candidates: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Return scores [T, E] that are -inf outside of each token's best groups."""
    by_group = candidates.unflatten(1, (routing.groups, -1))
    if routing.group_score == "best":
        group_scores = by_group.amax(dim=-1)
    else:
        group_scores = by_group.topk(2, dim=-1).values.sum(dim=-1)
    best = _best(group_scores, routing.top_groups)
    is_out = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, best, False)
    within: torch.Tensor = by_group.masked_fill(is_out.unsqueeze(-1), -torch.inf)
    return within.flatten(1)
