"""Payloads between the GPUs of one host, or two workers of one GPU, by CUDA IPC.

One-sided: the sender maps the receiver's staging and queues a copy into it right after its packing,
by a copy engine, and announces the segment at once. The copy ends with an event that the receiver's
process has opened and queries. No port is opened.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, TypeVar

import msgspec
import torch
import zmq
from msgspec import Meta

from pagewire.shared.base.errors import UNDECODABLE, TransferError
from pagewire.shared.engine.execution.block_mover import PendingMove
from pagewire.shared.kv import device_memory
from pagewire.shared.kv.device_memory import HANDLE_BYTES
from pagewire.shared.transfer.messages import MAX_CREDITS, Segment
from pagewire.shared.transfer.peer_process import Process, Quarantine, this_process
from pagewire.shared.transfer.staging import Staging
from pagewire.shared.transfer.transports.base import (
    Inbound,
    LinkSocket,
    Outbound,
    Pending,
    Transport,
    poll_settled,
)

logger = logging.getLogger(__name__)

# When a link ends, its sender may be stopped (SIGSTOP) with copies queued, which are made later. If
# they come after this time, the segments' seeds reveal it.
QUARANTINE_S = 10.0
_POLL_INTERVAL_S = 0.01  # of the last copies, before their mapping ends

# NVLink sleeps after 20 to 50 ms without traffic, and takes 0.17 ms to wake up. A copy of 256 bytes
# does not wake it (H200).
_IDLE_S = 0.01
_WAKE_BYTES = 1 << 20

_T = TypeVar("_T")
_Handle = Annotated[bytes, Meta(min_length=HANDLE_BYTES, max_length=HANDLE_BYTES)]


class IpcOffer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Says how a sender can map the receiver's staging memory.

    Attributes:
        receiver: the receiver's process.
        gpu: UUID of the GPU.
        handle: CUDA IPC handle of the memory.
        stride: bytes from one staging slot to the next.
    """

    receiver: Process
    gpu: Annotated[str, Meta(max_length=64)]
    handle: _Handle
    stride: Annotated[int, Meta(gt=0, lt=2**40)]
    num_slots: Annotated[int, Meta(gt=0, le=MAX_CREDITS)]


class IpcReply(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A sender's process, and CUDA IPC handles of its events, one for the copies of each credit."""

    sender: Process
    events: Annotated[list[_Handle], Meta(max_length=MAX_CREDITS)]


@dataclass(slots=True, eq=False)
class IpcTransport(Transport):
    """Copies payloads from this worker's staging into other workers' staging on this host.

    Attributes:
        staging: this worker's; a receiver's must come from `device_memory.allocate`.
        quarantine_s: how long the staging slots of an ended link stay unused, unless the sender's
            process ends earlier.
    """

    name: ClassVar[str] = "ipc"
    staging: Staging
    quarantine_s: float = QUARANTINE_S
    clock: Callable[[], float] = time.monotonic
    # One for each inbound link; its time begins when the link ends.
    _quarantines: list[Quarantine] = field(default_factory=list)
    # Events that ended links left. They are used again and never destroyed, because receivers may
    # still have them open.
    _spare_ends: list[torch.cuda.Event] = field(default_factory=list)

    def offer(self, link: int) -> bytes:
        """Return the address of this worker's staging; the same for each link.

        Raises:
            TransferError: staging is not GPU memory that others may map.
        """
        memory = self.staging.memory
        handle, gpu = device_memory.export_handle(memory), _uuid(memory.device.index)
        num_slots, stride = memory.shape
        return msgspec.msgpack.encode(IpcOffer(this_process(), gpu, handle, stride, num_slots))

    def inbound(self, link: int, reply: bytes) -> Inbound:
        """Return the receiver's half of a link.

        Raises:
            TransferError: the reply makes no sense, or its events cannot be opened.
        """
        remote, device = _decode(reply, IpcReply), self.staging.memory.device
        try:
            events = [torch.cuda.Event.from_ipc_handle(device, data) for data in remote.events]
        except RuntimeError as exc:
            raise TransferError(f"a sender's events cannot be opened: {exc}") from exc
        quarantine = Quarantine(self.quarantine_s, self.clock, remote.sender)
        self._quarantines = [known for known in self._quarantines if not known.is_over]
        self._quarantines.append(quarantine)
        return _IpcInbound(quarantine, [_Copy(event) for event in events])

    def outbound(self, link: int, offer: bytes, socket: LinkSocket) -> Outbound:
        """Return the sender's half of a link.

        Raises:
            TransferError: the receiver's staging cannot be mapped; says why.
        """
        remote, here = _decode(offer, IpcOffer), this_process()
        _check_is_near(remote.receiver, here)
        device = self.staging.memory.device
        _check_peer_access(remote.gpu, device)
        try:
            address = device_memory.map_handle(remote.handle, device)
        except TransferError as exc:
            raise TransferError(f"{exc}; {_advice(remote, here)}") from exc
        return _IpcOutbound(self.staging, socket, remote, address, self._spare_ends)

    def close(self) -> None:
        """Stop watching senders. The staging stays, because they may still have it mapped."""
        for quarantine in self._quarantines:
            quarantine.close()


@dataclass(frozen=True, slots=True)
class _Copy:
    """The newest copy of a credit, until its event at the end."""

    end: torch.cuda.Event

    def poll(self) -> bool:
        try:
            return bool(self.end.query())
        except RuntimeError as exc:
            raise TransferError(f"a copy of KV blocks has failed: {exc}") from exc


@dataclass(slots=True, eq=False)
class _IpcOutbound(Outbound):
    """The sender's half of a link, which copies into the receiver's memory.

    Attributes:
        address: of the receiver's staging.
        spare_ends: the transport's events that no link uses.
        reply: the process that writes, and its events.
    """

    staging: Staging
    socket: LinkSocket
    offer: IpcOffer
    address: int
    spare_ends: list[torch.cuda.Event]
    reply: bytes = field(init=False)
    _stream: torch.cuda.Stream = field(init=False)
    # At the end of a copy, by credit.
    _ends: list[torch.cuda.Event] = field(default_factory=list)
    _is_open: bool = True
    _last_s: float = 0.0

    def __post_init__(self) -> None:
        try:
            # Of its own: the next segment is packed while this one crosses.
            self._stream = torch.cuda.Stream(self.staging.memory.device)
            missing = range(len(self.spare_ends), self.offer.num_slots)
            self.spare_ends += [torch.cuda.Event(interprocess=True) for _ in missing]
            self._ends = [self.spare_ends.pop() for _ in range(self.offer.num_slots)]
            with torch.cuda.device(self.staging.memory.device):
                handles = [end.ipc_handle() for end in self._ends]
        except RuntimeError as exc:
            self.close()
            raise TransferError(f"events cannot be shared with another process: {exc}") from exc
        self.reply = msgspec.msgpack.encode(IpcReply(this_process(), handles))

    def send(self, segment: Segment, slot: int, packed: PendingMove) -> Pending:
        """Queue a payload's copy into the receiver's staging slot, then announce it.

        Raises:
            TransferError: there is no such staging slot, the link has ended, or CUDA refuses.
        """
        if not self._is_open:
            raise TransferError("the link has ended")
        offer, credit, nbytes = self.offer, segment.credit, segment.nbytes
        if credit >= offer.num_slots or nbytes > offer.stride:
            raise TransferError(
                f"{nbytes} bytes for staging slot {credit} of a receiver that has "
                f"{offer.num_slots} of {offer.stride}"
            )
        address = self.address + credit * offer.stride
        source = self.staging.buffers[slot].data_ptr()
        if (now_s := time.monotonic()) > self._last_s + _IDLE_S:
            # Wakes NVLink while the step still runs; the payload replaces these bytes.
            device_memory.queue_copy(address, source, min(nbytes, _WAKE_BYTES), self._stream)
        self._last_s = now_s
        if packed.end is not None:
            self._stream.wait_event(packed.end)
        device_memory.queue_copy(address, source, nbytes, self._stream)
        self._ends[credit].record(self._stream)
        self.socket.post(segment)
        return _Copy(self._ends[credit])

    def close(self) -> None:
        """End the mapping after the queued copies, in a thread: this waits for the device."""
        if self._is_open:
            self._is_open = False
            threading.Thread(target=self._unmap, name="kv-unmap", daemon=True).start()

    def _unmap(self) -> None:
        while not all(poll_settled(_Copy(end)) for end in self._ends):
            time.sleep(_POLL_INTERVAL_S)
        self.spare_ends += self._ends
        try:
            device_memory.unmap(self.address, self.staging.memory.device)
        except TransferError as exc:
            pid = self.offer.receiver.pid
            logger.warning("cannot unmap the KV staging of process %d: %s", pid, exc)


class _IpcInbound(Inbound):
    """The receiver's half; has the sender's copies by credit."""

    def __init__(self, quarantine: Quarantine, copies: list[_Copy]) -> None:
        self._quarantine, self._copies = quarantine, copies

    def receive(self, segment: Segment, body: zmq.Frame | None) -> Pending:
        """Return the payload's copy, which was queued before the announcement."""
        if segment.credit >= len(self._copies):
            raise TransferError(f"the sender has no event for credit {segment.credit}")
        return self._copies[segment.credit]

    def close(self) -> Pending:
        """End the link; the sender's queued copies may still be made."""
        return self._quarantine.begin()


def _decode(data: bytes, kind: type[_T]) -> _T:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except UNDECODABLE as exc:
        raise TransferError(f"malformed data of a peer for CUDA IPC: {exc}") from exc


def _check_is_near(receiver: Process, here: Process) -> None:
    if receiver.boot != here.boot:
        raise TransferError("the receiver is on another host")
    if receiver.ipc_namespace != here.ipc_namespace:
        raise TransferError(
            "the receiver is in another IPC namespace: give both containers `ipc: host` and "
            "`pid: host`, or one the other's (`ipc: service:NAME`, `pid: service:NAME`)"
        )


def _check_peer_access(gpu: str, device: torch.device) -> None:
    """Refuse a GPU that this one cannot write to, where this process sees it."""
    for index in range(torch.cuda.device_count()):
        is_receivers = index != device.index and _uuid(index) == gpu
        if is_receivers and not torch.cuda.can_device_access_peer(device.index, index):
            raise TransferError(
                f"GPU {device.index} has no peer access to the receiver's GPU {index} ({gpu})"
            )


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def _advice(offer: IpcOffer, here: Process) -> str:
    """Return why memory of this host may not be mapped, and what to do."""
    if offer.receiver.pid_namespace != here.pid_namespace:
        return (
            "the receiver is in another PID namespace: give both containers `pid: host`, or one "
            "the other's (`pid: service:NAME`)"
        )
    if offer.gpu in map(_uuid, range(torch.cuda.device_count())):
        return "the receiver may have ended"
    return (
        f"the receiver's GPU {offer.gpu} may not be visible to this process "
        "(CUDA_VISIBLE_DEVICES, a container's device_ids)"
    )
