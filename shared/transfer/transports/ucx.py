"""Payloads over UCX: GPU memory by cuda_ipc within a host, the rest by TCP. Two-sided.

Each link has a UCX worker of its own on both sides; an offer is the address of the receiver's. The
64 bits of a payload's tag are

    63..40: link | 39..32: credit | 31..0: use

If a receiver is stopped until the sender has given up, it may read a staging slot that already has
another payload. The checksums reveal that.
"""

from __future__ import annotations

import logging
import select
import time
from functools import partial
from typing import ClassVar

import torch
import zmq

from pagewire.shared.base.errors import TransferError
from pagewire.shared.engine.execution.block_mover import PendingMove
from pagewire.shared.transfer.messages import Segment
from pagewire.shared.transfer.peer_process import Quarantine
from pagewire.shared.transfer.staging import Staging
from pagewire.shared.transfer.transports.base import (
    DONE,
    Inbound,
    LinkSocket,
    Outbound,
    Pending,
    Then,
    Transport,
)
from pagewire.shared.transfer.transports.ucx_settings import listens_on
from pagewire.shared.transfer.transports.ucx_worker import (
    MAX_ABANDONED,
    UcxLibrary,
    UcxRequest,
    UcxWorker,
)

logger = logging.getLogger(__name__)

# Copies of a GPU that had been launched when their worker was abandoned have ended after this.
QUARANTINE_S = 1.0
# UCX may fail to wake us (a known bug), so all workers are progressed at least this often.
TICK_S = 0.2
_LINK_BITS, _CREDIT_BITS, _USE_BITS = 24, 8, 32


class UcxTransport(Transport):
    """Sends payloads over UCX, with one UCX worker for each link.

    Workers with a payload under way are progressed at each poll; the engine's thread polls often
    meanwhile. The others are armed and cost nothing until their file descriptor is readable.

    Args:
        staging: this worker's staging slots.
        settings: UCX's settings, from `ucx_settings`.

    Attributes:
        library: counts the workers of links that ended in mid-transfer.

    Raises:
        ConfigError: ucxx does not load.
        TransferError: UCX does not start.
    """

    name: ClassVar[str] = "ucx"

    def __init__(self, staging: Staging, settings: dict[str, str]) -> None:
        if staging.memory.is_cuda:  # UCX works in the thread's current CUDA context
            torch.cuda.set_device(staging.memory.device)
            torch.cuda.synchronize(staging.memory.device)
        self.staging = staging
        self.library = UcxLibrary(settings)
        self._offered: dict[int, UcxWorker] = {}  # by link
        self._epoll = select.epoll()  # readable when an armed worker has something to do
        self._by_fd: dict[int, UcxWorker] = {}  # that may be progressed
        self._unarmed: set[UcxWorker] = set()  # of these, those that are not armed
        self._next_tick_s = 0.0
        logger.warning(
            "UCX listens %s: anyone who reaches its TCP port there can end this worker, and KV "
            "blocks cross unencrypted; KV transport 'zmq' has neither risk",
            listens_on(settings),
        )

    @property
    def should_restart(self) -> bool:
        """Whether this process has no UCX for further links, and so should drain and end."""
        return self.library.num_abandoned >= MAX_ABANDONED

    def offer(self, link: int) -> bytes:
        """Return the address of a new UCX worker.

        Raises:
            TransferError: UCX cannot make one, or too many are broken.
        """
        worker = self._offered[link] = self._new_worker()
        return worker.address

    def inbound(self, link: int, reply: bytes) -> Inbound:
        """Return the receiver's half of a link that was offered."""
        return _UcxInbound(self, link, self._offered.pop(link))

    def withdraw(self, link: int) -> None:
        """Free the worker of an offer."""
        if link in self._offered:
            self.end(self._offered.pop(link))

    def outbound(self, link: int, offer: bytes, socket: LinkSocket) -> Outbound:
        """Return the sender's half of a link.

        Raises:
            TransferError: UCX knows no route to the receiver, or too many workers are broken.
        """
        if not offer:
            raise TransferError("the receiver's UCX address is empty")
        worker = self._new_worker()
        try:
            worker.connect(offer)
        except TransferError:
            self.end(worker)
            raise
        return _UcxOutbound(self, link, worker, socket)

    def _new_worker(self) -> UcxWorker:
        worker = self.library.new_worker()
        self._epoll.register(worker.fd, select.EPOLLIN)
        self._by_fd[worker.fd] = worker
        self._unarmed.add(worker)
        return worker

    def watch(self, request: UcxRequest) -> UcxRequest:
        """Progress a request's worker at each poll, until nothing is under way; returns it."""
        self._unarmed.add(request.worker)
        return request

    def end(self, worker: UcxWorker) -> bool:
        """Free a worker, or abandon it; returns whether it was freed."""
        self._forget(worker)
        return worker.close()

    def _forget(self, worker: UcxWorker) -> None:
        """Stop progressing a UCX worker, and stop watching its file descriptor."""
        if self._by_fd.pop(worker.fd, None) is not None:
            self._epoll.unregister(worker.fd)
        self._unarmed.discard(worker)

    def fds(self) -> list[int]:
        """One file descriptor for all workers."""
        return [self._epoll.fileno()]

    def poll(self) -> bool:
        """Progress the workers that have something to do; returns whether anything has happened."""
        now = time.monotonic()
        if now >= self._next_tick_s:
            self._next_tick_s = now + TICK_S
            self._unarmed.update(self._by_fd.values())
        else:
            self._unarmed.update(self._by_fd[fd] for fd, _ in self._epoll.poll(0))
        polled = [self._poll(worker) for worker in list(self._unarmed)]
        return any(polled)

    def _poll(self, worker: UcxWorker) -> bool:
        has_happened = worker.poll()
        if worker.problem is None and not worker.under_way:
            if worker.arm():
                self._unarmed.discard(worker)
            else:
                has_happened = True  # to be polled once more before the thread sleeps
        if worker.problem is not None:
            self._forget(worker)
        return has_happened

    def close(self) -> None:
        """Free offers that no sender has chosen, and the file descriptor."""
        for link in list(self._offered):
            self.withdraw(link)
        self._epoll.close()


class _UcxOutbound(Outbound):
    def __init__(
        self, transport: UcxTransport, link: int, worker: UcxWorker, socket: LinkSocket
    ) -> None:
        self._transport, self._link, self._worker, self._socket = transport, link, worker, socket

    def send(self, segment: Segment, slot: int, packed: PendingMove) -> Pending:
        """Announce a payload at once, so that the receiver is ready for it; send it when packed."""
        self._socket.post(segment)
        return Then(packed, partial(self._begin, segment, slot))

    def _begin(self, segment: Segment, slot: int) -> Pending:
        buffer = self._transport.staging.buffers[slot]
        request = self._worker.send(buffer, segment.nbytes, _tag(self._link, segment))
        return self._transport.watch(request)

    def close(self) -> None:
        """Free the worker, or abandon it if a payload is under way."""
        self._transport.end(self._worker)


class _UcxInbound(Inbound):
    def __init__(self, transport: UcxTransport, link: int, worker: UcxWorker) -> None:
        self._transport, self._link, self._worker = transport, link, worker

    def receive(self, segment: Segment, body: zmq.Frame | None) -> Pending:
        """Begin to receive a payload into its staging slot."""
        buffer = self._transport.staging.buffers[segment.credit]
        request = self._worker.receive(buffer, segment.nbytes, _tag(self._link, segment))
        return self._transport.watch(request)

    def close(self) -> Pending:
        """Free the worker, or abandon it if a payload is under way; may wait for `CLOSING_S`."""
        return DONE if self._transport.end(self._worker) else Quarantine(QUARANTINE_S).begin()


def _tag(link: int, segment: Segment) -> int:
    link &= (1 << _LINK_BITS) - 1
    use = segment.use & (1 << _USE_BITS) - 1
    return (link << _CREDIT_BITS | segment.credit) << _USE_BITS | use
