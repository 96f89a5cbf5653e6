"""A worker's staging and its CUDA IPC transport, in this process or in one of its own."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from pagewire.shared.engine.execution.block_mover import PendingMove
from pagewire.shared.transfer.messages import Segment
from pagewire.shared.transfer.staging import Staging, make_staging
from pagewire.shared.transfer.transports.base import DONE, Inbound, Outbound, Pending
from pagewire.shared.transfer.transports.ipc import IpcTransport
from pagewire.tests.support.child_process import Remote, remote

NUM_SLOTS = 2
MAX_COPY_S = 30.0


class Announced:
    """Keeps the announcements of a link, in place of a socket."""

    peer = "the other process"

    def __init__(self) -> None:
        self.segments: list[Segment] = []

    def post(self, segment: Segment, body: memoryview | None = None) -> Pending:
        assert body is None
        self.segments.append(segment)
        return DONE


def make_transport(memory: torch.Tensor, slot_bytes: int, **options: Any) -> IpcTransport:
    return IpcTransport(Staging(memory, slot_bytes), **options)


def pattern(seed: int, nbytes: int, device: torch.device) -> torch.Tensor:
    numbers = torch.arange(nbytes, dtype=torch.int64, device=device)
    return ((numbers * 2654435761 + seed) >> 7).to(torch.uint8)


class IpcPeer:
    """Both halves of links."""

    def __init__(self, device: int, slot_bytes: int) -> None:
        torch.cuda.set_device(device)
        self.device, self.slot_bytes = torch.device("cuda", device), slot_bytes
        self.memory = make_staging(NUM_SLOTS, slot_bytes, self.device).memory
        self.memory.zero_()
        torch.cuda.synchronize()
        self.transport = make_transport(self.memory, slot_bytes)
        self.announced = Announced()
        self.outbound: list[Outbound] = []
        self.inbound: list[Inbound] = []
        self._last: Pending = DONE

    def offer(self) -> bytes:
        return self.transport.offer(1)

    def connect(self, offer: bytes) -> bytes:
        """Open a further link; returns the reply."""
        self.outbound.append(self.transport.outbound(1, offer, self.announced))
        return self.outbound[-1].reply

    def accept(self, reply: bytes) -> None:
        """Open the receiver's half of a further link."""
        self.inbound.append(self.transport.inbound(1, reply))

    def has_arrived(self, credit: int) -> bool:
        """Whether the newest payload of a credit of the newest link has arrived."""
        return self.inbound[-1].receive(_segment(credit, 0, 0), None).poll()

    def end_link(self, link: int) -> None:
        self.outbound.pop(link).close()

    def write(self, slot: int, credit: int, seed: int, nbytes: int) -> None:
        """Fill a staging slot, bring it into the receiver's, and announce it."""
        self.memory[slot, :nbytes] = pattern(seed, nbytes, self.device)
        torch.cuda.synchronize()  # for the moves' stream
        segment = _segment(credit, seed, nbytes)
        _wait(self.outbound[-1].send(segment, slot, PendingMove(None)))
        assert self.announced.segments.pop() == segment

    def holds(self, slot: int, seed: int, nbytes: int) -> bool:
        """Whether a staging slot has this payload, and only zeros after it."""
        wanted = pattern(seed, nbytes, self.device)
        rest = self.memory[slot, nbytes:]
        return torch.equal(self.memory[slot, :nbytes], wanted) and not rest.any().item()

    def queue_copies(self, count: int) -> None:
        """Queue copies of whole staging slots without waiting for them."""
        for index in range(count):
            slot = index % 2
            segment = _segment(slot, 0, self.slot_bytes)
            self._last = self.outbound[-1].send(segment, slot, PendingMove(None))

    def queue_late_copy(self, credit: int) -> None:
        """Queue a copy that waits for work of about a second."""
        torch.cuda._sleep(2_000_000_000)
        packed = torch.cuda.Event()
        packed.record()
        segment = _segment(credit, 0, self.slot_bytes)
        self._last = self.outbound[-1].send(segment, 0, PendingMove(packed))

    def finish_copies(self) -> None:
        _wait(self._last)

    def can_compute(self) -> bool:
        return torch.arange(1000, device=self.device).sum().item() == 499500

    def gb_per_s(self, count: int) -> float:
        """Return the speed of copies of whole staging slots, after a few as a warm-up."""
        self.queue_copies(4)
        self.finish_copies()
        start = time.perf_counter()
        self.queue_copies(count)
        self.finish_copies()
        return count * self.slot_bytes / (time.perf_counter() - start) / 1e9


def _segment(credit: int, seed: int, nbytes: int) -> Segment:
    return Segment(credit, 1, "test", 0, 0, 0, 0, seed, nbytes)


def _wait(pending: Pending) -> None:
    deadline = time.monotonic() + MAX_COPY_S
    while not pending.poll():
        assert time.monotonic() < deadline, "a copy takes too long"


@contextmanager
def remote_ipc_peer(device: int, slot_bytes: int, visible: str | None = None) -> Iterator[Remote]:
    """Run a peer in another process; `visible` is its CUDA_VISIBLE_DEVICES."""
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    with ExitStack() as stack:
        with patch.dict(os.environ, environment):
            peer = stack.enter_context(remote(IpcPeer, device, slot_bytes, method="spawn"))
        yield peer
