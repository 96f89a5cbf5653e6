"""Blocks moved through staging slots: launched one by one, and as CUDA graphs."""

from __future__ import annotations

import pytest
import torch

from pagewire.kernels import load_ops
from pagewire.kernels.errors import UnsupportedShapeError
from pagewire.shared.engine.execution.block_mover import BlockMove, BlockMover
from pagewire.shared.kv.kv_layout import CachedToken, KvLayout
from pagewire.shared.kv.packing import packed_bytes, part_bytes
from pagewire.shared.transfer.staging import make_staging

CAPACITY = 5
LAYOUT = KvLayout.of([None] * 16, CachedToken(2, 2, 8), 4, "float32")
WHOLE = LAYOUT.layer_groups

each_device = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
)


class Side:
    """A pool, and staging for it."""

    def __init__(self, device: str, seed: int, *, captured: bool) -> None:
        torch.manual_seed(seed)
        self.pool = torch.randn((12, *LAYOUT.block_shape), device=device)
        self.mover = BlockMover(load_ops("auto", device), self.pool, LAYOUT)
        slot_bytes = packed_bytes(LAYOUT, CAPACITY)
        self.staging = make_staging(2, slot_bytes, torch.device(device))
        if captured:
            self.mover.capture_packing(self.staging.buffers)
            self.mover.capture_unpacking(self.staging.buffers)
            # Whatever a graph forgot to keep is overwritten by these.
            self.garbage = [torch.full((64,), 10**9, device=device) for _ in range(256)]

    def payload(self, slot: int, blocks: list[int], groups: range) -> torch.Tensor:
        nbytes = packed_bytes(LAYOUT, len(blocks), len(groups))
        return self.staging.buffers[slot][:nbytes]

    def pack(self, slot: int, blocks: list[int], seed: int, groups: range = WHOLE) -> torch.Tensor:
        staging = self.payload(slot, blocks, groups)
        blocks_to_move = BlockMove(blocks, groups, staging, seed)
        move = self.mover.pack(blocks_to_move, self.mover.record_event())
        while not move.poll():
            pass
        return staging

    def unpack(self, slot: int, blocks: list[int], seed: int, groups: range = WHOLE) -> bool:
        staging = self.payload(slot, blocks, groups)
        move = BlockMove(blocks, groups, staging, seed)
        return self.mover.unpack(move, self.mover.record_event()).verify()


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
def test_a_corrupt_segment_is_reported(device: str, captured: bool) -> None:
    side = Side(device, 1, captured=captured)
    for seed, corrupt in enumerate([False, True, False, True]):
        packed = side.pack(0, [1, 2], seed)
        packed[17] ^= corrupt
        assert side.unpack(0, [3, 4], seed) is not corrupt
    side.pack(1, [1, 2], seed=5)
    assert not side.unpack(1, [3, 4], seed=6)  # those of another segment


@pytest.mark.parametrize("captured", [False, True])
@each_device
def test_layer_groups_are_moved_alone(device: str, captured: bool) -> None:
    source, target = Side(device, 1, captured=captured), Side(device, 2, captured=captured)
    expected = target.pool.clone()
    blocks, into = [7, 3, 11, 0, 9, 2], [4, 1, 2, 8, 3, 0]
    for seed, groups in enumerate([range(2, 3), range(2), range(3, 4)]):
        packed = source.pack(0, blocks, seed, groups)
        target.staging.buffers[0][: len(packed)] = packed
        assert target.unpack(0, into, seed, groups)
        layers = slice(2 * groups.start, 2 * groups.stop)
        expected[into, layers] = source.pool[blocks, layers]
        assert torch.equal(target.pool, expected)


@pytest.mark.parametrize("captured", [False, True])
@each_device
def test_one_corrupt_layer_group_is_found(device: str, captured: bool) -> None:
    side = Side(device, 1, captured=captured)
    for unit in range(4):
        packed = side.pack(0, [1, 2], seed=unit, groups=range(1, 3))
        packed[unit * LAYOUT.layer_group_bytes] ^= 1
        assert not side.unpack(0, [3, 4], seed=unit, groups=range(1, 3))


@pytest.mark.parametrize("captured", [False, True])
@each_device
def test_a_fence_keeps_later_work_from_blocks_that_are_packed(device: str, captured: bool) -> None:
    side = Side(device, 1, captured=captured)
    blocks = [7, 3, 11]
    expected = side.pack(0, blocks, seed=3).clone()
    staging = side.payload(1, blocks, WHOLE)
    if device == "cuda":  # the packing waits for this, on another stream than the steps'
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(100_000_000)
            event = side.mover.record_event()
    else:
        event = side.mover.record_event()
    move = side.mover.pack(BlockMove(blocks, WHOLE, staging, 3), event)
    side.mover.fence()
    side.pool.zero_()
    while not move.poll():
        pass
    assert torch.equal(staging, expected)


@each_device
def test_warming_the_launch_path_moves_nothing(device: str) -> None:
    side = Side(device, 1, captured=True)
    pool, staging = side.pool.clone(), [buffer.clone() for buffer in side.staging.buffers]
    for _ in range(3):
        side.mover.warm_launch_path()
        packed = side.pack(0, [1, 2], seed=5)
        assert side.unpack(0, [1, 2], seed=5)
    assert torch.equal(side.pool, pool)
    assert torch.equal(side.staging.buffers[1], staging[1])
    assert len(packed) == packed_bytes(LAYOUT, 2)


@each_device
def test_the_heads_of_one_rank_go_to_two_and_back(device: str) -> None:
    source, target = Side(device, 1, captured=False), Side(device, 2, captured=False)
    divided = LAYOUT.divided(2)
    assert divided is not None
    pools = [target.pool[:, :, :, head : head + 1].contiguous() for head in range(2)]
    ranks = [BlockMover(load_ops("auto", device), pool, divided) for pool in pools]
    staging = torch.zeros(packed_bytes(divided, 3), dtype=torch.uint8, device=device)
    size, event = part_bytes(divided, 3), source.mover.record_event()
    source.mover.pack(BlockMove([7, 2, 9], WHOLE, staging, 5, parts=2), event)
    for rank, part in zip(ranks, staging.split(size), strict=True):
        assert rank.unpack(BlockMove([1, 0, 4], WHOLE, part, 5), event).verify()
    for head, pool in enumerate(pools):
        assert torch.equal(pool[[1, 0, 4]], source.pool[[7, 2, 9], :, :, head : head + 1])
        untouched = [block for block in range(12) if block not in (1, 0, 4)]
        assert torch.equal(pool[untouched], target.pool[untouched, :, :, head : head + 1])
    staging.zero_()
    for rank, part in zip(ranks, staging.split(size), strict=True):
        rank.pack(BlockMove([1, 0, 4], WHOLE, part, 6), event)
    both = BlockMove([3, -1, 5], WHOLE, staging, 6, parts=2)
    assert target.mover.unpack(both, event).verify()
    assert torch.equal(target.pool[[3, 5]], source.pool[[7, 9]])
    staging[size + 1] ^= 1  # of the second part
    assert not target.mover.unpack(both, event).verify()


def test_heads_that_make_no_such_parts() -> None:
    side = Side("cpu", 1, captured=False)
    with pytest.raises(UnsupportedShapeError, match="2 heads do not make 3 parts"):
        side.mover.pack(BlockMove([1], WHOLE, side.staging.buffers[0], 5, parts=3), None)


def test_parts_that_staging_has_no_room_for() -> None:
    side = Side("cpu", 1, captured=False)
    divided = LAYOUT.divided(2)
    assert divided is not None
    short = side.staging.buffers[0][: packed_bytes(divided, 1) - 8]
    both = BlockMove([1], WHOLE, short, 5, parts=2)
    for move in (
        lambda: side.mover.pack(both, None),
        lambda: side.mover.unpack(both, None),
    ):
        with pytest.raises(UnsupportedShapeError, match=r"2 parts of .* do not fit"):
            move()
