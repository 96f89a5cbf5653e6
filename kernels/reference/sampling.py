"""Sampling in plain torch, with the noise of `philox.py`.

Rows of a large vocabulary are drawn one by one: their candidates are found first, by a sort only
for top-p, and only these get noise.
"""

from __future__ import annotations

import numpy as np
import torch

from pagewire.kernels.reference.philox import gumbel_noise
from pagewire.kernels.sampling_signatures import Limits

_LARGEST = torch.finfo(torch.float32).max
# Rows of a small vocabulary are drawn together: launching the operations takes longer than they do.
_SMALL_VOCABULARY = 4096


def thresholds(scores: torch.Tensor, limits: Limits) -> torch.Tensor:
    """Return the smallest score of each row's candidates, `[N, 1]`.

    Top-k and min-p limit the candidates first, and top-p those that are left. This is the plain
    formula for many rows at once, on any device, which waits for nothing.

    Args:
        scores: [N, V] float32.
        limits: of the N rows.
    """
    vocab_size = scores.shape[1]
    top_k = limits.top_k
    ordered = scores.sort(dim=-1, descending=True).values
    k = torch.where((top_k > 0) & (top_k < vocab_size), top_k, vocab_size).long()
    threshold = ordered.gather(1, (k - 1)[:, None])
    threshold = torch.maximum(threshold, ordered[:, :1] + _below_highest(limits)[:, None])
    return _limit_mass(ordered, threshold, limits)


def _below_highest(limits: Limits) -> torch.Tensor:
    """Return how far below the highest score min-p's threshold is, `[N]`, at most 0."""
    return limits.min_p.log() * limits.temperature


def _limit_mass(ordered: torch.Tensor, threshold: torch.Tensor, limits: Limits) -> torch.Tensor:
    """Return the thresholds `[N, 1]` after top-p.

    Args:
        ordered: [N, M] the largest scores, in descending order, at least those not below threshold.
        threshold: [N, 1] of top-k and min-p.
        limits: of the N rows.
    """
    temperature, top_p = limits.temperature[:, None], limits.top_p[:, None]
    scaled = (ordered - ordered[:, :1]).double() / temperature.double()
    mass = scaled.exp_().masked_fill_(ordered < threshold, 0.0)
    mass_before = mass.cumsum(-1).sub_(mass)
    limit = top_p.double() * mass.sum(-1, keepdim=True)
    kept = (mass_before < limit).sum(-1, keepdim=True).clamp_(min=1)
    by_mass = ordered.gather(1, kept - 1)
    return torch.where(top_p < 1.0, torch.maximum(threshold, by_mass), threshold)


def _descending(scores: torch.Tensor) -> torch.Tensor:
    """Return scores `[M]` in descending order; numpy sorts them in a third of torch's time."""
    if scores.device.type != "cpu":
        return scores.sort(descending=True).values
    return torch.from_numpy(np.sort(scores.numpy())).flip(0)


def _candidates(scores: torch.Tensor, limits: Limits) -> torch.Tensor:
    """Return the ids of one row's candidates, in ascending order.

    Args:
        scores: [V] float32.
        limits: of the row.
    """
    top_k = int(limits.top_k)
    threshold = scores.amax() + _below_highest(limits)
    if 0 < top_k < len(scores):
        threshold = torch.maximum(threshold, scores.topk(top_k, sorted=False).values.amin())
    if limits.top_p < 1.0:
        left = scores if threshold == -torch.inf else scores[scores >= threshold]
        threshold = _limit_mass(_descending(left)[None], threshold[None], limits)[0]
    if threshold == -torch.inf:
        return torch.arange(len(scores), device=scores.device)
    return (scores >= threshold).nonzero()[:, 0]


def _draw_together(
    scores: torch.Tensor, limits: Limits, seeds: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Return a token for each row, `[N]`, with noise for the whole vocabulary."""
    vocab_size = scores.shape[1]
    token_ids = torch.arange(vocab_size, device=scores.device)
    perturbed = (scores - scores.amax(-1, keepdim=True)) / limits.temperature[:, None]
    perturbed += gumbel_noise(seeds, positions, token_ids)
    limited = limits.are_set(vocab_size).nonzero()[:, 0]
    if limited.numel():
        rows = scores[limited]
        threshold = thresholds(rows, limits.of_rows(limited))
        perturbed[limited] = perturbed[limited].masked_fill(rows < threshold, -torch.inf)
    return perturbed.argmax(-1)


def _draw_alone(
    scores: torch.Tensor, limits: Limits, seeds: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Return the token of a single row, `[1]`, with noise for its candidates alone."""
    row = scores[0]
    ids = _candidates(row, limits)
    own = row[ids]
    perturbed = (own - row.amax()) / limits.temperature
    perturbed += gumbel_noise(seeds, positions, ids)[0]
    return ids[perturbed.argmax()][None]


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return one token per row: greedy at temperature 0, else drawn by the Gumbel-max trick.

    Shapes and meaning are those of `pagewire.kernels.Sample`. NaN counts as -inf.
    """
    scores = logits.float().nan_to_num(nan=-torch.inf, posinf=_LARGEST, neginf=-torch.inf)
    tokens = scores.argmax(-1)
    random = (temperature > 0).nonzero()[:, 0]
    limits = Limits(temperature, top_k, top_p, min_p)
    is_small = logits.shape[1] <= _SMALL_VOCABULARY
    draw, size = (_draw_together, len(random)) if is_small else (_draw_alone, 1)
    for rows in random.split(size) if len(random) else ():
        tokens[rows] = draw(scores[rows], limits.of_rows(rows), seeds[rows], positions[rows])
    return tokens if out is None else out.copy_(tokens)
