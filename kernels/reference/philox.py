"""Philox4x32-10 in int64 arithmetic: the random words of the sampling kernel, and their noise."""

from __future__ import annotations

import torch

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _multiply(multiplier: int, word: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the high and low words of a product; int64 wraps, but its bits are right."""
    product = word * multiplier
    return (product >> 32).bitwise_and_(_WORD), product.bitwise_and_(_WORD)


def philox(counter: Words, key: tuple[torch.Tensor, torch.Tensor]) -> Words:
    """Return the four words of Philox4x32-10.

    Args:
        counter: four words, int64 tensors in `[0, 2**32)` that broadcast together.
        key: two words of the same kind.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(_MULTIPLIERS[0], c0)
        high1, low1 = _multiply(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return the Gumbel noise `[B, V]` float32 of every token of each row.

    The uniform value is `1 - v`, where `v = (word + 1/2) / 2**32` is rounded to float32 and kept
    below 1: large noise comes from small `v`, where float32 is most precise. Logarithms are in
    float64, so that the rounded noise does not depend on how a vectorised loop splits the batch.

    Args:
        seeds: `[B]` int64.
        positions: `[B]` int64.
        vocab_size: V.
    """
    token_ids = torch.arange(vocab_size, dtype=torch.int64, device=seeds.device)[None]
    zero = torch.zeros((), dtype=torch.int64, device=seeds.device)
    counter = (token_ids, (positions & _WORD)[:, None], zero, zero)
    key = ((seeds & _WORD)[:, None], ((seeds >> 32) & _WORD)[:, None])
    word = philox(counter, key)[0].to(torch.float32)
    v = (word * 2.0**-32 + 2.0**-33).clamp_(max=1.0 - 2.0**-24)
    exponential = torch.log1p(v.double().neg_()).neg_()
    return exponential.log_().neg_().float()
