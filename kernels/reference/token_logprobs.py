"""Log probabilities of tokens in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

_LARGEST = torch.finfo(torch.float32).max
_PART = 4096  # scores that are added up at a time


def token_logprobs(
    logits: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor, top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return token ids, their log probabilities, and the ranks of the sampled tokens.

    Shapes and meaning are those of `pagewire.kernels.TokenLogprobs`.
    """
    scores = logits[rows].float()
    scores = scores.nan_to_num_(nan=-torch.inf, posinf=_LARGEST, neginf=-torch.inf)
    chosen = tokens[rows][:, None]
    is_known = (chosen >= 0) & (chosen < scores.shape[1])
    score = scores.gather(1, chosen.where(is_known, 0)).masked_fill_(~is_known, -torch.inf)
    ranks = (scores > score).sum(-1, dtype=torch.int32) + 1
    likely = _most_likely(scores, top)
    ids = torch.cat([chosen, likely], dim=1)
    values = torch.cat([score, scores.gather(1, likely)], dim=1)
    # A finite maximum, so that -inf minus it is -inf.
    highest = scores.amax(-1, keepdim=True).clamp_(min=-_LARGEST)
    # The highest score's own share is 1, unless all scores are -inf.
    log_sum = _sums((scores - highest).exp_()).clamp_(min=1.0).log_()
    logprobs = values - highest - log_sum
    return ids.to(torch.int32), logprobs, ranks.to(torch.int32)


def _sums(shares: torch.Tensor) -> torch.Tensor:
    """Return the sum of each row of `[N, V]`, `[N, 1]`, with the same bits in any batch.

    Torch would split a long row among threads if it is the only one. Parts are too short for that.
    """
    parts: torch.Tensor = F.pad(shares, (0, -shares.shape[1] % _PART)).unflatten(1, (-1, _PART))
    return parts.sum(-1).sum(-1, keepdim=True)


def _most_likely(scores: torch.Tensor, top: int) -> torch.Tensor:
    """Return the ids of the highest scores [N, top], of equal ones the lowest ids first."""
    bits = (scores + 0.0).view(torch.int32).long()  # -0 equals 0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    # `topk` leaves the order of equal keys open, so the ids make all keys different.
    ids = torch.arange(scores.shape[1], device=scores.device)
    return ((ordered << 32) | (0x7FFFFFFF - ids)).topk(top, dim=-1).indices
