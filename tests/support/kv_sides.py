"""One worker: an engine over a fake device, with its half of an endpoint."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

from pagewire.shared.control.protocol import KvHello
from pagewire.shared.engine.core import EngineCore
from pagewire.shared.engine.scheduling.sequence import Sequence
from pagewire.shared.kv.packing import packed_bytes
from pagewire.shared.transfer.carriers.base import Carrier
from pagewire.shared.transfer.carriers.zmq import ZmqCarrier
from pagewire.shared.transfer.endpoint.credits import StagingSlotState
from pagewire.shared.transfer.endpoint.receiver import KvReceiver
from pagewire.shared.transfer.endpoint.receiver_link import ReceiverLink
from pagewire.shared.transfer.endpoint.sender import DIVIDED_BYTES, KvSender
from pagewire.shared.transfer.endpoint.sockets import KvSockets, ReceiverSocket
from pagewire.shared.transfer.staging import Staging, make_staging
from pagewire.tests.support.fake_device import fake_layout
from pagewire.tests.support.fake_engine import make_core, make_sequence
from pagewire.tests.support.kv_doubles import FaultyCarrier, LateDevice
from pagewire.tests.support.kv_layouts import model_identity
from pagewire.tests.support.loopback_carrier import LoopbackCarrier

BLOCK_SIZE = 4
TIMEOUT_S = 5.0  # of endpoints, by the test's clock
_LOOPBACK = "127.0.0.1"
_CARRIERS = {"loopback": LoopbackCarrier, "zmq": ZmqCarrier}
KINDS = tuple(_CARRIERS)
CARRIERS = pytest.mark.parametrize("kind", KINDS)
LAYOUT = fake_layout(BLOCK_SIZE)
IDENTITY = model_identity(block_size=BLOCK_SIZE)


def _ignore(_fd: int) -> None:
    """Do nothing: the test steps the engine itself."""


@dataclass
class Clock:
    """Stands still unless a test moves it."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass(eq=False)
class Side(ABC):
    """An engine with its half of an endpoint.

    Attributes:
        kinds: names of its carriers.
        engine: arguments of `make_core`.
        windows: window of each layer; see `KvLayout`.
        lost: links that have ended by themselves, and the reasons.
        is_dead: whether its process has ended.
        worked: whether the last iteration did anything.
    """

    name: str
    clock: Clock
    kinds: tuple[str, ...]
    num_slots: int
    blocks_per_slot: int
    engine: dict[str, int]
    windows: tuple[int | None, ...] = (None,)
    core: EngineCore = field(init=False)
    device: LateDevice = field(init=False)
    staging: Staging = field(init=False)
    carriers: dict[str, FaultyCarrier] = field(init=False)
    lost: list[tuple[object, str]] = field(default_factory=list)
    is_dead: bool = False
    worked: bool = False

    def __post_init__(self) -> None:
        self.core, device = make_core(block_size=BLOCK_SIZE, windows=self.windows, **self.engine)
        self.device = LateDevice(device.limits, device.num_blocks, device.layout)
        self.core.executor = self.device
        slot_bytes = packed_bytes(LAYOUT, self.blocks_per_slot)
        self.staging = make_staging(self.num_slots, slot_bytes, torch.device("cpu"))
        self.carriers = {kind: self._open(_CARRIERS[kind]) for kind in self.kinds}
        self.sockets = KvSockets(None, slot_bytes)

    def _open(self, kind: Callable[[Staging, LateDevice], Carrier]) -> FaultyCarrier:
        return FaultyCarrier(kind(self.staging, self.device), self.staging, self.device)

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

    divided_bytes: int = DIVIDED_BYTES
    watch: Callable[[int], None] = _ignore
    unwatch: Callable[[int], None] = _ignore
    sender: KvSender = field(init=False)
    failed: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.sender = KvSender(
            core=self.core,
            moves=self.device,
            staging=self.staging,
            layout=LAYOUT,
            sockets=self.sockets,
            carriers=self.carriers,
            timeout_s=TIMEOUT_S,
            on_link_lost=lambda link, reason: self.lost.append((link, reason)),
            watch=self.watch,
            unwatch=self.unwatch,
            divided_bytes=self.divided_bytes,
            clock=self.clock,
        )
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

    watch: Callable[[int], None] = _ignore
    unwatch: Callable[[int], None] = _ignore
    receiver: KvReceiver = field(init=False)
    tested: list[ReceiverLink] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.receiver = KvReceiver(
            core=self.core,
            moves=self.device,
            staging=self.staging,
            layout=LAYOUT,
            socket=ReceiverSocket(self.sockets, _LOOPBACK, _LOOPBACK),
            carriers=self.carriers,
            on_link_tested=self.tested.append,
            on_link_lost=lambda link, reason: self.lost.append((link, reason)),
            watch=self.watch,
            unwatch=self.unwatch,
            clock=self.clock,
        )
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


def hello_of(decode: DecodeSide, link: ReceiverLink) -> KvHello:
    """Return the message by which a decode worker opens a link."""
    return KvHello(
        worker_id=decode.name,
        epoch=1,
        model_identity=IDENTITY,
        layout=LAYOUT,
        link=link.number,
        token=link.token,
        endpoint=decode.receiver.socket.endpoint,
        carriers=link.offers,
        slot_bytes=decode.staging.slot_bytes,
    )
