"""Prefill and decode workers without a model, Redis and processes of their own.

They have real control channels, real KV sockets, and engine threads over fake devices. All that a
worker owns must be free when it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry

from pagewire.shared.cluster.crash_reports import CrashReport
from pagewire.shared.cluster.registry import WorkerRecord
from pagewire.shared.control.channel import ControlServer
from pagewire.shared.control.protocol import ControlMessage, Role
from pagewire.shared.engine.core import EngineCore
from pagewire.shared.engine.step_output import StepOutputs
from pagewire.shared.engine.thread import Command, EngineThread
from pagewire.shared.engine.waker import Waker
from pagewire.shared.kv.kv_layout import KvLayout
from pagewire.shared.kv.model_identity import ModelIdentity
from pagewire.shared.transfer.endpoint.credits import StagingSlotState
from pagewire.shared.transfer.endpoint.events import JobReported, JobRequested, KvEvent
from pagewire.shared.transfer.endpoint.receiver_link import ReceiverLink
from pagewire.shared.transfer.job_messages import JobReport, JobRequest
from pagewire.shared.worker.decode_links import DecodeLinks
from pagewire.shared.worker.embedding_jobs import EmbeddingJobs
from pagewire.shared.worker.engine_handle import EngineHandle
from pagewire.shared.worker.identity import WorkerIdentity
from pagewire.shared.worker.kv_metrics import KvCollector
from pagewire.shared.worker.load_reports import LoadReports
from pagewire.shared.worker.metrics import local_prefill_counter
from pagewire.shared.worker.prefill_jobs import PrefillJobs
from pagewire.shared.worker.prefill_links import PrefillLinks
from pagewire.shared.worker.remote_jobs import RemoteJobs
from pagewire.shared.worker.router_requests import RouterRequests
from pagewire.shared.worker.service import WorkerService
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
PROCESS_TIMES = Times(lease_s=1.0)


class CountingThread(EngineThread):
    """Counts commands."""

    handed_over: Counter[str]

    def submit(self, command: Command, *, admitted: bool = False) -> None:
        self.handed_over["to the engine"] += 1
        super().submit(command, admitted=admitted)


@dataclass(eq=False, repr=False)
class Worker:
    """A worker of either role.

    Attributes:
        role: what it prefers to do.
        records: records of the workers that it keeps a link to.
        crashes: how workers crashed, by id and epoch.
        service: takes the worker's messages and outputs.
        is_draining: whether it drains, as after SIGTERM.
        received: messages, each with the connection or peer that it came from.
        reports: unless it is None, it gets the reports about jobs, and the service does not.
        must_be_idle: whether all that it owns must be free at its end, and all links closed.
        handed_over: number of calls given to the engine's thread, and by it to the event loop.
    """

    role: Role
    identity: WorkerIdentity
    side: Side
    times: Times = USUAL_TIMES
    model_identity: ModelIdentity = IDENTITY
    layout: KvLayout = LAYOUT
    records: list[WorkerRecord] = field(default_factory=list)
    crashes: dict[tuple[str, int], CrashReport] = field(default_factory=dict)
    service: WorkerService = field(init=False)
    endpoint: str = ""
    is_draining: bool = False
    must_be_idle: bool = True
    received: list[tuple[str, ControlMessage | JobRequest]] = field(default_factory=list)
    reports: list[JobReport] | None = None
    tasks: TaskSet = field(default_factory=TaskSet)
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    handed_over: Counter[str] = field(default_factory=Counter)
    engine: EngineHandle = field(init=False)

    def __post_init__(self) -> None:
        side, self._loop = self.side, asyncio.get_running_loop()
        self.prefill_counter, waker = local_prefill_counter(self.registry), Waker()
        side.handle = self._on_kv_event
        side.open(job_timeout_s=self.times.prefill_s, watch=waker.watch, unwatch=waker.unwatch)
        self.core, self.device, self.staging = side.core, side.device, side.staging
        thread = CountingThread(self.core, self._on_outputs, waker=waker)
        thread.handed_over = self.handed_over
        self.engine = EngineHandle(
            core=self.core,
            thread=thread,
            model_identity=self.model_identity,
            layout=self.layout,
            vocab_size=VOCAB,
            eos_token_ids=(),
            in_loop=self.in_loop,
        )
        self.sender, self.receiver = side.sender, side.receiver
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
        self.service = self._make_service()
        self.links = self.service.prefill_links

    def _make_service(self) -> WorkerService:
        engine, post, times = self.engine, self.server.post, self.times
        loads = LoadReports(self.identity.epoch, engine.thread)
        counter = self.prefill_counter
        requests = RouterRequests(engine, post, self.drains, counter, loads.recent)
        remote_jobs = RemoteJobs(engine, self.receiver, requests, counter)
        links = PrefillLinks(
            self.identity,
            engine,
            self.receiver,
            lambda: self.records,
            KEYS,
            self.tasks,
            heartbeat_s=times.heartbeat_s,
            lease_s=times.lease_s,
            timeout_s=times.transfer_s,
            find_crash=self.find_crash,
            suspect=remote_jobs.suspect,
        )
        return WorkerService(
            engine,
            requests,
            EmbeddingJobs(engine, post, self.drains),
            links,
            DecodeLinks(engine, self.sender, post, self.tasks, times.transfer_s),
            PrefillJobs(engine, self.sender, self.drains, loads.current),
            remote_jobs,
        )

    def drains(self) -> bool:
        """Whether new work is refused."""
        return self.is_draining

    async def find_crash(self, worker_id: str, epoch: int) -> CrashReport | None:
        """Return how a run of a worker crashed, if it did."""
        return self.crashes.get((worker_id, epoch))

    def in_loop(self, callback: Callable[..., None]) -> Callable[..., None]:
        """Return a function that calls `callback` in the event loop, as a worker's runtime does."""

        def call(*args: object) -> None:
            self.handed_over["to the loop"] += 1
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(callback, *args)

        return call

    def _on_kv_event(self, event: KvEvent) -> None:
        if isinstance(event, JobRequested):
            self.received.append((event.link.peer, event.message))
        if isinstance(event, JobReported) and self.reports is not None:
            self.reports.append(event.message)
        else:
            self.service.on_kv_event(event)

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

    def local_prefills(self, reason: str) -> float | None:
        """Return the number of prompts that were computed here for a reason."""
        return self.metric("local_prefills_total", reason=reason)

    def is_linked(self, worker_id: str = "prefill-0", epoch: int = 1) -> bool:
        """Whether there is a usable link from this epoch of a worker."""
        return self.links.open_epochs.get(worker_id) == epoch

    @property
    def tested_links(self) -> list[ReceiverLink]:
        """The usable links from other workers."""
        return [link for link in list(self.receiver.links) if link.is_tested]

    async def link_to(self, *workers: Worker, timeout: float = 20.0) -> None:
        """Have these workers, and no others, compute prompts; wait for the links."""
        self.records = [worker.record() for worker in workers]
        names = [(worker.identity.worker_id, worker.identity.epoch) for worker in workers]
        await eventually(lambda: all(self.is_linked(*name) for name in names), timeout)

    def record(self, **changes: Any) -> WorkerRecord:
        """Return this worker's record."""
        own = {
            "role": self.role,
            "worker_id": self.identity.worker_id,
            "epoch": self.identity.epoch,
            "endpoint": self.endpoint,
        }
        return prefill_record(**(own | changes))

    async def stop_engine(self) -> None:
        """End the engine's thread."""
        assert await asyncio.to_thread(self.engine.thread.stop, 5.0)

    async def become_idle(self) -> None:
        """Wait until all that the worker owns is free."""
        if self.must_be_idle:
            await eventually(self.is_idle)

    def is_idle(self) -> bool:
        """Whether nothing is held, and no link is open."""
        num_links = len(self.sender.links) + len(self.receiver.links)
        is_free = self.side.slots.count(StagingSlotState.FREE) == self.staging.num_slots
        return is_free and not (num_links or self.used_blocks or self.service.num_active)

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
            stack.callback(self.service.close)
            self.service.start()
            yield
        self.core.scheduler.table.check_integrity()


def prefill_record(**fields: Any) -> WorkerRecord:
    """Return a prefill worker's record."""
    return record(**({"role": "prefill", "model_identity": IDENTITY} | fields))


@asynccontextmanager
async def prefill_worker(
    worker_id: str = "prefill-0",
    epoch: int = 1,
    *,
    slots: int = 4,
    transports: tuple[str, ...] = ("zmq",),
    times: Times = USUAL_TIMES,
    **engine: Any,
) -> AsyncIterator[Worker]:
    """Run a worker that prefers to compute prompts."""
    side = Side(worker_id, transports, slots, BLOCKS_PER_SLOT, engine, KEYS, times.transfer_s)
    worker = Worker("prefill", WorkerIdentity(worker_id, epoch), side, times)
    async with worker.running():
        yield worker


@asynccontextmanager
async def decode_worker(
    worker_id: str = "decode-0",
    *,
    slots: int = 8,
    transports: tuple[str, ...] = ("zmq",),
    model_identity: ModelIdentity = IDENTITY,
    layout: KvLayout = LAYOUT,
    times: Times = USUAL_TIMES,
    **engine: Any,
) -> AsyncIterator[Worker]:
    """Run a worker that prefers to decode, and has no link yet."""
    side = Side(worker_id, transports, slots, BLOCKS_PER_SLOT, engine, KEYS, times.transfer_s)
    identity = WorkerIdentity(worker_id, 1)
    worker = Worker("decode", identity, side, times, model_identity, layout)
    async with worker.running():
        yield worker


class PrefillProcess:
    """A prefill worker in a process of its own, which can be killed and stopped."""

    def __init__(self, child: Child, worker_id: str, epoch: int) -> None:
        self._child, self.epoch, self.signal = child, epoch, child.signal
        self.times, self.endpoint = PROCESS_TIMES, child.receive()
        self._fields = {"worker_id": worker_id, "epoch": epoch, "endpoint": self.endpoint}

    def record(self) -> WorkerRecord:
        """Return the worker's record."""
        return prefill_record(**self._fields)

    def link_to(self, *workers: Worker) -> None:
        """Have these workers, and no others, compute prompts for this one."""
        self._child.pipe.send([worker.record() for worker in workers])
        self._child.receive()

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
    async with prefill_worker(worker_id, epoch, times=PROCESS_TIMES) as worker:
        pipe.send(worker.endpoint)
        while True:
            order: dict[str, bool] | list[WorkerRecord] = await asyncio.to_thread(pipe.recv)
            if isinstance(order, list):
                worker.records = order
            else:
                for name, value in order.items():
                    setattr(worker.device, name, value)
            pipe.send(None)
