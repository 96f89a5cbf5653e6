"""Eight points of a transfer, in real workers: wrappers of public seams report each segment.

    exported      a plan with a job's final blocks is launched, none of them is packed
    packed        the packing is launched
    staged        the announcement is next; a one-sided transport has queued the payload's copy
    announced     the announcement is posted
    arrived       the receiver has the announcement
    unpacking     the unpacking is launched
    unpacked      the unpacking is done, but not acknowledged
    acknowledged  the acknowledgement is posted, and the sequence runs if this was its last segment

`python -P -m pagewire.tests.support.fault_points` is `pagewire` with workers that carry out the
orders in the directory that the environment variable `KV_FAULTS` names.
`KV_FAULTS_TRANSPORT=memory` replaces their transports by the one-sided `MemoryTransport`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import zmq

from pagewire.services.cli.main import app
from pagewire.shared.engine.execution.block_mover import BlockMove, PendingCheck, PendingMove
from pagewire.shared.engine.execution.executor import BlockMoves
from pagewire.shared.engine.scheduling.step import Export, StepPlan
from pagewire.shared.transfer import messages
from pagewire.shared.transfer.endpoint import kv_endpoint
from pagewire.shared.transfer.endpoint.kv_endpoint import KvEndpoint
from pagewire.shared.transfer.endpoint.receiver import KvReceiver
from pagewire.shared.transfer.endpoint.sender import KvSender
from pagewire.shared.transfer.endpoint.sender_link import SenderLink
from pagewire.shared.transfer.staging import Staging
from pagewire.shared.transfer.transports.base import (
    Inbound,
    LinkSocket,
    Outbound,
    Pending,
    Transport,
)
from pagewire.shared.transfer.transports.ipc import IpcTransport
from pagewire.shared.worker import kv, runtime
from pagewire.shared.worker.kv import open_endpoint, open_staging, open_transport
from pagewire.tests.support.fault_board import FaultBoard, Points, Segment
from pagewire.tests.support.memory_transport import MemoryTransport, make_mapped_staging
from pagewire.tests.support.own_workers import use_program

PROGRAM = "pagewire.tests.support.fault_points"
DIRECTORY = "KV_FAULTS"
TRANSPORT = "KV_FAULTS_TRANSPORT"
QUARANTINE_S = 0.5  # of one-sided transports
RESTART_DELAY_S = 0.25
_PID_BYTES = 4


class WatchedTransport:
    """A transport whose handshake also exchanges process ids."""

    def __init__(self, transport: Transport, points: Points) -> None:
        self._transport, self._points = transport, points

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def offer(self, link: int) -> bytes:
        return _with_pid(self._transport.offer(link))

    def outbound(self, link: int, offer: bytes, socket: LinkSocket) -> Outbound:
        receiver, own = _split(offer)
        watched = WatchedSocket(socket, receiver, self._points)
        return WatchedOutbound(self._transport.outbound(link, own, watched), receiver, self._points)

    def inbound(self, link: int, reply: bytes) -> Inbound:
        sender, own = _split(reply)
        return WatchedInbound(self._transport.inbound(link, own), sender, self._points)


class WatchedOutbound:
    def __init__(self, outbound: Outbound, receiver: int, points: Points) -> None:
        self._outbound, self.receiver, self._points = outbound, receiver, points

    def __getattr__(self, name: str) -> Any:
        return getattr(self._outbound, name)

    @property
    def reply(self) -> bytes:
        return _with_pid(self._outbound.reply)

    def send(self, segment: messages.Segment, slot: int, packed: PendingMove) -> Pending:
        if segment.job != messages.TEST_JOB:
            self._points.reach("packed", Segment(os.getpid(), self.receiver, segment.credit))
        return self._outbound.send(segment, slot, packed)

    def close(self) -> None:
        self._points.board.note("closed", peer=self.receiver)
        self._outbound.close()


class WatchedSocket:
    def __init__(self, socket: LinkSocket, receiver: int, points: Points) -> None:
        self._socket, self._receiver, self._points = socket, receiver, points
        self.peer = socket.peer

    def post(self, segment: messages.Segment, body: memoryview | None = None) -> Pending:
        where = Segment(os.getpid(), self._receiver, segment.credit)
        if segment.job == messages.TEST_JOB:
            return self._socket.post(segment, body)
        self._points.reach("staged", where)
        posted = self._socket.post(segment, body)
        self._points.reach("announced", where)
        return posted


class WatchedInbound:
    arrived: ClassVar[dict[int, Segment]] = {}  # of all links, by seed

    def __init__(self, inbound: Inbound, sender: int, points: Points) -> None:
        self._inbound, self._sender, self._points = inbound, sender, points

    def receive(self, segment: messages.Segment, body: zmq.Frame | None) -> Pending:
        if segment.job == messages.TEST_JOB:
            return self._inbound.receive(segment, body)
        where = self.arrived[segment.seed] = Segment(self._sender, os.getpid(), segment.credit)
        self._points.reach("arrived", where)
        received = self._inbound.receive(segment, body)
        self._points.on_arrival(where)
        return received

    def close(self) -> Pending:
        self._points.board.note("closed", peer=self._sender)
        return self._inbound.close()


class WatchedMoves:
    """A device's block moves; the seed identifies the segment that is unpacked."""

    def __init__(self, moves: BlockMoves, points: Points) -> None:
        self._moves, self._points = moves, points

    def __getattr__(self, name: str) -> Any:
        return getattr(self._moves, name)

    def unpack(self, move: BlockMove, after: int) -> Any:
        where = WatchedInbound.arrived.pop(move.seed, None)
        check = self._moves.unpack(move, after)
        if where is None:  # a link's test
            return check
        self._points.reach("unpacking", where)
        return WatchedCheck(check, partial(self._on_unpacked, where))

    def _on_unpacked(self, where: Segment) -> None:
        self._points.reach("unpacked", where)
        WatchedReceiver.unpacked.append(where)


class WatchedCheck:
    def __init__(self, check: PendingCheck, on_unpacked: Callable[[], None]) -> None:
        self._check, self._on_unpacked = check, on_unpacked

    def poll(self) -> bool:
        return self._check.poll()

    def verify(self) -> bool:
        is_intact = self._check.verify()
        self._on_unpacked()
        return is_intact


class WatchedSender(KvSender):
    """Reports which jobs' blocks are final."""

    points: ClassVar[Points]
    receivers: ClassVar[dict[str, int]] = {}  # by job

    def export(self, job: str, link: SenderLink, first_block: int, num_blocks: int) -> None:
        super().export(job, link, first_block, num_blocks)
        assert isinstance(link.outbound, WatchedOutbound)
        self.receivers[job] = link.outbound.receiver

    def after_launch(self, plan: StepPlan | None) -> bool:
        for work in () if plan is None else plan.kv:
            if isinstance(work, Export) and work.request_id in self.receivers:
                receiver = self.receivers[work.request_id]
                self.points.reach("exported", Segment(os.getpid(), receiver))
        return super().after_launch(plan)


class WatchedReceiver(KvReceiver):
    """Reports what it has acknowledged."""

    points: ClassVar[Points]
    unpacked: ClassVar[list[Segment]] = []

    def after_launch(self, plan: StepPlan | None) -> bool:
        is_busy = super().after_launch(plan)
        while self.unpacked:
            self.points.reach("acknowledged", self.unpacked.pop(0))
        return is_busy


def _with_pid(data: bytes) -> bytes:
    return os.getpid().to_bytes(_PID_BYTES, "big") + data


def _split(data: bytes) -> tuple[int, bytes]:
    return int.from_bytes(data[:_PID_BYTES], "big"), data[_PID_BYTES:]


def watch_worker(points: Points, directory: Path) -> None:
    """Make the worker in this process carry out orders."""
    in_memory = os.environ.get(TRANSPORT) == MemoryTransport.name

    def open_watched(name: str, staging: Staging, moves: BlockMoves, host: str) -> Any:
        transport: Transport
        if in_memory:
            transport = MemoryTransport(staging, directory, QUARANTINE_S)
        elif name == "ipc" and staging.memory.is_cuda:
            transport = IpcTransport(staging, QUARANTINE_S)
        else:
            transport = open_transport(name, staging, moves, host)
        return WatchedTransport(transport, points)

    async def open_watched_endpoint(*parts: Any) -> KvEndpoint:
        return await open_endpoint(*(*parts[:-1], open_watched))

    def open_watched_staging(*sizes: Any) -> tuple[Staging, WatchedMoves]:
        staging, moves = open_staging(*sizes)
        return staging, WatchedMoves(moves, points)

    WatchedSender.points = WatchedReceiver.points = points
    vars(kv).update(open_staging=open_watched_staging)
    vars(kv_endpoint).update(KvSender=WatchedSender, KvReceiver=WatchedReceiver)
    vars(runtime).update(open_endpoint=open_watched_endpoint)
    if in_memory:
        vars(kv).update(
            make_staging=lambda count, size, _device: make_mapped_staging(directory, count, size)
        )


def main() -> None:
    command = sys.argv[1]
    if command == "up":
        use_program(PROGRAM, RESTART_DELAY_S)
    elif command in ("prefill", "decode"):
        worker = sys.argv[sys.argv.index("--worker-id") + 1]
        directory = Path(os.environ[DIRECTORY])
        watch_worker(Points(FaultBoard(directory), worker), directory)
    app()


if __name__ == "__main__":
    main()
