"""Packing of KV blocks: copies exact, checksums as documented."""

from __future__ import annotations

import pytest
import torch

from pagewire.kernels.errors import UnsupportedShapeError
from pagewire.kernels.kv_staging import empty_copy_list, fill_copy_list, packed_bytes, staging_views

WORD_COUNTS = [2, 4, 122, 2048, 2050, 8192, 20000]
SEED = -(2**62) - 12345


def _sum(words):
    """The documented checksum of a block of words, plus the seed."""
    total = SEED + sum(
        word * ((index * 0x9E3779B97F4A7C15) | 1) for index, word in enumerate(words.tolist())
    )
    total %= 2**64
    return total - 2**64 if total >= 2**63 else total


def _random_pool(blocks, words, device):
    return torch.randint(-(2**31), 2**31 - 1, (blocks, words), dtype=torch.int32, device=device)


def _staging_for(blocks, words, device):
    return torch.full((packed_bytes(blocks, 4 * words) + 8,), 9, dtype=torch.uint8, device=device)


def _copy_list(ids, device, capacity=None):
    """The copy list of these blocks, with garbage after it."""
    copy_list = torch.full_like(empty_copy_list(capacity or len(ids)), 10**9)
    fill_copy_list(copy_list.numpy(), ids, SEED)
    return copy_list.to(device)


def _is_corrupt(ops, staging, pool, copy_list):
    """Unpack, and return whether a block was corrupt."""
    corrupt = torch.zeros((), dtype=torch.int64, device=staging.device)
    ops.unpack_blocks(staging, pool, copy_list, corrupt)
    return bool(corrupt)


def _packed(blocks, ops):
    """Staging that holds these blocks `[N, words]`."""
    staging = _staging_for(len(blocks), blocks.shape[1], blocks.device)
    ops.pack_blocks(blocks, _copy_list(range(len(blocks)), blocks.device), staging)
    return staging


@pytest.mark.parametrize("words", [2, 6, 1000])
def test_reference_checksum_is_the_documented_one(words, reference):
    pool = _random_pool(3, words, "cpu")
    staging = _staging_for(2, words, "cpu")
    reference.pack_blocks(pool, _copy_list([2, 0], "cpu"), staging)
    _, sums = staging_views(staging, 2, words)
    assert sums.tolist() == [_sum(pool[2]), _sum(pool[0])]


@pytest.mark.parametrize("capacity", [3, 4, 9])
@pytest.mark.parametrize("words", WORD_COUNTS)
def test_pack_matches_reference(words, capacity, device, kernels, reference):
    pool = _random_pool(5, words, device)
    copy_list = _copy_list([4, 0, 3], device, capacity)
    staging = _staging_for(capacity, words, device)
    expected = staging.clone()
    kernels.pack_blocks(pool, copy_list, staging)
    reference.pack_blocks(pool, copy_list, expected)
    assert torch.equal(staging, expected)
    assert torch.equal(staging[: words * 4].view(torch.int32), pool[4])
    assert (staging[-8:] == 9).all()


@pytest.mark.parametrize("words", WORD_COUNTS)
def test_unpack_matches_reference(words, device, kernels, reference):
    staged = _random_pool(3, words, device)
    staging = _packed(staged, reference)
    staging[0] ^= 1
    staging[4 * words] ^= 1  # in the block that is only checked
    room = _staging_for(5, words, device)
    room[: len(staging)] = staging
    before = room.clone()
    pool = torch.full((5, words), 7, dtype=torch.int32, device=device)
    expected = pool.clone()
    copy_list = _copy_list([4, -1, 1], device, capacity=5)
    assert _is_corrupt(kernels, room, pool, copy_list)
    assert _is_corrupt(reference, room, expected, copy_list)
    assert torch.equal(room, before)
    assert torch.equal(pool, expected)
    assert torch.equal(pool[1], staged[2])
    assert (pool[[0, 2, 3]] == 7).all()


@pytest.mark.parametrize("corrupt", [None, 0, 39])
def test_a_program_takes_several_blocks(corrupt, device, kernels, reference):
    pool, target = _random_pool(50, 4, device), torch.zeros(50, 4, dtype=torch.int32, device=device)
    copy_list = _copy_list(torch.randperm(50)[:40].tolist(), device, capacity=45)
    staging, expected = _staging_for(45, 4, device), _staging_for(45, 4, device)
    kernels.pack_blocks(pool, copy_list, staging)
    reference.pack_blocks(pool, copy_list, expected)
    assert torch.equal(staging, expected)
    if corrupt is not None:
        staging[16 * corrupt] ^= 1
    assert _is_corrupt(kernels, staging, target, copy_list) == (corrupt is not None)
    moved = copy_list[2:42]
    assert (target[moved] != pool[moved]).any(dim=1).sum() == (corrupt is not None)


def test_what_is_intact_leaves_an_earlier_report_alone(device, kernels, reference):
    pool = _random_pool(3, 10, device)
    staging = _packed(pool, reference)
    for ops in (kernels, reference):
        corrupt = torch.ones((), dtype=torch.int64, device=device)
        ops.unpack_blocks(staging, pool, _copy_list([0, 1, 2], device), corrupt)
        assert corrupt.item() == 1


def test_round_trip_of_half_precision_blocks(device, kernels):
    pool = torch.randn(6, 2, 2, 3, 16, 16, device=device).half()
    staging = _staging_for(3, pool[0].numel() // 2, device)
    target = torch.zeros_like(pool)
    kernels.pack_blocks(pool, _copy_list([5, 1, 2], device), staging)
    assert not _is_corrupt(kernels, staging, target, _copy_list([0, 3, 4], device))
    assert torch.equal(target[[0, 3, 4]], pool[[5, 1, 2]])


def test_check_sees_a_changed_bit_and_swapped_words(device, kernels):
    words = _random_pool(1, 3000, device)
    pool = torch.zeros_like(words)
    clean = _packed(words, kernels)
    end = 3000 * 4

    def is_corrupt(staging):
        return _is_corrupt(kernels, staging, pool, _copy_list([-1], device))

    assert not is_corrupt(clean.clone())
    for place in (0, 2999 * 4, end, end + 7):  # of the block, and of its sum
        for bit in (0, 7):
            corrupt = clean.clone()
            corrupt[place] ^= 1 << bit
            assert is_corrupt(corrupt)
    swapped = clean.clone()
    swapped[:end] = words[:, [1, 0, *range(2, 3000)]].contiguous().view(torch.uint8).view(-1)
    assert is_corrupt(swapped)
    assert not pool.any()


@pytest.mark.parametrize("capacity", [0, 1, 5])
def test_packing_nothing(capacity, device, kernels):
    pool = torch.zeros(2, 8, dtype=torch.int32, device=device)
    copy_list = empty_copy_list(capacity).to(device)
    staging = _staging_for(capacity, 8, device)
    kernels.pack_blocks(pool, copy_list, staging)
    assert not _is_corrupt(kernels, staging, pool, copy_list)
    assert (staging == 9).all()


def test_a_copy_list_of_more_than_there_is_room_for_moves_no_more(device, kernels):
    pool = _random_pool(4, 16, device)
    copy_list = _copy_list([3, 2], device)
    copy_list[0] = 10**9
    staging = _staging_for(2, 16, device)
    kernels.pack_blocks(pool, copy_list, staging)
    assert (staging[-8:] == 9).all()
    assert not _is_corrupt(kernels, staging, pool, copy_list)


@pytest.mark.parametrize("missing", [1, 8, 9, 8 + 4 * 16])
def test_staging_that_is_too_short_is_refused(missing, device, kernels):
    pool = torch.zeros(2, 16, dtype=torch.int32, device=device)
    copy_list = _copy_list([0, 1], device)
    staging = torch.zeros(packed_bytes(2, 64), dtype=torch.uint8, device=device)[:-missing]
    with pytest.raises(UnsupportedShapeError, match="take 144 bytes"):
        kernels.pack_blocks(pool, copy_list, staging)
    with pytest.raises(UnsupportedShapeError, match="take 144 bytes"):
        _is_corrupt(kernels, staging, pool, copy_list)


@pytest.mark.gpu
def test_pack_of_8b_blocks(kernels, reference):
    pool = _random_pool(100, 1 << 19, "cuda")
    copy_list = _copy_list(torch.randperm(100)[:64].tolist(), "cuda", capacity=100)
    staging = _staging_for(100, 1 << 19, "cuda")
    expected = staging.clone()
    kernels.pack_blocks(pool, copy_list, staging)
    reference.pack_blocks(pool, copy_list, expected)
    assert torch.equal(staging, expected)
