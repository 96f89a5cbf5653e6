"""Blocks moved through staging slots: launched piece by piece, and as CUDA graphs."""

from __future__ import annotations

import pytest
import torch

from pagewire.kernels import load_ops
from pagewire.kernels.kv_staging import packed_bytes
from pagewire.shared.engine.block_mover import BlockMover
from pagewire.shared.transfer.staging import StagingPool

CAPACITY = 5
SHAPE = (12, 2, 2, 2, 4, 8)  # [NB, L, 2, KH, BS, D]

each_device = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
)


class Side:
    """A pool, and staging for it."""

    def __init__(self, device: str, seed: int, *, captured: bool) -> None:
        torch.manual_seed(seed)
        self.pool = torch.randn(SHAPE, device=device)
        self.mover = BlockMover(load_ops("auto", device), self.pool)
        slot_bytes = packed_bytes(CAPACITY, self.pool[0].nbytes)
        self.staging = StagingPool(2, slot_bytes, torch.device(device))
        if captured:
            self.mover.capture_packing(self.staging.buffers)
            self.mover.capture_unpacking(self.staging.buffers)
            # Whatever a graph forgot to keep is overwritten by these.
            self.garbage = [torch.full((64,), 10**9, device=device) for _ in range(256)]

    def pack(self, slot: int, blocks: list[int], seed: int) -> torch.Tensor:
        staging = self.staging.buffers[slot][: packed_bytes(len(blocks), self.pool[0].nbytes)]
        move = self.mover.pack(blocks, staging, seed, self.mover.mark())
        while not move.is_done():
            pass
        return staging

    def unpack(self, slot: int, blocks: list[int], seed: int) -> bool:
        staging = self.staging.buffers[slot][: packed_bytes(len(blocks), self.pool[0].nbytes)]
        return self.mover.unpack(staging, blocks, seed, self.mover.mark()).is_intact()


@pytest.mark.parametrize("captured", [False, True])
@each_device
def test_blocks_go_from_pool_to_pool_slot_by_slot(device: str, captured: bool) -> None:
    source, target = Side(device, 1, captured=captured), Side(device, 2, captured=captured)
    expected = target.pool.clone()
    moves = [(0, [7, 3, 11], [0, 1, 2]), (1, [1, 2, 3, 4, 5], [9, 8, 7, 6, 5]), (0, [0], [11])]
    for seed, (slot, blocks, into) in enumerate(moves):
        packed = source.pack(slot, blocks, seed)
        target.staging.buffers[slot][: len(packed)] = packed
        assert target.unpack(slot, into, seed)
        expected[into] = source.pool[blocks]
    assert torch.equal(target.pool, expected)


@pytest.mark.parametrize("captured", [False, True])
@each_device
def test_damage_is_told_of_the_piece_that_has_it(device: str, captured: bool) -> None:
    side = Side(device, 1, captured=captured)
    for seed, damaged in enumerate([False, True, False, True]):
        packed = side.pack(0, [1, 2], seed)
        packed[17] ^= damaged
        assert side.unpack(0, [3, 4], seed) is not damaged
    side.pack(1, [1, 2], seed=5)
    assert not side.unpack(1, [3, 4], seed=6)  # those of another piece
