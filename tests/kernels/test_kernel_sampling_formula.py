"""Tokens of the reference against the formula of `pagewire.kernels.Sample`, row by row."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch

from pagewire.kernels.bench.inputs import peaked_logits, sampling_inputs

_WORD = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
# Rows of the first four are drawn together, the others alone; noise of the last has two parts.
VOCABULARIES = [1, 2, 300, 4096, 4097, 40_001]
LOGITS = {
    "noise": torch.randn,
    "flat": lambda rows, vocab: torch.randn(rows, vocab) / 10,
    "peaked": peaked_logits,
    "bfloat16": lambda rows, vocab: (3 * torch.randn(rows, vocab)).bfloat16(),
    "equal": lambda rows, vocab: torch.full((rows, vocab), -2.5),
    "few": lambda rows, vocab: torch.randn(rows, vocab).masked_fill(
        torch.arange(vocab) % 100 > 0, -math.inf
    ),
}


def _words(token_ids, position, seed):
    """Return word 0 of Philox4x32-10, as its authors write it."""
    c0, c1 = token_ids.astype(np.uint64), np.full(len(token_ids), position, np.uint64)
    c2 = c3 = np.zeros(len(token_ids), np.uint64)
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF
    for _ in range(10):
        product0, product1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1 = (product1 >> _HALF) ^ c1 ^ np.uint64(k0), product1 & _WORD
        c2, c3 = (product0 >> _HALF) ^ c3 ^ np.uint64(k1), product0 & _WORD
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0


def _noise(token_ids, position, seed):
    v = _words(token_ids, position, seed).astype(np.float32) * np.float32(2**-32)
    v = np.minimum(v + np.float32(2**-33), np.float32(1 - 2**-24)).astype(np.float64)
    return (-np.log(-np.log1p(-v))).astype(np.float32)


def _token(logits, temperature, top_k, top_p, min_p, seed, position):
    """Return the token of one row: all scores sorted, all tokens with noise."""
    scores = logits.float().numpy()
    if temperature == 0:
        return int(scores.argmax())
    ordered = np.sort(scores)[::-1]
    threshold = -np.inf
    if 0 < top_k < len(scores):
        threshold = ordered[top_k - 1]
    if min_p > 0:
        below = torch.tensor([min_p]).log() * temperature
        threshold = max(threshold, ordered[0] + below.numpy()[0])
    if top_p < 1:
        mass = np.exp((ordered - ordered[0]).astype(np.float64) / float(temperature))
        mass[ordered < threshold] = 0
        before = mass.cumsum() - mass
        count = max(1, int((before < float(top_p) * mass.sum()).sum()))
        threshold = max(threshold, ordered[count - 1])
    perturbed = (scores - ordered[0]) / temperature + _noise(np.arange(len(scores)), position, seed)
    return int(np.where(scores < threshold, -np.inf, perturbed).argmax())


@pytest.mark.parametrize("make", LOGITS.values(), ids=LOGITS)
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_tokens_are_those_of_the_formula(vocab, make, reference):
    rows, chance = 16, random.Random(vocab)
    x = sampling_inputs(
        make(rows, vocab),
        temperature=chance.choices([0.0, 0.3, 1.0, 1.3, 5.0], k=rows),
        top_k=chance.choices([0, 0, 1, 2, 50, 1000, vocab, vocab + 9], k=rows),
        top_p=chance.choices([1.0, 1.0, 0.999, 0.9, 0.3, 1e-6], k=rows),
        min_p=chance.choices([0.0, 0.0, 0.001, 0.05, 1.0], k=rows),
        first_seed=chance.randrange(-(2**62), 2**62),
    )
    columns = (column.numpy() for column in x[1:])
    expected = [_token(logits, *row) for logits, *row in zip(x.logits, *columns, strict=True)]
    assert reference.sample(*x).tolist() == expected
