"""A one-sided carrier without a GPU: senders map the receiver's staging, which lies in a file.

Like CUDA IPC, it lets a sender that was stopped write to a slot that is another one's by then.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import ClassVar

import msgspec
import torch
import zmq

from pagewire.shared.engine.block_mover import PendingMove
from pagewire.shared.kv.carriers.base import DONE, LinkSocket, Pending
from pagewire.shared.kv.messages import Segment
from pagewire.shared.kv.peer_process import Process, ProcessWatch, Quarantine, this_process
from pagewire.shared.kv.staging import Staging


class _Offer(msgspec.Struct):
    path: str
    num_slots: int
    slot_bytes: int


def make_mapped_staging(directory: Path, num_slots: int, slot_bytes: int) -> Staging:
    """Return staging that other processes may map."""
    offer = _Offer(str(directory / f"staging-{os.getpid()}"), num_slots, slot_bytes)
    return Staging(_map(offer), slot_bytes)


class MemoryCarrier:
    """Copies into the staging of others, which `make_mapped_staging` has made in `directory`."""

    name: ClassVar[str] = "memory"
    should_restart = False

    def __init__(self, staging: Staging, directory: Path, quarantine_s: float) -> None:
        self._staging, self._quarantine_s = staging, quarantine_s
        path = str(directory / f"staging-{os.getpid()}")
        self._offer = _Offer(path, staging.num_slots, staging.slot_bytes)

    def offer(self, link: int) -> bytes:
        return msgspec.msgpack.encode(self._offer)

    def withdraw(self, link: int) -> None:
        pass

    def inbound(self, link: int, reply: bytes) -> _Inbound:
        return _Inbound(msgspec.msgpack.decode(reply, type=Process), self._quarantine_s)

    def outbound(self, link: int, offer: bytes, socket: LinkSocket) -> _Outbound:
        target = _map(msgspec.msgpack.decode(offer, type=_Offer))
        return _Outbound(self._staging, target, socket)

    def fds(self) -> list[int]:
        return []

    def poll(self) -> bool:
        return False

    def close(self) -> None:
        pass


class _Outbound:
    def __init__(self, staging: Staging, target: torch.Tensor, socket: LinkSocket) -> None:
        self._staging, self._target, self._socket = staging, target, socket
        self.reply = msgspec.msgpack.encode(this_process())

    def stage(self, slot: int, credit: int, nbytes: int, packed: PendingMove) -> Pending | None:
        self._target[credit, :nbytes] = self._staging.buffers[slot][:nbytes]
        return None

    def send(self, segment: Segment, slot: int) -> Pending:
        return self._socket.post(segment)

    def lane(self) -> str:
        return "memory"

    def close(self) -> None:
        pass


class _Inbound:
    def __init__(self, sender: Process, quarantine_s: float) -> None:
        self._watch, self._quarantine_s = ProcessWatch(sender), quarantine_s

    def receive(self, segment: Segment, body: zmq.Frame | None) -> Pending:
        return DONE

    def close(self) -> Pending:
        return Quarantine(self._watch, time.monotonic() + self._quarantine_s, time.monotonic)


def _map(offer: _Offer) -> torch.Tensor:
    shape = (offer.num_slots, offer.slot_bytes)
    size = offer.num_slots * offer.slot_bytes
    return torch.from_file(offer.path, shared=True, size=size, dtype=torch.uint8).view(shape)
