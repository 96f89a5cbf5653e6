"""One worker: an engine over a fake device, with its half of an endpoint."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from pagewire.shared.control.channel import ClusterKeys
from pagewire.shared.control.protocol import KvHello
from pagewire.shared.engine.core import EngineCore
from pagewire.shared.engine.scheduling.sequence import Sequence
from pagewire.shared.kv.packing import packed_bytes
from pagewire.shared.transfer.endpoint.credits import StagingSlotState
from pagewire.shared.transfer.endpoint.receiver import KvReceiver
from pagewire.shared.transfer.endpoint.receiver_link import ReceiverLink
from pagewire.shared.transfer.endpoint.sender import KvSender
from pagewire.shared.transfer.endpoint.sockets import KvSockets, ReceiverSocket
from pagewire.shared.transfer.staging import Staging, make_staging
from pagewire.tests.support.fake_device import FakeDevice, fake_layout
from pagewire.tests.support.fake_engine import make_core, make_sequence
from pagewire.tests.support.kv_carriers import BY_NAME, FaultyCarrier, open_carriers
from pagewire.tests.support.kv_layouts import model_identity

HOST = "127.0.0.1"
BLOCK_SIZE = 4
LAYOUT = fake_layout(BLOCK_SIZE)
IDENTITY = model_identity(block_size=BLOCK_SIZE)
TIMEOUT_S = 5.0  # of endpoints, by the test's clock
KINDS = tuple(BY_NAME)
CARRIERS = pytest.mark.parametrize("kind", KINDS)


@dataclass
class Clock:
    """Stands still unless a test moves it."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass(eq=False)
class Side(ABC):
    """An engine with its half of an endpoint, which `open` makes.

    Attributes:
        kinds: names of its carriers.
        engine: arguments of `make_core`.
        keys: of its cluster; None: whoever has a link's token may connect.
        timeout_s: of its connections, and of segments.
        lost: links that have ended by themselves, and the reasons.
        is_dead: whether its process has ended.
        worked: whether the last iteration did anything.
    """

    name: str
    kinds: tuple[str, ...]
    num_slots: int
    blocks_per_slot: int
    engine: dict[str, Any]
    keys: ClusterKeys | None = None
    timeout_s: float = TIMEOUT_S
    core: EngineCore = field(init=False)
    device: FakeDevice = field(init=False)
    staging: Staging = field(init=False)
    carriers: dict[str, FaultyCarrier] = field(init=False)
    lost: list[tuple[object, str]] = field(default_factory=list)
    is_dead: bool = False
    worked: bool = False

    def __post_init__(self) -> None:
        self.core, self.device = make_core(block_size=BLOCK_SIZE, **self.engine)
        slot_bytes = packed_bytes(LAYOUT, self.blocks_per_slot)
        self.staging = make_staging(self.num_slots, slot_bytes, torch.device("cpu"))
        self.carriers = open_carriers(self.kinds, self.staging, self.device)
        self.sockets = KvSockets(self.keys, slot_bytes, self.timeout_s)

    def parts(self) -> dict[str, Any]:
        """Return what both halves of an endpoint are made of."""
        return {
            "core": self.core,
            "moves": self.device,
            "staging": self.staging,
            "layout": LAYOUT,
            "carriers": self.carriers,
            "on_link_lost": lambda link, reason: self.lost.append((link, reason)),
        }

    @abstractmethod
    def open(self, **options: Any) -> None:
        """Open the half, with further arguments of its class."""

    @property
    def carrier(self) -> FaultyCarrier:
        """The first carrier."""
        return next(iter(self.carriers.values()))

    def add(self, request_id: str, prompt: list[int], max_tokens: int = 4) -> Sequence:
        """Add a sequence that has nothing to do with transfers."""
        sequence = make_sequence(request_id, prompt, max_tokens=max_tokens)
        self.core.add(sequence)
        return sequence

    def close(self) -> None:
        """End, as the worker's process does."""
        if not self.is_dead:
            self.is_dead = True
            self.endpoint.close_all()
            for carrier in self.carriers.values():
                carrier.close()
            self.sockets.close()

    @property
    @abstractmethod
    def endpoint(self) -> KvSender | KvReceiver:
        """The side's half of the endpoint."""

    def held(self) -> list[str]:
        """Describe what is held in the engine."""
        scheduler = self.core.scheduler
        scheduler.check_integrity()
        used = scheduler.pool.counts().used
        held = [f"{used} blocks of {self.name}"] if used else []
        return held + [f"{s.request_id} on {self.name}" for s in scheduler.holders()]


@dataclass(eq=False)
class PrefillSide(Side):
    """A prefill worker.

    Attributes:
        failed: jobs that the sender dropped, and why.
    """

    sender: KvSender = field(init=False)
    failed: dict[str, str] = field(default_factory=dict)

    def open(self, **options: Any) -> None:
        """Open the sender."""
        parts = self.parts() | {"sockets": self.sockets, "timeout_s": self.timeout_s}
        self.sender = KvSender(**parts, **options)
        self.core.hooks.append(self.sender)

    @property
    def endpoint(self) -> KvSender:
        return self.sender

    def held(self) -> list[str]:
        sender, held = self.sender, super().held()
        if used := self.staging.num_slots - self.staging.num_free:
            held.append(f"{used} staging slots of {self.name}")
        if sender.num_jobs:
            held.append(f"{sender.num_jobs} jobs of {self.name}")
        in_use = sum(len(link.credits.in_use) for link in sender.links)
        return [*held, f"{in_use} credits in use by {self.name}"] if in_use else held


@dataclass(eq=False)
class DecodeSide(Side):
    """A decode worker.

    Attributes:
        tested: links whose test has arrived.
    """

    receiver: KvReceiver = field(init=False)
    tested: list[ReceiverLink] = field(default_factory=list)

    def open(self, **options: Any) -> None:
        """Open the receiver."""
        socket = ReceiverSocket(self.sockets, HOST, HOST)
        parts = self.parts() | {"socket": socket, "on_link_tested": self.tested.append}
        self.receiver = KvReceiver(**parts, **options)
        self.core.hooks.append(self.receiver)

    @property
    def endpoint(self) -> KvReceiver:
        return self.receiver

    @property
    def is_receiving(self) -> bool:
        """Whether a segment has been announced and not acknowledged."""
        return self.receiver.credits.count(StagingSlotState.FILLED) > 0

    def held(self) -> list[str]:
        held = super().held()
        for state in (StagingSlotState.FILLED, StagingSlotState.QUARANTINED):
            if count := self.receiver.credits.count(state):
                held.append(f"{count} {state.name} staging slots of {self.name}")
        return held


def hello(**changes: Any) -> KvHello:
    """Return the message by which a decode worker opens a link; nobody listens at its endpoint."""
    fields = {
        "worker_id": "decode-0",
        "epoch": 1,
        "model_identity": IDENTITY,
        "layout": LAYOUT,
        "link": 1,
        "token": bytes(16),
        "endpoint": "tcp://127.0.0.1:1",
        "carriers": {"zmq": b""},
        "slot_bytes": 1 << 16,
    }
    return KvHello(**(fields | changes))


def hello_of(decode: DecodeSide, link: ReceiverLink) -> KvHello:
    """Return the message by which a side opens a link."""
    return hello(
        worker_id=decode.name,
        link=link.number,
        token=link.token,
        endpoint=decode.receiver.socket.endpoint,
        carriers=link.offers,
        slot_bytes=decode.staging.slot_bytes,
    )
