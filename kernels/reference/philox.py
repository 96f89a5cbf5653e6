"""Philox4x32-10 in int64 arithmetic: the random words of the sampling kernel, and their noise."""

from __future__ import annotations

import torch

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
# Noise values that are made at a time: what is computed on the way then stays in a core's cache.
_PART = 32768

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox(counter: Words, key: tuple[torch.Tensor, torch.Tensor]) -> Words:
    """Return the four words of Philox4x32-10, in the counter's memory.

    Args:
        counter: four words in `[0, 2**32)`, int64 tensors of one shape; they are overwritten.
        key: two words of the same kind, of this shape or one that broadcasts to it.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    high = torch.empty_like(c0)
    for _ in range(_ROUNDS):
        # int64 wraps, but its bits are right. The low halves of the products become words, whose
        # high halves are cleared where they are mixed.
        c0 *= _MULTIPLIERS[0]
        c2 *= _MULTIPLIERS[1]
        for word, product, part in ((c1, c2, k0), (c3, c0, k1)):
            word ^= torch.bitwise_right_shift(product, 32, out=high)
            word ^= part
            word &= _WORD
        c0, c1, c2, c3 = c1, c2, c3, c0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    c1 &= _WORD
    c3 &= _WORD
    return c0, c1, c2, c3


def gumbel_noise(
    seeds: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor
) -> torch.Tensor:
    """Return the Gumbel noise `[B, N]` float32 of tokens in each row.

    The uniform value is `1 - v`, where `v = (word + 1/2) / 2**32` is rounded to float32 and kept
    below 1: large noise comes from small `v`, where float32 is most precise. Logarithms are in
    float64, so that the rounded noise does not depend on how a vectorised loop splits the batch.

    Args:
        seeds: `[B]` int64.
        positions: `[B]` int64.
        token_ids: `[N]` int64.
    """
    rows, count = len(seeds), len(token_ids)
    key = ((seeds & _WORD)[:, None], ((seeds >> 32) & _WORD)[:, None])
    noise = torch.empty((rows, count), device=seeds.device)
    size = max(_PART // max(rows, 1), 1)
    for ids, out in zip(token_ids.split(size), noise.split(size, dim=1), strict=True):
        counter = torch.zeros((4, rows, len(ids)), dtype=torch.int64, device=seeds.device)
        counter[0] = ids
        counter[1] = (positions & _WORD)[:, None]
        c0, c1, c2, c3 = counter
        word = philox((c0, c1, c2, c3), key)[0].to(torch.float32)
        v = word.mul_(2.0**-32).add_(2.0**-33).clamp_(max=1.0 - 2.0**-24)
        exponential = v.double().neg_().log1p_().neg_()
        out.copy_(exponential.log_().neg_())
    return noise
