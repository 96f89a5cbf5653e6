"""A device and a carrier that do at the worst moment what real ones may do."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import torch
import zmq

from pagewire.kernels.reference.kv_pack import pack_blocks, unpack_blocks
from pagewire.shared.base.errors import TransferError
from pagewire.shared.engine.execution.block_mover import PendingCheck, PendingMove
from pagewire.shared.engine.execution.executor import BlockMoves
from pagewire.shared.transfer.carriers.base import Carrier, Inbound, LinkSocket, Outbound, Pending
from pagewire.shared.transfer.messages import Segment
from pagewire.shared.transfer.staging import Staging
from pagewire.tests.support.fake_device import FakeDevice


class LateMove(PendingCheck):
    """A move that runs when `is_done` is called, after all moves that were launched before it."""

    def __init__(self, device: LateDevice, work: Callable[[], object]) -> None:
        self.corrupt = torch.zeros((), dtype=torch.int64)
        super().__init__(self.corrupt, None)
        self.device, self.work = device, work
        self.has_run = False

    def is_done(self) -> bool:
        if self.device.has_moved:
            self.device.run_moves()
        return self.has_run


@dataclass
class LateDevice(FakeDevice):
    """Runs moves as late as possible: when somebody asks whether they are done.

    Moves that are launched while `has_moved` is false run later, on blocks and staging slots that
    may have other owners by then.
    """

    fails_to_move: Exception | None = None  # raised by the next packing or unpacking
    moves: deque[LateMove] = field(default_factory=deque)
    lock: threading.Lock = field(default_factory=threading.Lock)  # the other side may ask, too

    def pack(
        self, block_ids: list[int], groups: range, staging: torch.Tensor, seed: int, after: int
    ) -> LateMove:
        if after:  # else it is a link's test, of any block in any state
            self._start(block_ids, after)
            self.moved.append((block_ids, groups, after))
        copy_list = self._copy_list(block_ids, groups, seed)
        return self.queue(lambda: pack_blocks(self._pool(), copy_list, staging))

    def unpack(
        self, staging: torch.Tensor, block_ids: list[int], groups: range, seed: int, after: int
    ) -> LateMove:
        self._start(block_ids, after)
        copy_list = self._copy_list(block_ids, groups, seed)

        def write() -> None:
            pool = self._pool()
            unpack_blocks(staging, pool, copy_list, move.corrupt)
            rows = pool.view(self.num_blocks, -1)[block_ids].tolist()
            for block, row in zip(block_ids, rows, strict=True):
                self.cells[block] = [None if cell == -1 else cell for cell in row]

        move = self.queue(write)
        return move

    def queue(self, work: Callable[[], object]) -> LateMove:
        move = LateMove(self, work)
        self.moves.append(move)
        return move

    def fence(self) -> None:
        self.run_moves()

    def run_moves(self) -> None:
        with self.lock:
            while self.moves:
                move = self.moves.popleft()
                move.work()
                move.has_run = True

    def _start(self, block_ids: list[int], after: int) -> None:
        error, self.fails_to_move = self.fails_to_move, None
        if error is not None:
            raise error
        self._check_after(block_ids, after)


class HeldBack:
    """Something pending that does not end while it is held."""

    def __init__(self, inner: Pending, is_held: Callable[[], bool]) -> None:
        self.inner, self.is_held = inner, is_held

    def is_done(self) -> bool:
        return self.inner.is_done() and not self.is_held()


class Failed:
    """Something pending that has failed."""

    def is_done(self) -> bool:
        raise TransferError("the wire is cut")


@dataclass
class FaultyCarrier:
    """Wraps a carrier; a test decides what goes wrong.

    Attributes:
        num_corrupt: number of next payloads in which a bit is flipped.
        fails: operation that fails once: "offer", "outbound", "inbound", "send", "sent" or
            "receive"; empty for none.
        holds_writes: whether sends do not end, so that their staging slots stay in use.
        holds_payloads: whether announced payloads do not arrive.
        holds_slots: whether something may still write to staging slots of links that have ended.
        num_open: number of halves of links that have not been closed.
    """

    inner: Carrier
    staging: Staging
    moves: BlockMoves
    num_corrupt: int = 0
    fails: str = ""
    holds_writes: bool = False
    holds_payloads: bool = False
    holds_slots: bool = False
    num_open: int = 0
    name: ClassVar[str] = "faulty"

    def offer(self, link: int) -> bytes:
        self.fail_at("offer")
        return self.inner.offer(link)

    def withdraw(self, link: int) -> None:
        self.inner.withdraw(link)

    def inbound(self, link: int, reply: bytes) -> Inbound:
        self.fail_at("inbound")
        inner = self.inner.inbound(link, reply)
        self.num_open += 1
        return FaultyInbound(self, inner)

    def outbound(self, link: int, offer: bytes, socket: LinkSocket) -> Outbound:
        self.fail_at("outbound")
        inner = self.inner.outbound(link, offer, socket)
        self.num_open += 1
        return FaultyOutbound(self, inner)

    def fds(self) -> list[int]:
        return self.inner.fds()

    def poll(self) -> bool:
        return self.inner.poll()

    def close(self) -> None:
        self.inner.close()

    def fail_at(self, where: str) -> None:
        if self.fails == where:
            self.fails = ""
            raise TransferError("the wire is cut")


@dataclass
class FaultyOutbound:
    carrier: FaultyCarrier
    inner: Outbound

    @property
    def reply(self) -> bytes:
        return self.inner.reply

    def send(self, segment: Segment, slot: int, packed: PendingMove) -> Pending:
        carrier = self.carrier
        carrier.fail_at("send")
        if carrier.num_corrupt:
            carrier.num_corrupt -= 1
            byte = carrier.staging.buffers[slot][segment.nbytes - 1 :][:1]
            packed = carrier.moves.queue(lambda: byte.bitwise_xor_(4))
        sent = self.inner.send(segment, slot, packed)
        if carrier.fails == "sent":
            carrier.fails = ""
            return Failed()
        return HeldBack(sent, lambda: carrier.holds_writes)

    def close(self) -> None:
        self.carrier.num_open -= 1
        self.inner.close()


@dataclass
class FaultyInbound:
    carrier: FaultyCarrier
    inner: Inbound

    def receive(self, segment: Segment, body: zmq.Frame | None) -> Pending:
        received = self.inner.receive(segment, body)
        if self.carrier.fails == "receive":
            self.carrier.fails = ""
            return Failed()
        return HeldBack(received, lambda: self.carrier.holds_payloads)

    def close(self) -> Pending:
        self.carrier.num_open -= 1
        return HeldBack(self.inner.close(), lambda: self.carrier.holds_slots)
