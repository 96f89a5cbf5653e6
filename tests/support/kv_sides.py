"""One worker: an engine over a fake device, with its KV endpoint."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from pagewire.shared.control.channel import ClusterKeys
from pagewire.shared.control.protocol import KvHello
from pagewire.shared.engine.core import EngineCore
from pagewire.shared.engine.execution.executor import StepHook
from pagewire.shared.engine.scheduling.sequence import Sequence
from pagewire.shared.kv.packing import packed_bytes
from pagewire.shared.transfer.endpoint.credits import StagingSlots, StagingSlotState
from pagewire.shared.transfer.endpoint.events import JobFailed, KvEvent, LinkLost, LinkTested
from pagewire.shared.transfer.endpoint.kv_endpoint import KvEndpoint
from pagewire.shared.transfer.endpoint.receiver import KvReceiver
from pagewire.shared.transfer.endpoint.receiver_link import ReceiverLink
from pagewire.shared.transfer.endpoint.sender import DIVIDED_BYTES, KvSender
from pagewire.shared.transfer.endpoint.sockets import KvSockets, ReceiverSocket
from pagewire.shared.transfer.staging import Staging, make_staging
from pagewire.tests.support.fake_device import FakeDevice, fake_layout
from pagewire.tests.support.fake_engine import Parts, make_parts, make_sequence
from pagewire.tests.support.kv_layouts import model_identity
from pagewire.tests.support.kv_transports import BY_NAME, FaultyTransport, open_transports

HOST = "127.0.0.1"
BLOCK_SIZE = 4
LAYOUT = fake_layout(BLOCK_SIZE)
IDENTITY = model_identity(block_size=BLOCK_SIZE)
TIMEOUT_S = 5.0  # of endpoints, by the test's clock
KINDS = tuple(BY_NAME)
TRANSPORTS = pytest.mark.parametrize("kind", KINDS)


@dataclass
class Clock:
    """Stands still unless a test moves it."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass(eq=False)
class Side:
    """One worker: an engine with its endpoint, both of which `open` makes.

    Attributes:
        kinds: names of its transports.
        engine: arguments of `make_parts`.
        keys: of its cluster; None: whoever has a link's token may connect.
        timeout_s: of its connections, and of segments.
        more_hooks: make further hooks of its engine.
        lost: links that have ended by themselves, and the reasons.
        failed: jobs that the sender dropped, and why.
        tested: links from other workers whose test has arrived.
        handle: gets the endpoint's events, after they are recorded here.
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
    more_hooks: Iterable[Callable[[FakeDevice], StepHook]] = ()
    parts: Parts = field(init=False)
    core: EngineCore = field(init=False)
    staging: Staging = field(init=False)
    transports: dict[str, FaultyTransport] = field(init=False)
    sender: KvSender = field(init=False)
    receiver: KvReceiver = field(init=False)
    endpoint: KvEndpoint = field(init=False)
    lost: list[tuple[object, str]] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    tested: list[ReceiverLink] = field(default_factory=list)
    handle: Callable[[KvEvent], object] = lambda _event: None
    is_dead: bool = False
    worked: bool = False

    def __post_init__(self) -> None:
        self.parts = make_parts(block_size=BLOCK_SIZE, **self.engine)
        slot_bytes = packed_bytes(LAYOUT, self.blocks_per_slot)
        self.staging = make_staging(self.num_slots, slot_bytes, torch.device("cpu"))
        self.transports = open_transports(self.kinds, self.staging, self.device)
        self.sockets = KvSockets(self.keys, slot_bytes, self.timeout_s)

    def open(
        self,
        divided_bytes: int = DIVIDED_BYTES,
        job_timeout_s: float = math.inf,
        **options: Any,
    ) -> None:
        """Open the endpoint, with further arguments of both halves, and make the engine."""
        parts = {
            "sequences": self.parts.sequences,
            "moves": self.device,
            "staging": self.staging,
            "layout": LAYOUT,
            "transports": self.transports,
            "events": deque[KvEvent](),
            **options,
        }
        socket = ReceiverSocket(self.sockets, HOST, HOST)
        self.receiver = KvReceiver(socket=socket, job_timeout_s=job_timeout_s, **parts)
        self.sender = KvSender(
            slots=self.slots,
            notify=self.receiver.send_all,
            sockets=self.sockets,
            timeout_s=self.timeout_s,
            divided_bytes=divided_bytes,
            **parts,
        )
        self.endpoint = KvEndpoint(self.sender, self.receiver, self._on_event)
        more = [make(self.device) for make in self.more_hooks]
        self.core = self.parts.make_core(self.endpoint, *more)

    def _on_event(self, event: KvEvent) -> None:
        match event:
            case LinkLost(link, reason):
                self.lost.append((link, reason))
            case LinkTested(tested):
                self.tested.append(tested)
            case JobFailed(name, _link, reason):
                self.failed[name] = reason
        self.handle(event)

    @property
    def device(self) -> FakeDevice:
        """The engine's device."""
        return self.parts.device

    @property
    def slots(self) -> StagingSlots:
        """The staging slots of both halves."""
        return self.receiver.slots

    @property
    def transport(self) -> FaultyTransport:
        """The first transport."""
        return next(iter(self.transports.values()))

    def add(self, request_id: str, prompt: list[int], max_tokens: int = 4) -> Sequence:
        """Add a sequence that has nothing to do with transfers."""
        sequence = make_sequence(request_id, prompt, max_tokens=max_tokens)
        self.core.sequences.add(sequence)
        return sequence

    def close(self) -> None:
        """End, as the worker's process does."""
        if not self.is_dead:
            self.is_dead = True
            self.endpoint.close_all()
            for transport in self.transports.values():
                transport.close()
            self.sockets.close()

    @property
    def is_receiving(self) -> bool:
        """Whether a segment has been announced and not acknowledged."""
        return self.slots.count(StagingSlotState.FILLED) > 0

    def held(self) -> list[str]:
        """Describe what is held in the engine and in the endpoint."""
        scheduler, sender = self.core.scheduler, self.sender
        scheduler.table.check_integrity()
        used = scheduler.pool.counts().used
        held = [f"{used} blocks of {self.name}"] if used else []
        held += [f"{s.request_id} on {self.name}" for s in scheduler.table.holders()]
        for state in (StagingSlotState.FILLED, StagingSlotState.QUARANTINED):
            if count := self.slots.count(state):
                held.append(f"{count} {state.name} staging slots of {self.name}")
        if sender.num_jobs:
            held.append(f"{sender.num_jobs} jobs of {self.name}")
        in_use = sum(len(link.credits.in_use) for link in sender.links)
        return [*held, f"{in_use} credits in use by {self.name}"] if in_use else held


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
        "transports": {"zmq": b""},
        "slot_bytes": 1 << 16,
    }
    return KvHello(**(fields | changes))


def hello_of(decode: Side, link: ReceiverLink) -> KvHello:
    """Return the message by which a side opens a link."""
    return hello(
        worker_id=decode.name,
        link=link.number,
        token=link.token,
        endpoint=decode.receiver.socket.endpoint,
        transports=link.offers,
        slot_bytes=decode.staging.slot_bytes,
    )
