"""Both sides of the wire bench: an engine without a model, and its KV endpoint.

The receiving side is in the bench's own process, each sending side in a child's.
"""

from __future__ import annotations

import argparse
import contextlib
import queue
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch

from pagewire.kernels import load_ops
from pagewire.loadtest.bench.child import BenchProcess
from pagewire.loadtest.bench.host import NoModel
from pagewire.loadtest.cluster import BenchError
from pagewire.shared.control.protocol import KvHello
from pagewire.shared.engine.core import EngineCore
from pagewire.shared.engine.execution.device_state import DeviceState
from pagewire.shared.engine.execution.model_runner import ModelRunner
from pagewire.shared.engine.execution.pending import PendingTokens, StepEvents
from pagewire.shared.engine.live_sequences import LiveSequences
from pagewire.shared.engine.scheduling.schedule import SchedulerLimits
from pagewire.shared.engine.scheduling.scheduler import Scheduler
from pagewire.shared.engine.scheduling.sequence import new_sequence
from pagewire.shared.engine.scheduling.step import StepPlan
from pagewire.shared.engine.thread import EngineThread
from pagewire.shared.engine.waker import Waker
from pagewire.shared.kv.block_hash import BlockHasher
from pagewire.shared.kv.block_pool import BlockPool
from pagewire.shared.kv.kv_layout import CachedToken, KvLayout
from pagewire.shared.kv.model_identity import ModelIdentity
from pagewire.shared.kv.packing import packed_bytes
from pagewire.shared.kv.storage import allocate_pool
from pagewire.shared.request.sampling import RequestSpec
from pagewire.shared.transfer.endpoint.events import (
    JobActivated,
    JobReserved,
    KvEvent,
    LinkLost,
    LinkTested,
)
from pagewire.shared.transfer.endpoint.kv_endpoint import KvEndpoint
from pagewire.shared.transfer.endpoint.sockets import KvSockets, ReceiverSocket
from pagewire.shared.transfer.staging import make_staging
from pagewire.shared.worker.kv import open_transport

BLOCK_SIZE = 16
IDENTITY = ModelIdentity(
    fingerprint="bench", dtype="bfloat16", kv_format="bfloat16", block_size=BLOCK_SIZE
)
# Of Llama-3.1-8B: blocks of 2 MiB.
LAYOUT = KvLayout.of([None] * 32, CachedToken(2, 8, 128), BLOCK_SIZE, "bfloat16")
MOST_IN_A_ROW = 8  # prompts
STAGING_SLOTS = 16
STAGING_SLOT_BLOCKS = 64
TIMEOUT_S = 60.0
PAUSE_S = 0.05
STEPPING_ROWS = 32
STEPPING_ROW_BLOCKS = 64
STEP_PRODUCTS = 8  # of 4096 x 4096: about as long as a decode step
PREFILL_PRODUCTS = 24  # 4 to 6 ms, in which the packing of a prompt is launched


class DeviceTimer:
    """Finds when work on an idle device ends, by the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self._events: list[torch.cuda.Event] = []
        if device.type == "cuda":
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            self._events[0].record()
        self._began_ns = time.monotonic_ns()

    def stop(self) -> None:
        """Mark the end of the work that has been launched."""
        for event in self._events[1:]:
            event.record()

    def end_ns(self) -> int:
        """Wait for the end; returns its time in ns by the monotonic clock, on a CPU the start's."""
        if not self._events:
            return self._began_ns
        begin, end = self._events
        end.synchronize()
        return self._began_ns + int(begin.elapsed_time(end) * 1e6)


@dataclass
class ProductsRunner(ModelRunner):
    """Runs no model: matrix products keep the device busy instead.

    Attributes:
        operand: operand of these products; None, as on a CPU, without products.
        timers: a timer for each step with chunks.
    """

    operand: torch.Tensor | None = None
    timers: queue.SimpleQueue[DeviceTimer] = field(default_factory=queue.SimpleQueue)

    def _launch(self, plan: StepPlan, events: StepEvents | None) -> PendingTokens:
        if plan.chunks:
            timer = DeviceTimer(self.state.device)
            self._multiply(PREFILL_PRODUCTS)
            timer.stop()
            self.timers.put(timer)
        elif plan.decodes:
            self._multiply(STEP_PRODUCTS)
        tokens = torch.full((plan.num_samples,), 7, device=self.state.device)
        return PendingTokens(plan.number, tokens, events=events)

    def _multiply(self, times: int) -> None:
        operand = self.operand
        if operand is not None:
            for _ in range(times):
                torch.mm(operand, operand)


class Engine:
    """One process's engine, with a pool large enough for the prompts in a row.

    Args:
        device: the engine's device.
        num_tokens: length of each prompt.
        transport: name of the transport of its KV endpoint.
        handle: gets the endpoint's events.
        stepping: whether it also decodes other sequences.
    """

    def __init__(
        self,
        device: torch.device,
        num_tokens: int,
        transport: str,
        handle: Callable[[KvEvent], None] = lambda _event: None,
        stepping: bool = False,
    ) -> None:
        self.num_tokens = num_tokens
        is_gpu = device.type == "cuda"
        if is_gpu:
            torch.cuda.set_device(device)
        num_blocks = (MOST_IN_A_ROW + 1) * num_tokens // BLOCK_SIZE
        num_blocks += STEPPING_ROWS * STEPPING_ROW_BLOCKS if stepping else 0
        pool = allocate_pool(LAYOUT, num_blocks, device)
        longest = num_tokens + 64
        limits = SchedulerLimits(256, 8 * num_tokens, longest, max_waiting=256)
        scheduler = Scheduler(
            limits, BlockPool(num_blocks, LAYOUT, False), BlockHasher("bench", IDENTITY)
        )
        state = DeviceState(256, -(-longest // BLOCK_SIZE), device)
        ops = load_ops("auto", device.type)
        self.runner = ProductsRunner(NoModel(), ops, pool, LAYOUT, state, vocab_size=1)
        if is_gpu:
            self.runner.operand = torch.randn(4096, 4096, device=device).to(torch.bfloat16)
        slot_bytes = packed_bytes(LAYOUT, STAGING_SLOT_BLOCKS)
        self.staging = make_staging(STAGING_SLOTS, slot_bytes, device)
        self.open = ExitStack()  # resources to close after the thread has ended
        self.sequences, self._waker = LiveSequences(scheduler.table), Waker()
        self.endpoint = self._open_endpoint(transport, handle)
        core = EngineCore(scheduler, self.sequences, self.runner, True, [self.endpoint])
        self.thread = EngineThread(
            core, lambda _outputs: None, waker=self._waker, busy_polls=is_gpu
        )

    def start_stepping(self) -> None:
        """Add sequences that decode until the bench ends; only for the engine's thread."""
        spec = RequestSpec(max_tokens=self.num_tokens, ignore_eos=True, seed=1)
        for number in range(STEPPING_ROWS):
            self.sequences.add(new_sequence(f"step-{number}", [7] * 32, spec, ()))

    def close(self) -> None:
        """End the thread, then the endpoint."""
        self.thread.stop(TIMEOUT_S)
        self.open.close()

    def _open_endpoint(self, transport: str, handle: Callable[[KvEvent], None]) -> KvEndpoint:
        sockets = KvSockets(None, self.staging.slot_bytes)
        opened = open_transport(transport, self.staging, self.runner, "127.0.0.1")
        self.open.callback(sockets.close)
        self.open.callback(opened.close)
        for fd in opened.fds():
            self._waker.watch(fd)
        endpoint = KvEndpoint.of(
            ReceiverSocket(sockets, "127.0.0.1", "127.0.0.1"),
            handle,
            timeout_s=TIMEOUT_S,
            sequences=self.sequences,
            moves=self.runner,
            staging=self.staging,
            layout=LAYOUT,
            transports={transport: opened},
            watch=self._waker.watch,
            unwatch=self._waker.unwatch,
        )
        self.open.callback(endpoint.close_all)
        return endpoint

    def sequence(self, name: str, *, remote: bool = False, prefill_only: bool = False) -> None:
        """Add a sequence; only for the engine's thread."""
        spec = RequestSpec(max_tokens=2, ignore_eos=True, seed=1)
        sequence = new_sequence(name, [7] * self.num_tokens, spec, ())
        sequence.remote_prefill, sequence.prefill_only = remote, prefill_only
        self.sequences.add(sequence)

    def call(self, work: Callable[[], Any]) -> Any:
        """Run `work` in the engine's thread and return its result."""
        done: queue.Queue[Any] = queue.Queue()
        self.thread.submit(lambda _core: done.put(work()))
        return done.get(timeout=TIMEOUT_S)


def run_sender(commands: Connection, transport: str, device: str, num_tokens: int) -> None:
    """Run a sender's process, until the bench closes the connection.

    It sends None once it can open a link. It answers a `KvHello` with None when the link is open,
    and then each list of jobs, which it sends, with the time in ns at which the first prompt was
    computed.
    """
    engine = Engine(torch.device(device), num_tokens, transport)
    engine.runner.kv_pool.view(torch.uint8).random_(0, 255)
    engine.runner.mover.capture_packing(engine.staging.buffers)
    sender = engine.endpoint.sender
    engine.thread.start()
    commands.send(None)
    (hello,) = commands.recv()
    link = engine.call(lambda: sender.connect(hello))
    commands.send(None)
    num_blocks = -(-num_tokens // BLOCK_SIZE)

    def begin(jobs: list[str], _core: EngineCore) -> None:
        for job in jobs:
            engine.sequence(job, prefill_only=True)
            sender.export(job, link, 0, num_blocks)

    with contextlib.suppress(EOFError):
        while True:
            (jobs,) = commands.recv()
            timers = engine.runner.timers = queue.SimpleQueue()
            engine.thread.submit(partial(begin, jobs))
            first = timers.get(timeout=TIMEOUT_S)
            time.sleep(PAUSE_S)  # until the prompts have crossed: the engine's thread is left alone
            commands.send(first.end_ns())
    engine.close()


class Receiving:
    """The receiving process's side. Links open one after the other.

    Attributes:
        engine: the engine that receives.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._events: queue.Queue[Any] = queue.Queue()  # events of one kind at a time, or an error
        device, stepping = torch.device(options.target), options.stepping
        self.engine = Engine(device, options.tokens, options.transport, self._on_event, stepping)
        self.engine.runner.mover.capture_unpacking(self.engine.staging.buffers)
        self._receiver = self.engine.endpoint.receiver
        self._rounds = 0

    def _on_event(self, event: KvEvent) -> None:
        match event:
            case JobReserved(job):
                self._receiver.complete(job, 7)  # any first token: it is not timed
                self._events.put(job.name)
            case JobActivated(job):
                self._events.put(time.monotonic_ns())
                self.engine.sequences.abort(job.request_id)
            case LinkTested():
                self._events.put(time.monotonic_ns())
            case LinkLost(link, reason):
                self._events.put(BenchError(f"the link to {link.peer} was lost: {reason}"))

    def _next(self, what: str) -> Any:
        try:
            event = self._events.get(timeout=TIMEOUT_S)
        except queue.Empty as exc:
            raise BenchError(f"{what} did not come in {TIMEOUT_S:g} s") from exc
        if isinstance(event, BenchError):
            raise event
        return event

    def open_link(self, process: BenchProcess, name: str) -> float:
        """Open a link; returns the seconds until its test has arrived.

        Raises:
            BenchError: the test does not arrive in time, or the link is lost.
        """
        started_ns = time.monotonic_ns()
        link = self.engine.call(lambda: self._receiver.offer(name, 1))
        hello = KvHello(
            worker_id="receiver",
            epoch=1,
            model_identity=IDENTITY,
            layout=LAYOUT,
            link=link.number,
            token=link.token,
            endpoint=self._receiver.socket.endpoint,
            transports=link.offers,
            slot_bytes=self.engine.staging.slot_bytes,
        )
        process.ask(hello)
        tested_ns = int(self._next(f"the test of the link to {name}"))
        return (tested_ns - started_ns) / 1e9

    def round(self, process: BenchProcess, prompts: int) -> float:
        """Send `prompts` prompts; returns the seconds that this takes.

        Raises:
            BenchError: a prompt does not arrive in time, or the link is lost.
        """
        self._rounds += 1
        names = [f"r{self._rounds}-{n}" for n in range(prompts)]
        for name in names:
            self.engine.call(partial(self.engine.sequence, name, remote=True))
        jobs = [self._next("a reservation") for _ in names]
        computed_ns = int(process.ask(jobs))
        last_ns: int = max(self._next("a prompt") for _ in names)
        return (last_ns - computed_ns) / 1e9
