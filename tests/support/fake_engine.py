"""Engines over a fake device, their sequences, and the tokens that these should end with."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from pagewire.shared.costs.step_costs import StepCosts
from pagewire.shared.costs.step_work import StepWork
from pagewire.shared.engine.constraints import Constraints
from pagewire.shared.engine.core import EngineCore
from pagewire.shared.engine.execution.executor import StepHook
from pagewire.shared.engine.live_sequences import LiveSequences
from pagewire.shared.engine.scheduling.schedule import SchedulerLimits
from pagewire.shared.engine.scheduling.scheduler import Scheduler
from pagewire.shared.engine.scheduling.sequence import Sequence
from pagewire.shared.engine.step_clock import OnStepChange
from pagewire.shared.kv.block_hash import BlockHasher
from pagewire.shared.kv.block_pool import BlockPool, CacheListener
from pagewire.shared.kv.kv_layout import KvLayout
from pagewire.shared.request.sampling import RequestSpec
from pagewire.shared.request.sampling_types import RetainSeconds
from pagewire.tests.support.fake_device import FakeDevice, next_token
from pagewire.tests.support.kv_layouts import kv_layout, model_identity


def generate(sequence: Sequence, max_model_len: int) -> list[int]:
    """Return all outputs that a sequence should end with, including those that it replays."""
    tokens, prompt = list(sequence.token_ids), sequence.num_prompt_tokens
    limit = 1 if sequence.prefill_only else sequence.spec.max_tokens
    while len(tokens) - prompt < limit and len(tokens) < max_model_len:
        tokens.append(next_token(sequence.spec.seed or 0, tokens))
        if tokens[-1] in sequence.stop_token_ids:
            break
    return tokens[prompt:]


def make_sequence(
    request_id: str,
    prompt: list[int],
    *,
    max_tokens: int = 4,
    stop: frozenset[int] = frozenset(),
    replayed: list[int] | None = None,
    remote_prefill: bool = False,
    prefill_only: bool = False,
    seed: int = 0,
    owner: str | None = None,
    retain_s: RetainSeconds = 0,
) -> Sequence:
    """Return a sequence as `new_sequence` makes them."""
    return Sequence(
        request_id=request_id,
        token_ids=[*prompt, *(replayed or [])],
        num_prompt_tokens=len(prompt),
        num_replayed_tokens=len(replayed or []),
        spec=RequestSpec(max_tokens=max_tokens, seed=seed, owner=owner, retain_s=retain_s),
        stop_token_ids=stop,
        remote_prefill=remote_prefill,
        prefill_only=prefill_only,
    )


# Makes the devices of engines; the fixture `each_executor` sets one in another process here.
make_device: Callable[[SchedulerLimits, int, KvLayout], FakeDevice] = FakeDevice


class FixedCosts(StepCosts):
    """Prices of steps that stay as they are, however long steps take."""

    def observe(self, work: StepWork, seconds: float) -> None:
        """Learn nothing."""


@dataclass(frozen=True)
class Parts:
    """The parts of an engine over a fake device."""

    scheduler: Scheduler
    sequences: LiveSequences
    device: FakeDevice
    overlap: bool

    def make_core(
        self, *hooks: StepHook, on_step_change: OnStepChange = lambda _step: None
    ) -> EngineCore:
        """Make the core, once."""
        parts = self.scheduler, self.sequences, self.device, self.overlap
        return EngineCore(*parts, hooks, on_step_change)


def make_core(
    hooks: Iterable[StepHook] = (),
    on_step_change: OnStepChange = lambda _step: None,
    **options: Any,
) -> tuple[EngineCore, FakeDevice]:
    """Return an engine and its fake device, with options of `make_parts`."""
    parts = make_parts(**options)
    return parts.make_core(*hooks, on_step_change=on_step_change), parts.device


def make_parts(
    *,
    num_blocks: int = 16,
    block_size: int = 4,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 16,
    max_model_len: int = 1024,
    max_waiting: int = 1024,
    watermark_blocks: int = 0,
    local_prefill_tokens: int = 0,
    caching: bool = True,
    overlap: bool = False,
    listener: CacheListener | None = None,
    windows: tuple[int | None, ...] = (None,),
    gap_s: float = math.inf,
    step_sizes: tuple[int, ...] = (),
    max_retained: int = 0,
    costs: StepCosts | None = None,
    constraints: Constraints | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Parts:
    """Return the parts of an engine; sequences are bounded by the pool's size."""
    layout = kv_layout(windows, block_size)
    fits = layout.longest_sequence(num_blocks, max_num_batched_tokens)
    limits = SchedulerLimits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=min(max_model_len, fits),
        max_waiting=max_waiting,
        watermark_blocks=watermark_blocks,
        local_prefill_tokens=local_prefill_tokens,
        gap_s=gap_s,
        step_sizes=step_sizes,
    )
    pool = BlockPool(num_blocks, layout, caching, listener, max_retained)
    hasher = BlockHasher("secret", model_identity(block_size=block_size))
    scheduler = Scheduler(limits, pool, hasher, costs)
    device = make_device(limits, num_blocks, layout)
    sequences = LiveSequences(scheduler.table, constraints or Constraints(), clock)
    return Parts(scheduler, sequences, device, overlap)
