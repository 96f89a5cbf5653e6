"""Sampling in plain torch: thresholds by sorting, noise by Philox in int64."""

from __future__ import annotations

import torch

from pagewire.kernels.reference.philox import gumbel_noise
from pagewire.kernels.sampling_signatures import Limits

_LARGEST = torch.finfo(torch.float32).max


def thresholds(scores: torch.Tensor, limits: Limits) -> torch.Tensor:
    """Return the smallest score of each row's candidates, `[N, 1]`.

    Top-k and min-p limit the candidates first, and top-p those that are left.

    Args:
        scores: [N, V] float32.
        limits: of the N rows.
    """
    temperature, top_k, top_p, min_p = limits
    vocab_size = scores.shape[1]
    ordered = scores.sort(dim=-1, descending=True).values
    k = torch.where((top_k > 0) & (top_k < vocab_size), top_k, vocab_size).long()
    threshold = ordered.gather(1, (k - 1)[:, None])
    # The logarithm of a min_p of 0 is -inf, which limits nothing.
    threshold = torch.maximum(threshold, ordered[:, :1] + (min_p.log() * temperature)[:, None])
    scaled = (ordered - ordered[:, :1]).double() / temperature[:, None].double()
    mass = scaled.exp_().masked_fill_(ordered < threshold, 0.0)
    mass_before = mass.cumsum(-1).sub_(mass)
    limit = top_p[:, None].double() * mass.sum(-1, keepdim=True)
    kept = (mass_before < limit).sum(-1, keepdim=True).clamp_(min=1)
    by_mass = ordered.gather(1, kept - 1)
    return torch.where(top_p[:, None] < 1.0, torch.maximum(threshold, by_mass), threshold)


def _draw(
    scores: torch.Tensor, limits: Limits, seeds: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Return one drawn token per row, `[N]`, by the Gumbel-max trick; temperatures are above 0."""
    vocab_size = scores.shape[1]
    perturbed = (scores - scores.amax(-1, keepdim=True)) / limits.temperature[:, None]
    perturbed += gumbel_noise(seeds, positions, vocab_size)
    limited = limits.are_set(vocab_size).nonzero()[:, 0]
    if limited.numel():
        rows = scores[limited]
        threshold = thresholds(rows, limits.of_rows(limited))
        perturbed[limited] = perturbed[limited].masked_fill(rows < threshold, -torch.inf)
    return perturbed.argmax(-1)


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

    Shapes and meaning are those of `pagewire.kernels.Sample`. NaN counts as -inf. Noise is computed
    only for random rows, and scores are sorted only in rows with min-p, top-k or top-p.
    """
    scores = logits.float().nan_to_num(nan=-torch.inf, posinf=_LARGEST, neginf=-torch.inf)
    tokens = scores.argmax(-1)
    random = (temperature > 0).nonzero()[:, 0]
    if random.numel():
        limits = Limits(temperature, top_k, top_p, min_p).of_rows(random)
        tokens[random] = _draw(scores[random], limits, seeds[random], positions[random])
    return tokens if out is None else out.copy_(tokens)
