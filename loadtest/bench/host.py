"""Measures the host's work for a step, with a simulated device that takes no time.

    python -P -m pagewire.loadtest.bench.host --rows 256

Prints one JSON line for decoding and one for prefill, each with and without prefix cache, in
microseconds per step: the medians of several windows of steps, and the fastest window's total. In
decoding, each step has all rows; in prefill, each has one new prompt, whose answer is one token.
Times are CPU time of the thread, so that other processes on the machine matter little. They cover
what the engine's thread does between two launches: scheduling (`schedule`), the runner's
inputs (`prepare`), and accepting tokens and passing outputs on (`postprocess`). CUDA's own calls
are not included.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from pagewire.kernels import load_ops
from pagewire.loadtest.bench.tables import emit
from pagewire.shared.engine.core import EngineCore
from pagewire.shared.engine.execution.device_state import DeviceState
from pagewire.shared.engine.execution.model_runner import ModelRunner
from pagewire.shared.engine.execution.pending import PendingTokens
from pagewire.shared.engine.execution.step_inputs import HostStep, StepInputs, StepShape
from pagewire.shared.engine.live_sequences import LiveSequences
from pagewire.shared.engine.scheduling.schedule import Schedule, SchedulerLimits
from pagewire.shared.engine.scheduling.scheduler import Scheduler
from pagewire.shared.engine.scheduling.sequence import new_sequence
from pagewire.shared.engine.scheduling.step import PrefillChunk, StepPlan
from pagewire.shared.kv.block_hash import BlockHasher
from pagewire.shared.kv.block_pool import BlockPool
from pagewire.shared.kv.kv_layout import CachedToken, KvLayout
from pagewire.shared.kv.model_identity import ModelIdentity
from pagewire.shared.kv.storage import allocate_pool
from pagewire.shared.request.sampling import RequestSpec

BLOCK_SIZE = 16
IDENTITY = ModelIdentity(
    fingerprint="bench", dtype="float32", kv_format="float32", block_size=BLOCK_SIZE
)
PROMPT = 1000  # tokens of the first sequence; each next one has one more, so blocks fill up in turn
MAX_MODEL_LEN = 16384
WINDOW = 64  # steps
MAX_WINDOWS = 64
MAX_STEPS = (MAX_WINDOWS + 16) * WINDOW  # of a sequence, also while others' prompts are computed


class TimedScheduler(Scheduler):
    """Measures the time of scheduling.

    Attributes:
        seconds: CPU time so far.
    """

    seconds = 0.0

    def schedule(self) -> Schedule:
        """Return the next schedule, and measure the time that it takes."""
        start = time.thread_time()
        schedule = super().schedule()
        self.seconds += time.thread_time() - start
        return schedule


@dataclass(slots=True)
class InstantRunner(ModelRunner):
    """Does a runner's work before the launch, and returns the same token for each row.

    Attributes:
        seconds: CPU time so far.
    """

    seconds: float = 0.0
    _tokens: torch.Tensor = field(default_factory=lambda: torch.full((4096,), 7))

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> PendingTokens:
        """Prepare a step, and measure the time that this takes."""
        start = time.thread_time()
        self.state.apply(plan)
        if plan.chunks:
            self._prepare_chunks(plan.chunks)
        pending = PendingTokens(plan.number, self._tokens[: plan.num_samples])
        self.seconds += time.thread_time() - start
        return pending

    def _prepare_chunks(self, chunks: list[PrefillChunk]) -> None:
        shape = StepShape(0, sum(chunk.length for chunk in chunks), len(chunks))
        step = HostStep([], chunks, BLOCK_SIZE, self.state.host_tables)
        StepInputs.build_padded(step, shape, self.state.padding_slot)


Engine = tuple[EngineCore, TimedScheduler, InstantRunner]


def make_core(rows: int, caching: bool, longest: int) -> Engine:
    """Return an engine for some sequences of up to `longest` tokens."""
    num_blocks = rows * (-(-longest // BLOCK_SIZE) + 1)
    limits = SchedulerLimits(rows, 8192, MAX_MODEL_LEN, max_waiting=rows)
    hasher = BlockHasher("bench", IDENTITY)
    layout = KvLayout.of([None], CachedToken(2, 1, 1), BLOCK_SIZE, "float32")
    scheduler = TimedScheduler(limits, BlockPool(num_blocks, layout, caching), hasher)
    state = DeviceState(rows, MAX_MODEL_LEN // BLOCK_SIZE, torch.device("cpu"))
    pool = allocate_pool(layout, 1, state.device)
    runner = InstantRunner(NoModel(), load_ops("torch", "cpu"), pool, layout, state, vocab_size=1)
    sequences = LiveSequences(scheduler.table)
    return EngineCore(scheduler, sequences, runner, overlap=True), scheduler, runner


class NoModel:
    """A placeholder for a model that is not run."""

    def forward(self, *_args: object) -> torch.Tensor:
        """Raise: the simulated device never computes a model."""
        raise NotImplementedError

    def compute_logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Raise: the simulated device never computes a model."""
        raise NotImplementedError


def measure(engine: Engine, windows: int, before: Callable[[], None]) -> dict[str, float]:
    """Return microseconds per step; `before` is called before each step and counted with it."""
    core, scheduler, runner = engine
    results: dict[str, list[float]] = {"schedule": [], "prepare": [], "postprocess": []}
    for _ in range(windows + 1):
        scheduler.seconds = runner.seconds = 0.0
        start = time.thread_time()
        for _ in range(WINDOW):
            before()
            core.step()
        total = time.thread_time() - start
        results["schedule"].append(scheduler.seconds)
        results["prepare"].append(runner.seconds)
        results["postprocess"].append(total - scheduler.seconds - runner.seconds)
    in_us = {name: [s / WINDOW * 1e6 for s in seconds[1:]] for name, seconds in results.items()}
    totals = [sum(parts) for parts in zip(*in_us.values(), strict=True)]
    medians = {name: statistics.median(values) for name, values in in_us.items()}
    return {**medians, "total": statistics.median(totals), "fastest": min(totals)}


def measure_decode(rows: int, caching: bool, windows: int) -> dict[str, float]:
    """Return microseconds per step in which all rows decode, past their prompts."""
    engine = core, scheduler, _ = make_core(rows, caching, PROMPT + rows + MAX_STEPS)
    rng = random.Random(0)
    spec = RequestSpec(max_tokens=MAX_MODEL_LEN, ignore_eos=True, seed=1)
    for number in range(rows):
        prompt = [rng.randrange(1000) for _ in range(PROMPT + number)]
        core.sequences.add(new_sequence(f"bench-{number}", prompt, spec, ()))
    while scheduler.meter.num_queued_tokens:
        core.step()
    return measure(engine, windows, lambda: None)


def measure_prefill(length: int, caching: bool, windows: int) -> dict[str, float]:
    """Return microseconds per step that runs one new prompt and samples its only token."""
    engine = make_core(8, caching, MAX_MODEL_LEN)
    spec = RequestSpec(max_tokens=1, temperature=1.0, seed=1)
    rng = random.Random(0)
    steps = (windows + 1) * WINDOW
    prompts = iter([[rng.randrange(1000) for _ in range(length)] for _ in range(steps)])
    names = itertools.count()

    def add_prompt() -> None:
        engine[0].sequences.add(new_sequence(f"bench-{next(names)}", next(prompts), spec, ()))

    return measure(engine, windows, add_prompt)


def main() -> None:
    """Measure with and without the prefix cache."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt in prefill")
    parser.add_argument(
        "--windows", type=int, default=15, help=f"of {WINDOW} steps each, at most {MAX_WINDOWS}"
    )
    args = parser.parse_args()
    if args.windows > MAX_WINDOWS:
        parser.error(f"--windows must be at most {MAX_WINDOWS}")
    torch.set_num_threads(1)
    for what, size, measure_steps in (
        ("decode", args.rows, measure_decode),
        ("prefill", args.prompt, measure_prefill),
    ):
        for caching in (False, True):
            times = measure_steps(size, caching, args.windows)
            emit(what, size=size, prefix_cache=caching, **times)


if __name__ == "__main__":
    main()
