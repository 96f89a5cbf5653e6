"""KV pieces between the GPU memory of two processes."""

import asyncio

import pytest
import torch

from pagewire.tests.support.aio import run_async
from pagewire.tests.support.transfer_child import TOTAL_BYTES, piece_bytes
from pagewire.tests.support.transfer_parent import child_of
from pagewire.tests.support.transports import network

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

PIECE_BYTES = 16 << 20


@pytest.mark.parametrize("kind", ["ucx", "zmq"])
def test_pieces_of_another_process(kind: str) -> None:
    async def scenario() -> None:
        async with network(kind) as net:
            node = await net.open("parent", 4, PIECE_BYTES, "cuda:0")
            async with child_of(node, "send", f"cuda:{torch.cuda.device_count() - 1}") as child:
                count = TOTAL_BYTES // PIECE_BYTES
                assert sorted(await node.take_all(count)) == list(range(count))
                assert node.transport.lane("child") == ("cuda_ipc" if kind == "ucx" else "tcp")
                child.tell("done")
                assert await child.exit_code() == 0

    run_async(scenario(), timeout=100)


@pytest.mark.parametrize("kind", ["ucx", "zmq"])
def test_sender_killed_in_mid_transfer(kind: str) -> None:
    """The receiver loses neither its slots nor its CUDA context."""

    async def scenario() -> None:
        async with network(kind) as net:
            node = await net.open("parent", 4, PIECE_BYTES, "cuda:0")
            for _ in range(3):
                async with child_of(node, "flood", "cuda:0") as child:
                    for _ in range(50):
                        (await node.transport.recv()).slot.release()
                    await child.kill()
                    await asyncio.sleep(0.05)
                    async with asyncio.timeout(2):
                        await node.transport.disconnect("child")
                    node.staging.check_integrity(all_free=True)
            assert torch.equal(piece_bytes(1, 1000, "cuda:0").cpu(), piece_bytes(1, 1000))

    run_async(scenario(), timeout=100)
