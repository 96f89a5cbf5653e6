"""Logits after temperature and limits, as sampling saw them, in plain torch on any device.

For `logprobs_mode: processed`. Few requests ask for it: sorting the rows is fast enough, without a
kernel.
"""

from __future__ import annotations

import torch

from pagewire.kernels.reference.sampling import thresholds
from pagewire.kernels.sampling_signatures import Limits

_LARGEST = torch.finfo(torch.float32).max


def processed_logits(logits: torch.Tensor, tokens: torch.Tensor, limits: Limits) -> torch.Tensor:
    """Return logits divided by their temperature, -inf for tokens that were not candidates.

    A greedy row keeps its logits: its temperature counts as 1, and it has no limits. The token
    that was drawn is always a candidate, however another backend rounds.

    Args:
        logits: [N, V], as `ShapeLogits` returns them, or raw logits of a row without shaping.
        tokens: [N] int64, the tokens that were drawn.
        limits: of the N rows.

    Returns:
        [N, V] float32; the largest of a row is 0.
    """
    scores = logits.float().nan_to_num(nan=-torch.inf, posinf=_LARGEST, neginf=-torch.inf)
    is_greedy = limits.temperature <= 0
    temperature = torch.where(is_greedy, 1.0, limits.temperature)
    lowest = thresholds(scores, limits._replace(temperature=temperature))
    lowest = torch.minimum(lowest, scores.gather(1, tokens[:, None]))
    lowest = torch.where(is_greedy[:, None], -torch.inf, lowest)
    scaled = (scores - scores.amax(-1, keepdim=True)) / temperature[:, None]
    return scaled.masked_fill(scores < lowest, -torch.inf)
