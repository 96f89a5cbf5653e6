"""Bandwidth of the KV transports between two processes: `python -m pagewire.shared.transfer.bench`.

A child process sends pieces, this one receives them and gives their slots back. GB/s is the median
of five turns after a warm-up, beside a plain copy between the same devices in the same run.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import torch

from pagewire.shared.protocol import PieceHeader
from pagewire.shared.transfer import (
    KvTransport,
    StagingPool,
    available_transports,
    create_transport,
)

PIECES_MIB = (1, 4, 16, 64)
IN_FLIGHT = 4
TURNS = 5
_MIB = 1 << 20
_TOTAL_BYTES = {"cpu": 256 * _MIB, "cuda": 2048 * _MIB}
PATIENCE_S = 60.0


def _staging(device: str) -> StagingPool:
    pool = StagingPool(IN_FLIGHT, max(PIECES_MIB) * _MIB, torch.device(device))
    pool.memory.fill_(1)
    return pool


def _header(nbytes: int) -> PieceHeader:
    return PieceHeader(
        kind="probe",
        job_id="bench",
        decode_epoch=0,
        prefill_epoch=0,
        piece=0,
        positions=[],
        first_part=0,
        num_parts=0,
        seed=0,
        nbytes=nbytes,
    )


async def _send_pieces(transport: KvTransport, staging: StagingPool, nbytes: int, n: int) -> None:
    async def send_one() -> None:
        slot = await staging.acquire(PATIENCE_S)
        try:
            payload = slot.buffer[:nbytes]
            await transport.send("receiver", _header(nbytes), payload, PATIENCE_S)
        finally:
            slot.release()

    await asyncio.gather(*(send_one() for _ in range(n)))


async def serve_orders(
    kind: str,
    staging: StagingPool,
    obey: Callable[[KvTransport, list[int]], Awaitable[None]],
) -> None:
    """Be the sending process: connect to the parent, obey each line of numbers that it writes."""
    transport = create_transport(kind, "sender", staging)
    try:
        print((await transport.start(PATIENCE_S)).hex(), flush=True)
        address = await asyncio.to_thread(sys.stdin.readline)
        await transport.connect("receiver", bytes.fromhex(address), PATIENCE_S)
        while line := await asyncio.to_thread(sys.stdin.readline):
            await obey(transport, [int(word) for word in line.split()])
    finally:
        await transport.close()


async def _child(kind: str, device: str) -> None:
    """Send as told: pieces of so many bytes, so many of them."""
    staging = _staging(device)

    async def obey(transport: KvTransport, order: list[int]) -> None:
        await _send_pieces(transport, staging, *order)

    await serve_orders(kind, staging, obey)


@asynccontextmanager
async def child_process(
    command: tuple[str, ...], transport: KvTransport, address: bytes
) -> AsyncIterator[asyncio.StreamWriter]:
    """Start the sending process and connect with it; yields what it takes orders from."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", *command),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("the child has no pipes")
        async with asyncio.timeout(PATIENCE_S):
            theirs = bytes.fromhex((await process.stdout.readline()).decode())
        await transport.connect("sender", theirs, PATIENCE_S)
        process.stdin.write(f"{address.hex()}\n".encode())
        yield process.stdin
        process.stdin.close()
        async with asyncio.timeout(PATIENCE_S):
            await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _turn(
    transport: KvTransport, orders: asyncio.StreamWriter, nbytes: int, count: int
) -> float:
    """Return the GB/s of `count` pieces."""
    started = time.perf_counter()
    orders.write(f"{nbytes} {count}\n".encode())
    async with asyncio.timeout(PATIENCE_S):
        for _ in range(count):
            piece = await transport.recv()
            piece.slot.release()
    return nbytes * count / (time.perf_counter() - started) / 1e9


async def _measure(kind: str, source: str, target: str) -> None:
    staging = _staging(target)
    transport = create_transport(kind, "receiver", staging)
    try:
        address = await transport.start(PATIENCE_S)
        command = ("pagewire.shared.transfer.bench", "--child", kind, source)
        async with child_process(command, transport, address) as orders:
            row = []
            for mib in PIECES_MIB:
                count = _TOTAL_BYTES[torch.device(target).type] // (mib * _MIB)
                await _turn(transport, orders, mib * _MIB, count)
                speeds = [await _turn(transport, orders, mib * _MIB, count) for _ in range(TURNS)]
                row.append(f"{statistics.median(speeds):10.2f}")
            print(f"{kind:6}{transport.lane('sender'):10}" + "".join(row), flush=True)
    finally:
        await transport.close()


def copy_gbps(source: str, target: str, nbytes: int = 64 * _MIB) -> float:
    """Return the GB/s of a plain copy."""
    a = torch.ones(nbytes, dtype=torch.uint8, device=source)
    b = torch.empty_like(a, device=target)
    speeds = []
    for _ in range(2 * TURNS):
        _synchronize(source, target)
        started = time.perf_counter()
        b.copy_(a)
        _synchronize(source, target)
        speeds.append(a.nbytes / (time.perf_counter() - started) / 1e9)
    return statistics.median(speeds[TURNS:])


def _synchronize(*devices: str) -> None:
    for device in devices:
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize(device)


def add_devices(parser: argparse.ArgumentParser) -> None:
    """Add the options that say between which devices; by default two GPUs, if there are any."""
    gpus = torch.cuda.device_count()
    parser.add_argument("--source", default="cuda:0" if gpus else "cpu", help="the sender's device")
    parser.add_argument(
        "--target", default=f"cuda:{min(gpus - 1, 1)}" if gpus else "cpu", help="the receiver's"
    )


def main() -> None:
    """Measure the transports available here, or those asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transports", nargs="+", default=available_transports())
    add_devices(parser)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        asyncio.run(_child(*options.child))
        return
    print(f"{options.source} -> {options.target}, {IN_FLIGHT} pieces in flight, GB/s (1e9 bytes)")
    print(f"plain copy of 64 MiB: {copy_gbps(options.source, options.target):.2f}")
    print(f"{'':16}" + "".join(f"{mib:6d} MiB" for mib in PIECES_MIB))
    for kind in options.transports:
        asyncio.run(_measure(kind, options.source, options.target))


if __name__ == "__main__":
    main()
