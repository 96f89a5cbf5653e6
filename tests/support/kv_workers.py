"""Workers with fake devices, which `kv_services` makes and runs."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry

from pagewire.services.decode.prefill_links import PrefillLinks
from pagewire.services.decode.service import DecodeService
from pagewire.services.prefill.service import PrefillService
from pagewire.shared.cluster.crash_reports import CrashReport
from pagewire.shared.cluster.registry import WorkerRecord
from pagewire.shared.control.channel import ClusterKeys, ControlServer
from pagewire.shared.control.protocol import ControlMessage
from pagewire.shared.engine.core import EngineCore
from pagewire.shared.engine.step_output import StepOutputs
from pagewire.shared.engine.thread import Command, EngineThread
from pagewire.shared.kv.kv_layout import KvLayout
from pagewire.shared.kv.model_identity import ModelIdentity
from pagewire.shared.transfer.endpoint.credits import StagingSlotState
from pagewire.shared.transfer.endpoint.receiver import KvReceiver
from pagewire.shared.transfer.endpoint.receiver_link import ReceiverLink
from pagewire.shared.transfer.endpoint.sender import KvSender
from pagewire.shared.transfer.job_messages import JobRequest
from pagewire.shared.transfer.staging import Staging
from pagewire.shared.worker.embedding_jobs import EmbeddingJobs
from pagewire.shared.worker.engine_handle import EngineHandle
from pagewire.shared.worker.identity import WorkerIdentity
from pagewire.shared.worker.metrics import local_prefill_counter
from pagewire.shared.worker.tasks import TaskSet
from pagewire.tests.support.aio import eventually
from pagewire.tests.support.fake_device import VOCAB, FakeDevice, fake_layout
from pagewire.tests.support.kv_layouts import model_identity
from pagewire.tests.support.worker_records import record

KEYS = ClusterKeys.derive("the cluster's secret")
HOST = "127.0.0.1"
BLOCK_SIZE = 4
LAYOUT = fake_layout(BLOCK_SIZE)
IDENTITY = model_identity(block_size=BLOCK_SIZE)

T = TypeVar("T")


@dataclass(frozen=True)
class Times:
    """Times in seconds; they are long where a test is not about them."""

    heartbeat_s: float = 0.05
    lease_s: float = 10.0
    transfer_s: float = 10.0
    prefill_s: float = 10.0


class CountingThread(EngineThread):
    """Counts commands."""

    handed_over: Counter[str]

    def submit(self, command: Command, *, admitted: bool = False) -> None:
        self.handed_over["to the engine"] += 1
        super().submit(command, admitted=admitted)


@dataclass(eq=False)
class Worker(ABC):
    """What workers of both roles have.

    Attributes:
        service: takes the worker's messages and outputs.
        is_draining: whether it drains, as after SIGTERM.
        received: messages, each with the connection or peer that it came from.
        must_be_idle: whether all that it owns must be free at its end, and all links closed.
        handed_over: number of calls given to the engine's thread, and by it to the event loop.
    """

    identity: WorkerIdentity
    core: EngineCore
    device: FakeDevice
    staging: Staging
    model_identity: ModelIdentity
    layout: KvLayout
    times: Times
    service: PrefillService | DecodeService = field(init=False)
    server: ControlServer = field(init=False)
    endpoint: str = ""
    is_draining: bool = False
    must_be_idle: bool = True
    received: list[tuple[str, ControlMessage | JobRequest]] = field(default_factory=list)
    tasks: TaskSet = field(default_factory=TaskSet)
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    handed_over: Counter[str] = field(default_factory=Counter)
    engine: EngineHandle = field(init=False)

    def __post_init__(self) -> None:
        self.prefill_counter = local_prefill_counter(self.registry)
        self._loop = asyncio.get_running_loop()
        thread = CountingThread(self.core, self._on_outputs)
        thread.handed_over = self.handed_over
        self.engine = EngineHandle(
            core=self.core,
            moves=self.device,
            thread=thread,
            model_identity=self.model_identity,
            layout=self.layout,
            vocab_size=VOCAB,
            eos_token_ids=(),
            in_loop=self.in_loop,
        )

    def in_loop(self, callback: Callable[..., None]) -> Callable[..., None]:
        """Return a function that calls `callback` in the event loop, as a worker's runtime does."""

        def call(*args: object) -> None:
            self.handed_over["to the loop"] += 1
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(callback, *args)

        return call

    def _on_outputs(self, outputs: StepOutputs) -> None:
        self.service.on_outputs(outputs)

    def on_message(self, peer_id: str, message: ControlMessage) -> None:
        """Have the service take a message."""
        self.received.append((peer_id, message))
        self.service.on_message(peer_id, message)

    def on_peer_lost(self, peer_id: str) -> None:
        """Report to the service that a peer is gone."""
        self.service.on_peer_lost(peer_id)

    @property
    def used_blocks(self) -> int:
        """Blocks that sequences hold, as the engine last reported."""
        return self.engine.thread.snapshot.blocks.used

    def taken(self, kind: type[T]) -> list[T]:
        """Return the messages of one type that have come."""
        return [message for _, message in self.received if isinstance(message, kind)]

    @contextlib.contextmanager
    def stuck(self) -> Iterator[None]:
        """Block the engine's thread during the context."""
        entered, release = threading.Event(), threading.Event()

        def wait(_core: EngineCore) -> None:
            entered.set()
            release.wait(30)

        self.engine.submit(wait, admitted=True)
        assert entered.wait(5)
        try:
            yield
        finally:
            release.set()

    def metric(self, name: str, **labels: str) -> float | None:
        """Return the value of a sample of the metrics; None if it is not there."""
        return self.registry.get_sample_value(f"pagewire_{name}", labels)

    async def stop_engine(self) -> None:
        """End the engine's thread."""
        assert await asyncio.to_thread(self.engine.thread.stop, 5.0)

    async def become_idle(self) -> None:
        """Wait until all that the worker owns is free."""
        if self.must_be_idle:
            await eventually(self.is_idle)

    @abstractmethod
    def is_idle(self) -> bool:
        """Whether nothing is held, and no link is open."""

    def record(self, **changes: Any) -> WorkerRecord:
        """Return a prefill worker's record with this worker's identity and endpoint."""
        fields: dict[str, Any] = {
            "worker_id": self.identity.worker_id,
            "epoch": self.identity.epoch,
            "role": "prefill",
            "endpoint": self.endpoint,
            "model_identity": self.model_identity,
        }
        return record(**(fields | changes))

    def embeddings(self) -> EmbeddingJobs:
        """Return the part that computes embeddings for routers."""
        return EmbeddingJobs(self.engine, self.server.post, lambda: self.is_draining)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the control server."""
        times, identity = self.times, self.identity
        self.server = ControlServer(
            HOST,
            0,
            KEYS,
            identity.worker_id,
            identity.epoch,
            self.on_message,
            self.on_peer_lost,
            heartbeat_s=times.heartbeat_s,
            lease_s=times.lease_s,
        )
        self.endpoint = await self.server.start()
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self.server.close)
            yield


@dataclass(eq=False)
class PrefillWorker(Worker):
    """A prefill worker."""

    sender: KvSender = field(init=False)

    def is_idle(self) -> bool:
        """Whether nothing is held, and no link is open."""
        sender = self.sender
        is_free = self.staging.num_free == self.staging.num_slots and not self.used_blocks
        return is_free and not (sender.num_jobs or len(sender.links) or self.service.num_active)


@dataclass(eq=False)
class DecodeWorker(Worker):
    """A decode worker.

    Attributes:
        records: records of the prefill workers that it knows.
        crashes: how prefill workers crashed, by id and epoch.
    """

    receiver: KvReceiver = field(init=False)
    links: PrefillLinks = field(init=False)
    records: list[WorkerRecord] = field(default_factory=list)
    crashes: dict[tuple[str, int], CrashReport] = field(default_factory=dict)

    async def find_crash(self, worker_id: str, epoch: int) -> CrashReport | None:
        """Return how a run of a prefill worker crashed, if it did."""
        return self.crashes.get((worker_id, epoch))

    def is_linked(self, worker_id: str = "prefill-0", epoch: int = 1) -> bool:
        """Whether there is a usable link to this epoch of a worker."""
        return self.links.open_epochs.get(worker_id) == epoch

    @property
    def tested_links(self) -> list[ReceiverLink]:
        return [link for link in list(self.receiver.links) if link.is_tested]

    async def link_to(self, *workers: PrefillWorker, timeout: float = 20.0) -> None:
        """Set these prefill workers as the known ones, and wait for the links."""
        self.records = [worker.record() for worker in workers]
        names = [(worker.identity.worker_id, worker.identity.epoch) for worker in workers]
        await eventually(lambda: all(self.is_linked(*name) for name in names), timeout)

    def local_prefills(self, reason: str) -> float | None:
        """Return the number of prompts that were computed here for a reason."""
        return self.metric("local_prefills_total", reason=reason)

    def is_idle(self) -> bool:
        """Whether nothing is held, and no link is open."""
        receiver = self.receiver
        is_free = receiver.credits.count(StagingSlotState.FREE) == receiver.staging.num_slots
        return is_free and not (self.used_blocks or len(receiver.links) or self.service.num_active)
