"""A worker in virtual time: the real engine over a simulated device, and its loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from pagewire.services.cli.simulation.device import SimulatedDevice
from pagewire.services.cli.simulation.events import Events
from pagewire.services.cli.simulation.machine import MachinePrices
from pagewire.services.router.placement.forecast import Forecast
from pagewire.shared.cluster.worker_record import LinkInfo
from pagewire.shared.control.protocol import LoadReport
from pagewire.shared.costs.first_steps import FIRST, FURTHER
from pagewire.shared.costs.step_prices import StepPrices
from pagewire.shared.engine.core import EngineCore
from pagewire.shared.engine.execution.executor import StepHook
from pagewire.shared.engine.live_sequences import LiveSequences
from pagewire.shared.engine.scheduling.schedule import SchedulerLimits
from pagewire.shared.engine.scheduling.scheduler import Scheduler
from pagewire.shared.engine.step_output import StepOutputs
from pagewire.shared.kv.block_hash import BlockHasher
from pagewire.shared.kv.block_pool import BlockPool, CacheListener
from pagewire.shared.kv.kv_layout import CachedToken, KvLayout
from pagewire.shared.kv.model_identity import ModelIdentity

EPOCH = 1
WATERMARK_SHARE = 100  # as in shared/engine/build.py
SNAPSHOT_INTERVAL_S = 0.02  # as in shared/engine/thread.py


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """Settings of all workers; the names are those of the settings.

    Attributes:
        caching: whether blocks of equal content are used again.
        retained_share: of the KV pool, for the sessions of one API key.
        slo_gap_s: largest time between two tokens that the workers try to keep.
    """

    max_num_batched_tokens: int
    max_num_seqs: int = 512
    max_waiting: int = 1024
    local_prefill_tokens: int = 32
    caching: bool = True
    retained_share: float = 0.5
    slo_gap_s: float = math.inf


def hasher_of(machine: MachinePrices) -> BlockHasher:
    """Return what hashes the blocks of all workers."""
    identity = ModelIdentity(
        fingerprint="simulated",
        dtype="bfloat16",
        kv_format="bfloat16",
        block_size=machine.block_size,
    )
    return BlockHasher("simulated", identity)


def make_core(
    limits: WorkerLimits, device: SimulatedDevice, listener: CacheListener, hook: StepHook
) -> EngineCore:
    """Return the engine that a worker with this device has."""
    machine, token = device.machine, CachedToken(2, 1, 1)
    layout = KvLayout.of([None], token, machine.block_size, "bfloat16")
    scheduling = SchedulerLimits(
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=machine.kv_blocks * machine.block_size,
        max_waiting=limits.max_waiting,
        watermark_blocks=machine.kv_blocks // WATERMARK_SHARE,
        local_prefill_tokens=limits.local_prefill_tokens,
        gap_s=limits.slo_gap_s,
        step_s=math.inf if machine.step_limit_s is None else machine.step_limit_s,
    )
    retained = int(limits.retained_share * machine.kv_blocks)
    pool = BlockPool(machine.kv_blocks, layout, limits.caching, listener, retained)
    scheduler = Scheduler(scheduling, pool, hasher_of(machine))
    sequences = LiveSequences(scheduler.table, clock=device.events.clock)
    core = EngineCore(scheduler, sequences, device, machine.host.launches_early, [hook])
    for step in (*FIRST, *FURTHER):
        core.scheduler.costs.learn(step.work, machine.steps.step_s(step.work))
    return core


def _multiplied(prices: StepPrices, factor: float) -> StepPrices:
    return msgspec.structs.replace(
        prices,
        fixed=factor * prices.fixed,
        per_token=tuple(factor * price for price in prices.per_token),
        per_sequence=factor * prices.per_sequence,
        per_context=factor * prices.per_context,
        per_product=factor * prices.per_product,
    )


class SimulatedWorker:
    """An engine and its loop, as `EngineThread` runs it.

    Args:
        name: of the worker.
        is_prefill: its role.
        core: its engine, which this makes the only user of.
        device: the engine's device.
        on_outputs: called with the outputs of each step.

    Attributes:
        iterations: of the loop.
        price_factor: what the prices that it reports are multiplied by.
    """

    def __init__(
        self,
        name: str,
        is_prefill: bool,
        core: EngineCore,
        device: SimulatedDevice,
        on_outputs: Callable[[SimulatedWorker, StepOutputs], object],
    ) -> None:
        self._machine = device.machine
        self.name, self.is_prefill = name, is_prefill
        self.core, self.device = core, device
        self.iterations, self.price_factor = 0, 1.0
        self._events: Events = device.events
        self._on_outputs = on_outputs
        self._commands_s = self._next_snapshot_s = 0.0
        self._snapshot, self._snapshot_s = self.report(), 0.0
        self._commands: list[Callable[[EngineCore], object]] = []
        self._is_woken = False

    def submit(self, command: Callable[[EngineCore], object]) -> None:
        """Run a command between two steps."""
        self._commands.append(command)
        if not self._is_woken:
            self._is_woken = True
            self._events.at(self._events.now, self._run)

    def report(self) -> LoadReport:
        """Return a load report with the load now."""
        load = self.core.scheduler.meter.load
        if self.price_factor != 1:
            load = msgspec.structs.replace(load, seconds=self.price_factor * load.seconds)
        return LoadReport(EPOCH, self.iterations, load)

    def recent(self) -> LoadReport:
        """Return the load at most a few steps ago, as decode workers report it with tokens."""
        age_s = self._events.now - self._snapshot_s
        return msgspec.structs.replace(self._snapshot, age_s=age_s)

    def _take_snapshot(self) -> None:
        self._snapshot, self._snapshot_s = self.report(), self._commands_s
        self._next_snapshot_s = self._events.now + SNAPSHOT_INTERVAL_S

    def forecast(self, links: Mapping[str, LinkInfo]) -> Forecast:
        """Return what the worker's record predicts.

        Args:
            links: its KV links to workers that it computes prompts for, by their names.
        """
        scheduler = self.core.scheduler
        return Forecast(
            prices=_multiplied(scheduler.costs.published, self.price_factor),
            max_rows=scheduler.limits.max_num_seqs,
            total_blocks=scheduler.pool.num_blocks,
            block_size=self._machine.block_size,
            block_bytes=self._machine.block_size * self._machine.kv_token_bytes,
            links=links,
        )

    def _run(self) -> None:
        """Run iterations until only time brings something new.

        Without overlap, launching a step takes as long as the step: commands wait until it ends.
        """
        self._is_woken = False
        worked, core = True, self.core
        while worked and not (core.awaits_device and not (self._commands and core.overlap)):
            self.iterations += 1
            if core.overlap or not core.awaits_step:
                self._run_commands()
            before = self.device.last
            outputs, worked = core.advance(wait=False)
            if (step := self.device.last) is not None and step is not before:
                self._events.at(step.ends_s, self._run)
            if outputs:
                if any(other.finish_reason is not None for other in outputs.individual):
                    self._take_snapshot()
                self._on_outputs(self, outputs)
            worked |= core.run_hooks()
            if self._events.now >= self._next_snapshot_s or not core.has_work:
                self._take_snapshot()

    def _run_commands(self) -> None:
        self._commands_s = self._events.now
        commands, self._commands = self._commands, []
        for command in commands:
            command(self.core)
