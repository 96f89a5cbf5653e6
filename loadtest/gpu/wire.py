"""The KV wire: scattered blocks of prompts, from pool to pool, between two processes.

    python -P -m pagewire.loadtest.gpu.wire --carrier ipc [--tokens 8192] [--stepping]

Both processes run a real engine thread, scheduler, block pool and KV endpoint; the model takes no
time. A child computes prompts and sends their blocks; this process reserves them, and a prompt has
crossed when its sequence is activated. GB/s counts from the launch of the step that makes the first
prompt's blocks final until the last activation, next to one contiguous copy of as many bytes
between the same devices in the same run: medians of `ROUNDS` rounds. With `--stepping` the
receiving engine decodes other sequences meanwhile.
"""

from __future__ import annotations

import argparse
import json
import queue
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import torch

from pagewire.kernels import load_ops
from pagewire.loadtest.gpu.clusters import BenchError
from pagewire.shared.engine.build import new_sequence
from pagewire.shared.engine.core import EngineCore
from pagewire.shared.engine.device_state import DeviceState
from pagewire.shared.engine.host_bench import NoModel
from pagewire.shared.engine.model_runner import ModelRunner
from pagewire.shared.engine.pending import PendingTokens
from pagewire.shared.engine.schedule import SchedulerLimits
from pagewire.shared.engine.scheduler import Scheduler
from pagewire.shared.engine.step import StepPlan
from pagewire.shared.engine.step_output import StepOutputs
from pagewire.shared.engine.thread import EngineThread
from pagewire.shared.kv.expectations import Completion
from pagewire.shared.kv.receiver import KvReceiver
from pagewire.shared.kv.receiver_link import ReceiverLink
from pagewire.shared.kv.sender import KvSender
from pagewire.shared.kv.sockets import KvSockets, ReceiverSocket
from pagewire.shared.kv.staging import make_staging
from pagewire.shared.kv.waking import FdWatch
from pagewire.shared.kv_cache.block_hash import BlockHasher
from pagewire.shared.kv_cache.block_pool import BlockPool
from pagewire.shared.protocol import BlockLayout, KvHello
from pagewire.shared.sampling import ResolvedSampling
from pagewire.shared.worker.kv import open_carrier

LAYERS, KV_HEADS, BLOCK_SIZE, HEAD_DIM = 32, 8, 16, 128  # Llama-3.1-8B: blocks of 2 MiB
ROUNDS = 9
IN_A_ROW = (1, 8)  # prompts
SLOTS = 16
SLOT_BLOCKS = 64
TIMEOUT_S = 60.0
STEPPING_ROWS = 32
STEP_PRODUCTS = 8  # of 4096 x 4096: about as long as a decode step


@dataclass
class SteppingRunner(ModelRunner):
    """Computes nothing, but for matrix products that keep the device busy in steps that decode."""

    operand: torch.Tensor | None = None
    launched_ns: int = 0  # the first step with chunks since it was reset

    def _launch(self, plan: StepPlan) -> PendingTokens:
        if plan.decodes and self.operand is not None:
            for _ in range(STEP_PRODUCTS):
                torch.mm(self.operand, self.operand)
        if plan.chunks and not self.launched_ns:
            self.launched_ns = time.monotonic_ns()
        tokens = torch.full((plan.num_samples,), 7, device=self.state.device)
        return PendingTokens(plan.number, tokens)


@dataclass
class Engine:
    """One process's engine, with a pool large enough for the prompts in a row."""

    device: torch.device
    num_tokens: int
    stepping: bool = False
    core: EngineCore = field(init=False)
    thread: EngineThread = field(init=False)
    runner: SteppingRunner = field(init=False)

    def __post_init__(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        num_blocks = (max(IN_A_ROW) + 1) * self.num_tokens // BLOCK_SIZE + 64 * STEPPING_ROWS
        shape = (num_blocks, LAYERS, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
        pool = torch.zeros(shape, dtype=torch.bfloat16, device=self.device)
        longest = self.num_tokens + 64
        limits = SchedulerLimits(256, 8 * self.num_tokens, longest, max_waiting=256)
        hasher = BlockHasher("bench", "bench", "bench", BLOCK_SIZE)
        scheduler = Scheduler(limits, BlockPool(num_blocks, False), hasher)
        state = DeviceState(256, -(-longest // BLOCK_SIZE), self.device)
        ops = load_ops("auto", self.device.type)
        self.runner = SteppingRunner(NoModel(), ops, pool, state)
        if self.stepping:
            self.runner.operand = torch.randn(4096, 4096, device=self.device).to(torch.bfloat16)
        self.core = EngineCore(scheduler, self.runner, overlap=True)
        self.thread = EngineThread(self.core, self._on_outputs)
        slot_bytes = self.runner.mover.parts.packed_bytes(SLOT_BLOCKS)
        self.staging = make_staging(SLOTS, slot_bytes, self.device)
        self.sockets: KvSockets | None = None

    @property
    def block_bytes(self) -> int:
        """Bytes of a block over all layers."""
        return self.runner.mover.parts.block_bytes

    def _on_outputs(self, outputs: StepOutputs) -> None:
        """Tokens of sequences that step, and first tokens."""

    def endpoint(self, carrier: str) -> dict[str, Any]:
        """Return what both halves are made with."""
        self.sockets = KvSockets(None, self.staging.slot_bytes)
        watch = FdWatch(self.thread.watch, self.thread.unwatch)
        opened = open_carrier(carrier, self.staging, self.runner, "127.0.0.1")
        for fd in opened.fds():
            watch.add(fd)
        return {
            "core": self.core,
            "moves": self.runner,
            "staging": self.staging,
            "parts": self.runner.mover.parts,
            "carriers": {carrier: opened},
            "timeout_s": TIMEOUT_S,
            "watch": watch,
        }

    def sequence(self, name: str, *, remote: bool = False, prefill_only: bool = False) -> None:
        """Add a sequence. In the engine's thread."""
        sampling = ResolvedSampling(max_tokens=1, ignore_eos=True, seed=1)
        sequence = new_sequence(name, [7] * self.num_tokens, sampling, ())
        sequence.remote_prefill, sequence.prefill_only = remote, prefill_only
        self.core.add(sequence)

    def call(self, work: Callable[[], Any]) -> Any:
        """Do something in the engine's thread."""
        done: queue.Queue[Any] = queue.Queue()
        self.thread.submit(lambda _core: done.put(work()))
        return done.get(timeout=TIMEOUT_S)


def child(carrier: str, device: str, num_tokens: int) -> None:
    """Be the sender: read a `KvHello`, then orders to send jobs from a moment on."""
    engine = Engine(torch.device(device), num_tokens)
    engine.runner.kv_pool.view(torch.uint8).random_(0, 255)
    engine.runner.mover.capture_packing(engine.staging.buffers)
    parts = engine.endpoint(carrier)
    if engine.sockets is None:
        raise BenchError("the endpoint has no sockets")
    sender = KvSender(sockets=engine.sockets, **parts)
    engine.core.hooks.append(sender)
    engine.thread.start()
    hello = msgspec.json.decode(sys.stdin.readline(), type=KvHello)
    link = engine.call(lambda: sender.connect(hello))
    print(link.outbound.lane(), link.outbound.reply.hex() or "-", flush=True)
    num_blocks = -(-num_tokens // BLOCK_SIZE)

    def begin(jobs: list[str]) -> None:
        for job in jobs:
            engine.sequence(job, prefill_only=True)
            sender.export(job, link, 0, num_blocks)

    for line in sys.stdin:
        engine.runner.launched_ns = 0
        engine.thread.submit(partial(_begin_jobs, begin, json.loads(line)))
        while not engine.runner.launched_ns:
            time.sleep(0.001)
        print(engine.runner.launched_ns, flush=True)
    engine.thread.stop(TIMEOUT_S)


def _begin_jobs(begin: Callable[[list[str]], None], jobs: list[str], _core: EngineCore) -> None:
    begin(jobs)


class Receiving:
    """The receiving process's side."""

    def __init__(self, engine: Engine, carrier: str) -> None:
        parts = engine.endpoint(carrier)
        if engine.sockets is None:
            raise BenchError("the endpoint has no sockets")
        socket = ReceiverSocket(engine.sockets, "127.0.0.1", "127.0.0.1")
        self.tested = threading.Event()
        self.reserved: queue.Queue[str] = queue.Queue()
        self.activated: queue.Queue[int] = queue.Queue()
        self.engine = engine
        self.receiver = KvReceiver(
            socket=socket,
            on_link_tested=lambda _link: self.tested.set(),
            on_link_lost=self._on_link_lost,
            **parts,
        )
        self.receiver.expected.on_reserved = self._on_reserved
        engine.core.hooks.append(self.receiver)

    def _on_reserved(self, request: str, job: str, _first: int, _count: int) -> None:
        done = Completion(job, 7, lambda: self.activated.put(time.monotonic_ns()))
        self.receiver.expected.complete(request, done)
        self.reserved.put(job)

    def _on_link_lost(self, link: ReceiverLink, reason: str) -> None:
        sys.exit(f"the link was lost: {reason}")

    def _reserve(self, names: list[str]) -> None:
        for name in names:
            self.engine.sequence(name, remote=True)

    def round(self, process: Sending, number: int, prompts: int) -> float:
        """Return the seconds that `prompts` prompts take."""
        names = [f"r{number}-{n}" for n in range(prompts)]
        self.engine.call(lambda: self._reserve(names))
        jobs = [self.reserved.get(timeout=TIMEOUT_S) for _ in names]
        launched_ns = int(process.ask(json.dumps(jobs)))
        ends = [self.activated.get(timeout=TIMEOUT_S) for _ in names]
        return (max(ends) - launched_ns) / 1e9


class Sending:
    """The sending process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        if process.stdin is None or process.stdout is None:
            raise BenchError("the child has no pipes")
        self._in, self._out = process.stdin, process.stdout

    def ask(self, line: str) -> str:
        """Write a line and return the answer."""
        self._in.write(line + "\n")
        self._in.flush()
        return self._out.readline()


@contextmanager
def sending_process(options: argparse.Namespace) -> Iterator[Sending]:
    """Run the sender."""
    command = [sys.executable, "-P", "-m", "pagewire.loadtest.gpu.wire", "--child"]
    command += ["--carrier", options.carrier, "--source", options.source]
    command += ["--tokens", str(options.tokens)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield Sending(process)
        finally:
            process.kill()


def copy_gb_per_s(source: str, target: str, nbytes: int) -> float:
    """Return the GB/s of a plain copy, the median of several."""
    a = torch.ones(nbytes, dtype=torch.uint8, device=source)
    b = torch.empty_like(a, device=target)
    speeds = []
    for _ in range(ROUNDS + 2):
        for device in {source, target} - {"cpu"}:
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        b.copy_(a)
        for device in {source, target} - {"cpu"}:
            torch.cuda.synchronize(device)
        speeds.append(nbytes / (time.perf_counter() - started) / 1e9)
    return statistics.median(speeds[2:])


def measure(options: argparse.Namespace) -> None:
    """Print a line for each number of prompts in a row."""
    engine = Engine(torch.device(options.target), options.tokens, options.stepping)
    engine.runner.mover.capture_unpacking(engine.staging.buffers)
    receiving = Receiving(engine, options.carrier)
    total = -(-options.tokens // BLOCK_SIZE) * engine.block_bytes
    ceiling = copy_gb_per_s(options.source, options.target, total)
    engine.thread.start()
    link, offer = engine.call(lambda: receiving.receiver.offer("sender"))
    layout = BlockLayout(
        fingerprint="bench",
        dtype="bfloat16",
        block_size=BLOCK_SIZE,
        num_layers=LAYERS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        block_bytes=engine.block_bytes,
    )
    hello = KvHello(
        worker_id="receiver",
        epoch=1,
        layout=layout,
        link=offer.link,
        token=offer.token,
        endpoint=offer.endpoint,
        carriers=offer.carriers,
        slot_bytes=engine.staging.slot_bytes,
    )
    with sending_process(options) as process:
        lane, reply = process.ask(msgspec.json.encode(hello).decode()).rsplit(maxsplit=1)
        answer = bytes.fromhex(reply.strip("-"))
        engine.call(lambda: receiving.receiver.accept(link, options.carrier, answer))
        if not receiving.tested.wait(TIMEOUT_S):
            sys.exit("the link's test did not come")
        if options.stepping:
            engine.call(lambda: _start_stepping(engine))
        number = 0
        for prompts in IN_A_ROW:
            times = []
            for _ in range(ROUNDS + 2):
                number += 1
                times.append(receiving.round(process, number, prompts))
            _report(options, lane, prompts, total * prompts, times[2:], ceiling)
    engine.thread.stop(TIMEOUT_S)


def _start_stepping(engine: Engine) -> None:
    sampling = ResolvedSampling(max_tokens=engine.num_tokens, ignore_eos=True, seed=1)
    for number in range(STEPPING_ROWS):
        engine.core.add(new_sequence(f"step-{number}", [7] * 32, sampling, ()))


def _report(
    options: argparse.Namespace,
    lane: str,
    prompts: int,
    nbytes: int,
    times: list[float],
    ceiling: float,
) -> None:
    speed = nbytes / statistics.median(times) / 1e9
    print(
        json.dumps(
            {
                "what": "wire",
                "carrier": options.carrier,
                "lane": lane,
                "stepping": options.stepping,
                "prompts_in_a_row": prompts,
                "gb_per_s": round(speed, 1),
                "slowest": round(nbytes / max(times) / 1e9, 1),
                "fastest": round(nbytes / min(times) / 1e9, 1),
                "copy_gb_per_s": round(ceiling, 1),
                "of_copy": round(speed / ceiling, 3),
            }
        ),
        flush=True,
    )


def main() -> None:
    """Measure one carrier."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    gpus = torch.cuda.device_count()
    parser.add_argument("--carrier", default="ipc" if gpus else "zmq")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--source", default="cuda:0" if gpus else "cpu")
    parser.add_argument("--target", default=f"cuda:{min(gpus - 1, 1)}" if gpus else "cpu")
    parser.add_argument("--stepping", action="store_true")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.carrier, options.source, options.tokens)
    else:
        measure(options)


if __name__ == "__main__":
    main()
