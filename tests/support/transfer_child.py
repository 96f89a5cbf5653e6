"""A process with a KV transport that a test talks to, and may stop or kill.

Run as `python -m pagewire.tests.support.transfer_child KIND MODE PIECE_BYTES DEVICE`. It prints
its address in hex, reads the test's address as a line, connects it as "parent" and then

    send     sends 32 MiB in pieces, waits for the end of its input and closes properly,
    flood    sends pieces until it dies,
    receive  takes pieces and gives their slots back until it dies.
"""

from __future__ import annotations

import asyncio
import sys

import torch

from pagewire.shared.errors import TransferError
from pagewire.shared.protocol import PieceHeader
from pagewire.shared.transfer import KvTransport, StagingPool, create_transport

TOTAL_BYTES = 32 << 20
_IN_FLIGHT = 4
_PATIENCE_S = 30.0


def piece_header(piece: int, nbytes: int) -> PieceHeader:
    return PieceHeader(
        job_id="job",
        decode_epoch=1,
        prefill_epoch=2,
        piece=piece,
        positions=[piece],
        first_part=0,
        num_parts=1,
        seed=-piece,
        nbytes=nbytes,
    )


def piece_bytes(piece: int, nbytes: int, device: str = "cpu") -> torch.Tensor:
    """Return bytes that differ from piece to piece and from place to place."""
    generator = torch.Generator().manual_seed(piece)
    content = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator).to(device)
    if content.is_cuda:
        torch.cuda.synchronize(device)
    return content


async def _send(transport: KvTransport, nbytes: int, device: str) -> None:
    async def send_piece(piece: int) -> None:
        payload = piece_bytes(piece, nbytes, device)
        await transport.send("parent", piece_header(piece, nbytes), payload, _PATIENCE_S)

    await asyncio.gather(*(send_piece(i) for i in range(TOTAL_BYTES // nbytes)))


async def _flood(transport: KvTransport, nbytes: int, device: str) -> None:
    payloads = [piece_bytes(i, nbytes, device) for i in range(_IN_FLIGHT)]

    async def one_after_the_other(lane: int) -> None:
        while True:
            header = piece_header(lane, nbytes)
            await transport.send("parent", header, payloads[lane], _PATIENCE_S)

    await asyncio.gather(*(one_after_the_other(lane) for lane in range(_IN_FLIGHT)))


async def _receive(transport: KvTransport) -> None:
    while True:
        piece = await transport.recv()
        piece.slot.release()


async def _serve(kind: str, mode: str, nbytes: int, device: str) -> None:
    staging = StagingPool(_IN_FLIGHT, nbytes, torch.device(device))
    transport = create_transport(kind, "child", staging)
    print((await transport.start(_PATIENCE_S)).hex(), flush=True)
    address = await asyncio.to_thread(sys.stdin.readline)
    await transport.connect("parent", bytes.fromhex(address), _PATIENCE_S)
    try:
        if mode == "send":
            await _send(transport, nbytes, device)
            await asyncio.to_thread(sys.stdin.readline)
        elif mode == "flood":
            await _flood(transport, nbytes, device)
        else:
            await _receive(transport)
    except TransferError as exc:
        print(f"ended by: {exc}", flush=True)
    finally:
        await transport.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(_serve(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]))
