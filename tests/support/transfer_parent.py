"""The test's side of `transfer_child`."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pagewire.tests.support.transports import PATIENCE_S, Node

_START_S = 60.0  # a process imports torch, on a busy machine


class Child:
    """A process that is connected with a node of ours as "child" and "parent"."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def line(self) -> bytes:
        """Return the next line that it prints."""
        assert self.process.stdout is not None
        async with asyncio.timeout(_START_S):
            return await self.process.stdout.readline()

    def tell(self, line: str) -> None:
        """Send it a line."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n".encode())

    async def exit_code(self) -> int:
        async with asyncio.timeout(PATIENCE_S):
            return await self.process.wait()

    async def kill(self) -> None:
        """Kill it, unless it has ended."""
        if self.process.returncode is None:
            self.process.kill()
        await self.exit_code()


@asynccontextmanager
async def child_of(node: Node, mode: str, device: str = "cpu") -> AsyncIterator[Child]:
    """Start a child and connect with it; it is killed at the end."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pagewire.tests.support.transfer_child"),
        *(node.transport.name, mode, str(node.staging.slot_bytes), device),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    child = Child(process)
    try:
        address = bytes.fromhex((await child.line()).decode())
        child.tell(node.address.hex())
        await node.transport.connect("child", address, PATIENCE_S)
        yield child
    finally:
        await child.kill()
