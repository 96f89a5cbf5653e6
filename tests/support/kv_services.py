"""Prefill and decode workers without a model, Redis and processes of their own.

They have real control channels, real KV sockets, and engine threads over fake devices. All that a
worker owns must be free when it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry

from pagewire.services.decode.prefill_links import PrefillLinks
from pagewire.services.decode.remote_jobs import RemoteJobs
from pagewire.services.decode.service import DecodeService
from pagewire.services.prefill.decode_links import DecodeLinks
from pagewire.services.prefill.jobs import PrefillJobs
from pagewire.services.prefill.service import PrefillService
from pagewire.shared.cluster.crash_reports import CrashReport
from pagewire.shared.cluster.registry import WorkerRecord
from pagewire.shared.control.channel import ControlServer
from pagewire.shared.control.protocol import ControlMessage
from pagewire.shared.engine.core import EngineCore
from pagewire.shared.engine.step_output import StepOutputs
from pagewire.shared.engine.thread import Command, EngineThread
from pagewire.shared.kv.kv_layout import KvLayout
from pagewire.shared.kv.model_identity import ModelIdentity
from pagewire.shared.transfer.endpoint.credits import StagingSlotState
from pagewire.shared.transfer.endpoint.receiver_link import ReceiverLink
from pagewire.shared.transfer.endpoint.sender_link import SenderLink
from pagewire.shared.transfer.job_messages import JobRequest
from pagewire.shared.worker.embedding_jobs import EmbeddingJobs
from pagewire.shared.worker.engine_handle import EngineHandle
from pagewire.shared.worker.identity import WorkerIdentity
from pagewire.shared.worker.kv_metrics import KvCollector
from pagewire.shared.worker.metrics import local_prefill_counter
from pagewire.shared.worker.tasks import TaskSet
from pagewire.tests.support.aio import eventually
from pagewire.tests.support.child_process import Child, child_process, run_in_loop
from pagewire.tests.support.control import KEYS
from pagewire.tests.support.fake_device import VOCAB
from pagewire.tests.support.kv_sides import HOST, IDENTITY, LAYOUT, Side
from pagewire.tests.support.worker_records import record

BLOCKS_PER_SLOT = 2
T = TypeVar("T")


@dataclass(frozen=True)
class Times:
    """Times in seconds; they are long where a test is not about them."""

    heartbeat_s: float = 0.05
    lease_s: float = 10.0
    transfer_s: float = 10.0
    prefill_s: float = 10.0


USUAL_TIMES = Times()


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
    side: Side
    times: Times = USUAL_TIMES
    model_identity: ModelIdentity = IDENTITY
    layout: KvLayout = LAYOUT
    service: PrefillService | DecodeService = field(init=False)
    endpoint: str = ""
    is_draining: bool = False
    must_be_idle: bool = True
    received: list[tuple[str, ControlMessage | JobRequest]] = field(default_factory=list)
    tasks: TaskSet = field(default_factory=TaskSet)
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    handed_over: Counter[str] = field(default_factory=Counter)
    engine: EngineHandle = field(init=False)

    def __post_init__(self) -> None:
        side, self._loop = self.side, asyncio.get_running_loop()
        self.core, self.device, self.staging = side.core, side.device, side.staging
        self.prefill_counter = local_prefill_counter(self.registry)
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
        side.open(watch=thread.watch, unwatch=thread.unwatch)
        self.server = ControlServer(
            HOST,
            0,
            KEYS,
            self.identity.worker_id,
            self.identity.epoch,
            self.on_message,
            self.on_peer_lost,
            heartbeat_s=self.times.heartbeat_s,
            lease_s=self.times.lease_s,
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

    @property
    def has_free_slots(self) -> bool:
        """Whether nobody may use a staging slot."""
        return self.side.slots.count(StagingSlotState.FREE) == self.staging.num_slots

    @abstractmethod
    def is_idle(self) -> bool:
        """Whether nothing is held, and no link is open."""

    def record(self, **changes: Any) -> WorkerRecord:
        """Return a prefill worker's record with this worker's identity and endpoint."""
        identity = {"worker_id": self.identity.worker_id, "epoch": self.identity.epoch}
        return prefill_record(**(identity | {"endpoint": self.endpoint} | changes))

    def embeddings(self) -> EmbeddingJobs:
        """Return the part that computes embeddings for routers."""
        return EmbeddingJobs(self.engine, self.server.post, lambda: self.is_draining)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the engine and the service; at the end all that the worker owns must be free."""
        self.registry.register(KvCollector(self.side.endpoint))
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self.server.close)
            stack.callback(self.side.close)
            self.endpoint = await self.server.start()
            self.engine.thread.start()
            stack.push_async_callback(self.stop_engine)
            stack.push_async_callback(self.become_idle)
            stack.push_async_callback(self.tasks.close)
            stack.push_async_callback(self.service.close)
            self.service.start()
            yield
        self.core.scheduler.check_integrity()


@dataclass(eq=False)
class PrefillWorker(Worker):
    """A prefill worker."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.sender = self.side.sender

    def is_idle(self) -> bool:
        """Whether nothing is held, and no link is open."""
        sender = self.sender
        is_free = self.has_free_slots and not self.used_blocks
        return is_free and not (sender.num_jobs or len(sender.links) or self.service.num_active)


@dataclass(eq=False)
class DecodeWorker(Worker):
    """A decode worker.

    Attributes:
        records: records of the prefill workers that it knows.
        crashes: how prefill workers crashed, by id and epoch.
    """

    links: PrefillLinks = field(init=False)
    records: list[WorkerRecord] = field(default_factory=list)
    crashes: dict[tuple[str, int], CrashReport] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.receiver = self.side.receiver

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
        is_free = self.has_free_slots
        return is_free and not (self.used_blocks or len(receiver.links) or self.service.num_active)


def prefill_record(**fields: Any) -> WorkerRecord:
    """Return a prefill worker's record."""
    return record(**({"role": "prefill", "model_identity": IDENTITY} | fields))


@asynccontextmanager
async def prefill_worker(
    worker_id: str = "prefill-0",
    epoch: int = 1,
    *,
    slots: int = 4,
    carriers: tuple[str, ...] = ("zmq",),
    times: Times = USUAL_TIMES,
    **engine: Any,
) -> AsyncIterator[PrefillWorker]:
    """Run a prefill worker."""
    side = Side(worker_id, carriers, slots, BLOCKS_PER_SLOT, engine, KEYS, times.transfer_s)
    worker = PrefillWorker(WorkerIdentity(worker_id, epoch), side, times)
    sender, post = worker.sender, worker.server.post
    links = DecodeLinks(worker.engine, sender, post, worker.tasks, times.transfer_s)
    jobs = PrefillJobs(epoch, worker.engine, sender, lambda: worker.is_draining)
    worker.service = PrefillService(worker.engine.thread, links, jobs, worker.embeddings())
    take = sender.on_job_request

    def keep_and_take(link: SenderLink, message: JobRequest) -> None:
        worker.received.append((link.peer, message))
        take(link, message)

    sender.on_job_request = keep_and_take
    async with worker.running():
        yield worker


@asynccontextmanager
async def decode_worker(
    worker_id: str = "decode-0",
    *,
    slots: int = 8,
    carriers: tuple[str, ...] = ("zmq",),
    model_identity: ModelIdentity = IDENTITY,
    layout: KvLayout = LAYOUT,
    times: Times = USUAL_TIMES,
    **engine: Any,
) -> AsyncIterator[DecodeWorker]:
    """Run a decode worker, which knows no prefill worker yet."""
    side = Side(worker_id, carriers, slots, BLOCKS_PER_SLOT, engine, KEYS, times.transfer_s)
    worker = DecodeWorker(WorkerIdentity(worker_id, 1), side, times, model_identity, layout)
    worker.links = PrefillLinks(
        worker.identity,
        worker.engine,
        worker.receiver,
        lambda: worker.records,
        KEYS,
        worker.tasks,
        heartbeat_s=times.heartbeat_s,
        lease_s=times.lease_s,
        timeout_s=times.transfer_s,
        find_crash=worker.find_crash,
    )
    jobs = RemoteJobs(
        worker.engine,
        worker.receiver,
        worker.prefill_counter,
        times.prefill_s,
        worker.engine.in_loop(worker.links.look_up_crash),
    )
    worker.service = DecodeService(
        worker.identity.epoch,
        worker.engine,
        worker.links,
        jobs,
        worker.embeddings(),
        worker.server.post,
        lambda: worker.is_draining,
        worker.prefill_counter,
    )
    async with worker.running():
        yield worker


class PrefillProcess:
    """A prefill worker in a process of its own, which can be killed and stopped."""

    def __init__(self, child: Child, worker_id: str, epoch: int) -> None:
        self._child, self.epoch, self.signal = child, epoch, child.signal
        self._fields = {"worker_id": worker_id, "epoch": epoch, "endpoint": child.receive()}

    def record(self) -> WorkerRecord:
        """Return the worker's record."""
        return prefill_record(**self._fields)

    def hold(self, **flags: bool) -> None:
        """Set flags of the fake device: `has_run`, `has_moved`."""
        self._child.pipe.send(flags)
        self._child.receive()


@contextlib.contextmanager
def prefill_process(worker_id: str = "prefill-0", epoch: int = 1) -> Iterator[PrefillProcess]:
    """Run a prefill worker in another process; kill it at the end."""
    with child_process(run_in_loop, _serve_prefill, worker_id, epoch) as child:
        yield PrefillProcess(child, worker_id, epoch)


async def _serve_prefill(pipe: Connection, worker_id: str, epoch: int) -> None:
    async with prefill_worker(worker_id, epoch, times=Times(lease_s=1.0)) as worker:
        pipe.send(worker.endpoint)
        while True:
            flags: dict[str, bool] = await asyncio.to_thread(pipe.recv)
            for name, value in flags.items():
                setattr(worker.device, name, value)
            pipe.send(None)
