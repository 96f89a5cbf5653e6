"""A one-sided transport without a GPU: senders map the receiver's staging, which lies in a file.

As with CUDA IPC, a sender that was stopped may later write to a slot that another sender has.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import ClassVar

import msgspec
import torch

from pagewire.shared.engine.execution.block_mover import PendingMove
from pagewire.shared.transfer.messages import Segment
from pagewire.shared.transfer.peer_process import Process, Quarantine, this_process
from pagewire.shared.transfer.staging import Staging
from pagewire.shared.transfer.transports.base import (
    Inbound,
    LinkSocket,
    Outbound,
    Pending,
    Transport,
)


class _Offer(msgspec.Struct):
    path: str
    num_slots: int
    slot_bytes: int


def make_mapped_staging(directory: Path, num_slots: int, slot_bytes: int) -> Staging:
    """Return staging that other processes may map."""
    offer = _Offer(str(directory / f"staging-{os.getpid()}"), num_slots, slot_bytes)
    return Staging(_map(offer), slot_bytes)


class MemoryTransport(Transport):
    """Copies into the staging of others, which `make_mapped_staging` has made in `directory`."""

    name: ClassVar[str] = "memory"

    def __init__(self, staging: Staging, directory: Path, quarantine_s: float) -> None:
        self._staging, self._quarantine_s = staging, quarantine_s
        path = str(directory / f"staging-{os.getpid()}")
        self._offer = _Offer(path, staging.num_slots, staging.slot_bytes)

    def offer(self, link: int) -> bytes:
        return msgspec.msgpack.encode(self._offer)

    def inbound(self, link: int, reply: bytes) -> _Inbound:
        sender = msgspec.msgpack.decode(reply, type=Process)
        return _Inbound(Quarantine(self._quarantine_s, process=sender))

    def outbound(self, link: int, offer: bytes, socket: LinkSocket) -> _Outbound:
        target = _map(msgspec.msgpack.decode(offer, type=_Offer))
        return _Outbound(self._staging, target, socket)


class _Outbound(Outbound):
    def __init__(self, staging: Staging, target: torch.Tensor, socket: LinkSocket) -> None:
        self._staging, self._target, self._socket = staging, target, socket

    @property
    def reply(self) -> bytes:
        return msgspec.msgpack.encode(this_process())

    def send(self, segment: Segment, slot: int, packed: PendingMove) -> Pending:
        nbytes = segment.nbytes
        self._target[segment.credit, :nbytes] = self._staging.buffers[slot][:nbytes]
        return self._socket.post(segment)


class _Inbound(Inbound):
    def __init__(self, quarantine: Quarantine) -> None:
        self._quarantine = quarantine

    def close(self) -> Pending:
        self._quarantine.begin()
        return self._quarantine


def _map(offer: _Offer) -> torch.Tensor:
    shape = (offer.num_slots, offer.slot_bytes)
    size = offer.num_slots * offer.slot_bytes
    return torch.from_file(offer.path, shared=True, size=size, dtype=torch.uint8).view(shape)
