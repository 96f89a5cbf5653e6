"""The KV wire: scattered blocks of one prompt, from pool to pool, between two processes.

    python -P -m pagewire.shared.transfer.kv_bench --tokens 8192

A child gathers the blocks into staging slots with their checksums and sends them; this process
scatters them into its own pool and checks them. GB/s counts from the moment at which the child is
to begin, until the last block's verification, beside one contiguous copy of as many bytes between
the same devices in the same run: medians of `TURNS` turns. One prompt alone shows what the first
piece waits for, several in a row what the way carries.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import accumulate, product

import torch

from pagewire.kernels import load_ops
from pagewire.shared.background import end_task, start_task
from pagewire.shared.engine.block_mover import BlockMover, PendingCheck, PendingMove
from pagewire.shared.errors import TransferError
from pagewire.shared.protocol import PieceHeader
from pagewire.shared.transfer import KvTransport, StagingPool, create_transport
from pagewire.shared.transfer.base import ReceivedPiece
from pagewire.shared.transfer.bench import (
    PATIENCE_S,
    add_devices,
    child_process,
    copy_gbps,
    serve_orders,
)
from pagewire.shared.transfer.pieces import piece_sizes
from pagewire.shared.transfer.staging import StagingSlot

LAYERS, KV_HEADS, BLOCK_SIZE, HEAD_DIM = 32, 8, 16, 128  # Llama-3.1-8B: blocks of 2 MiB
SLOTS = 8
SLOT_BLOCKS = (8, 16, 32, 64, 128)
TURNS = 9
IN_A_ROW = (1, 8)  # prompts
_SPARE = 2  # the pool is so many times larger than the prompt
_LEAD_S = 0.005  # from an order to the moment at which it is to be obeyed
_TICK_S = 0.001  # as of a worker's vigil, which this package does not know
# Blocks of the largest piece. While such a piece crosses, the host gets the next one ready, and had
# better send it than launch another; smaller ones cross in less, so they are packed ahead. (In a
# worker two threads launch and send.)
_LEAST_ONE_BY_ONE = 64
_TURN_S = 0.0001  # more than a turn of the loop takes: nearer to the moment the loop stands still
_SPIN_S = 0.003  # before the moment the loop only turns: asyncio rounds a sleep up to a millisecond


class _Prompt:
    """One side's pool, with the blocks of a prompt strewn over it, and its staging."""

    def __init__(self, device: str, num_blocks: int) -> None:
        if torch.device(device).type == "cuda":
            torch.cuda.set_device(device)  # kernels launch on the current one
        shape = (_SPARE * num_blocks, LAYERS, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
        self.pool = torch.zeros(shape, dtype=torch.bfloat16, device=device)
        self.num_blocks, self.block_bytes = num_blocks, self.pool[0].nbytes
        self._blocks = random.Random(0).sample(range(shape[0]), num_blocks)
        ops = load_ops("auto", torch.device(device).type)
        self.mover = BlockMover(ops, self.pool)
        self.parts = self.mover.parts
        self._marker = self.mover.mark()
        slot_bytes = self.parts.packed_bytes(max(SLOT_BLOCKS))
        self.staging = StagingPool(SLOTS, slot_bytes, torch.device(device))

    def pack(self, start: int, count: int, staging: torch.Tensor) -> PendingMove:
        """Begin to gather blocks of the prompt into a slot."""
        blocks = self._blocks[start : start + count]
        return self.mover.pack(blocks, self.parts.whole, staging, start, self._marker)

    def unpack(self, start: int, count: int, staging: torch.Tensor) -> PendingCheck:
        """Begin to scatter blocks of the prompt from a slot."""
        blocks = self._blocks[start : start + count]
        return self.mover.unpack(staging, blocks, self.parts.whole, start, self._marker)


async def _done(move: PendingMove) -> None:
    while not move.is_done():  # noqa: ASYNC110 - a device is polled
        await asyncio.sleep(0)


def _header(start: int, count: int, num_parts: int, nbytes: int) -> PieceHeader:
    return PieceHeader(
        job_id="bench",
        decode_epoch=0,
        prefill_epoch=0,
        piece=start,
        positions=list(range(start, start + count)),
        first_part=0,
        num_parts=num_parts,
        seed=start,
        nbytes=nbytes,
    )


async def _send(
    transport: KvTransport,
    slot: StagingSlot,
    header: PieceHeader,
    packing: PendingMove,
) -> None:
    try:
        data = slot.buffer[: header.nbytes]
        await transport.send("receiver", header, data, PATIENCE_S, lambda: _done(packing))
    finally:
        slot.release()


async def _child(kind: str, device: str, num_blocks: int) -> None:
    """Send the prompt's blocks as told: from a moment on, up to so many a piece."""
    prompt = _Prompt(device, num_blocks)
    prompt.pool.view(torch.uint8).random_(0, 255)
    prompt.mover.capture_packing(prompt.staging.buffers)

    async def obey(transport: KvTransport, order: list[int]) -> None:
        most, prompts, start_ns = order
        pieces = prompts * _pieces(num_blocks, most)
        async with asyncio.TaskGroup() as group:
            await _until(start_ns)
            for start, size in pieces:
                slot = prompt.staging.try_acquire() or await prompt.staging.acquire(PATIENCE_S)
                packing = prompt.pack(start, size, slot.buffer)
                nbytes = prompt.parts.packed_bytes(size)
                header = _header(start, size, prompt.parts.count, nbytes)
                group.create_task(_send(transport, slot, header, packing))
                await asyncio.sleep(0)  # it is offered before the next is launched
                if most >= _LEAST_ONE_BY_ONE:
                    await _done(packing)
                    await asyncio.sleep(0)  # it leaves in the turn in which it is seen to be packed

    await serve_orders(kind, prompt.staging, obey)


async def _until(moment_ns: int) -> None:
    """Return at a moment of `time.monotonic_ns`."""
    while (left_s := (moment_ns - time.monotonic_ns()) / 1e9) > _TURN_S:  # noqa: ASYNC110 - to be in time
        await asyncio.sleep(_TICK_S if left_s > _SPIN_S else 0)
    while time.monotonic_ns() < moment_ns:
        pass


def _pieces(num_blocks: int, most: int) -> list[tuple[int, int]]:
    """Return the first block and the size of each piece of the prompt."""
    sizes = piece_sizes(num_blocks, most)
    return list(zip(accumulate([0, *sizes[:-1]]), sizes, strict=True))


async def _check(check: PendingCheck, piece: ReceivedPiece) -> int:
    """Return the moment at which a piece is known to be intact, in ns.

    Raises:
        TransferError: it arrived damaged.
    """
    try:
        await _done(check)
        intact = check.is_intact()
        checked_ns = time.monotonic_ns()
    finally:
        piece.slot.release()
    if not intact:
        raise TransferError(f"piece {piece.header.piece} arrived damaged")
    return checked_ns


@asynccontextmanager
async def _vigil() -> AsyncIterator[None]:
    """Keep the event loop from falling asleep, as a worker does while blocks are about to cross."""

    async def keep() -> None:
        while True:  # noqa: ASYNC110 - to be awake is the point
            await asyncio.sleep(_TICK_S)

    task = start_task(keep(), "keeping a vigil")
    try:
        yield
    finally:
        await end_task(task)


async def _turn(
    transport: KvTransport, orders: asyncio.StreamWriter, prompt: _Prompt, most: int, prompts: int
) -> float:
    """Return the seconds a prompt, in pieces of up to so many blocks, so many prompts in a row."""
    started_ns = time.monotonic_ns() + int(_LEAD_S * 1e9)  # the same clock in both processes
    orders.write(f"{most} {prompts} {started_ns}\n".encode())
    async with _vigil(), asyncio.timeout(PATIENCE_S):
        checks = []
        async with asyncio.TaskGroup() as group:
            for _ in range(prompts * len(piece_sizes(prompt.num_blocks, most))):
                piece = await transport.recv()
                positions = piece.header.positions
                check = prompt.unpack(positions[0], len(positions), piece.slot.buffer)
                checks.append(group.create_task(_check(check, piece)))
        return (max(check.result() for check in checks) - started_ns) / 1e9 / prompts


async def _measure(kind: str, source: str, target: str, num_blocks: int) -> None:
    prompt = _Prompt(target, num_blocks)
    prompt.mover.capture_unpacking(prompt.staging.buffers)
    total = num_blocks * prompt.block_bytes
    ceiling = copy_gbps(source, target, total)
    print(f"plain copy of {total >> 20} MiB: {ceiling:.1f} GB/s")
    transport = create_transport(kind, "receiver", prompt.staging)
    transport.hold_slots(SLOTS // 2)
    command = ("pagewire.shared.transfer.kv_bench", "--child", kind, source, str(num_blocks))
    try:
        address = await transport.start(PATIENCE_S)
        async with child_process(command, transport, address) as orders:
            for prompts, most in product(IN_A_ROW, SLOT_BLOCKS):
                times = [
                    await _turn(transport, orders, prompt, most, prompts) for _ in range(2 + TURNS)
                ][2:]
                median = total / statistics.median(times) / 1e9
                print(
                    f"{kind} {transport.lane('sender')}, {prompts} in a row, pieces of up to "
                    f"{most * prompt.block_bytes >> 20} MiB: {median:.1f} GB/s "
                    f"({total / max(times) / 1e9:.1f} - {total / min(times) / 1e9:.1f}), "
                    f"{median / ceiling:.2f} of the copy",
                    flush=True,
                )
    finally:
        await transport.close()


def main() -> None:
    """Measure one transport."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transport", default="ucx")
    parser.add_argument("--tokens", type=int, default=8192)
    add_devices(parser)
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        kind, device, num_blocks = options.child
        asyncio.run(_child(kind, device, int(num_blocks)))
        return
    num_blocks = -(-options.tokens // BLOCK_SIZE)
    asyncio.run(_measure(options.transport, options.source, options.target, num_blocks))


if __name__ == "__main__":
    main()
