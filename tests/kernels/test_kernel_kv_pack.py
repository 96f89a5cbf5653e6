"""Packing of KV blocks: copies exact, checksums as documented."""

from __future__ import annotations

import pytest
import torch

WORD_COUNTS = [1, 4, 123, 2048, 2049, 8192, 20000]


def _checksum(words):
    total = sum(
        word * ((index * 0x9E3779B97F4A7C15) | 1) for index, word in enumerate(words.tolist())
    )
    total %= 2**64
    return total - 2**64 if total >= 2**63 else total


def _random_pool(blocks, words, device):
    return torch.randint(-(2**31), 2**31 - 1, (blocks, words), dtype=torch.int32, device=device)


@pytest.mark.parametrize("words", [1, 7, 1000])
def test_reference_checksum_is_the_documented_one(words, reference):
    pool = _random_pool(3, words, "cpu")
    ids = torch.tensor([2, 0])
    sums = reference.pack_blocks(pool, ids, torch.empty(2 * words * 4, dtype=torch.uint8))
    assert sums.tolist() == [_checksum(pool[2]), _checksum(pool[0])]


@pytest.mark.parametrize("words", WORD_COUNTS)
def test_pack_matches_reference(words, device, kernels, reference):
    pool = _random_pool(5, words, device)
    ids = torch.tensor([4, 0, 3], device=device)
    staging = torch.full((3 * words * 4 + 8,), 9, dtype=torch.uint8, device=device)
    expected = staging.clone()
    sums = kernels.pack_blocks(pool, ids, staging)
    assert torch.equal(sums, reference.pack_blocks(pool, ids, expected))
    assert torch.equal(staging, expected)
    assert torch.equal(staging[: words * 4].view(torch.int32), pool[4])
    assert (staging[-8:] == 9).all()


@pytest.mark.parametrize("words", WORD_COUNTS)
def test_unpack_matches_reference(words, device, kernels, reference):
    staged = _random_pool(3, words, device)
    staging = staged.view(torch.uint8).view(-1)
    pool = torch.full((5, words), 7, dtype=torch.int32, device=device)
    expected = pool.clone()
    ids = torch.tensor([4, -1, 1], device=device)
    sums = kernels.unpack_blocks(staging, pool, ids)
    assert torch.equal(sums, reference.unpack_blocks(staging, expected, ids))
    assert torch.equal(pool, expected)
    assert torch.equal(pool[1], staged[2])
    assert (pool[[0, 2, 3]] == 7).all()


def test_round_trip_of_half_precision_blocks(device, kernels):
    pool = torch.randn(6, 2, 2, 3, 16, 16, device=device).half()
    staging = torch.zeros(3 * pool[0].numel() * 2, dtype=torch.uint8, device=device)
    target = torch.zeros_like(pool)
    sent = kernels.pack_blocks(pool, torch.tensor([5, 1, 2], device=device), staging)
    received = kernels.unpack_blocks(staging, target, torch.tensor([0, 3, 4], device=device))
    assert torch.equal(sent, received)
    assert torch.equal(target[[0, 3, 4]], pool[[5, 1, 2]])


def test_checksum_sees_a_changed_bit_and_swapped_words(device, kernels):
    words = _random_pool(1, 3000, device)
    staging = words.view(torch.uint8).view(-1)
    check_only = torch.tensor([-1], device=device)
    pool = torch.zeros_like(words)
    clean = kernels.unpack_blocks(staging, pool, check_only)
    for bit in (0, 7):
        damaged = staging.clone()
        damaged[2999 * 4] ^= 1 << bit
        assert kernels.unpack_blocks(damaged, pool, check_only) != clean
    swapped = words[:, torch.tensor([1, 0, *range(2, 3000)], device=device)]
    moved = swapped.contiguous().view(torch.uint8).view(-1)
    assert kernels.unpack_blocks(moved, pool, check_only) != clean
    assert not pool.any()


def test_packing_nothing(device, kernels):
    pool = torch.zeros(2, 8, dtype=torch.int32, device=device)
    ids = torch.zeros(0, dtype=torch.int64, device=device)
    assert kernels.pack_blocks(pool, ids, pool.view(torch.uint8).view(-1)).shape == (0,)


@pytest.mark.gpu
def test_pack_of_8b_blocks(kernels, reference):
    pool = _random_pool(100, 1 << 19, "cuda")
    ids = torch.randperm(100, device="cuda")[:64]
    staging = torch.empty(64 << 21, dtype=torch.uint8, device="cuda")
    expected = torch.empty_like(staging)
    sums = kernels.pack_blocks(pool, ids, staging)
    assert torch.equal(sums, reference.pack_blocks(pool, ids, expected))
    assert torch.equal(staging, expected)
