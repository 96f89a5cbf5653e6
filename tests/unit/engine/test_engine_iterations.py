"""The order of an iteration, iterations that do not wait, and what runs as a decode row."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from pagewire.shared.engine.core import EngineCore
from pagewire.shared.engine.scheduling.sequence import Sequence
from pagewire.shared.engine.scheduling.step import StepPlan
from pagewire.shared.engine.step_output import StepOutputs
from pagewire.tests.support.engine_iterations import (
    BOTH,
    LIMIT,
    assert_idle,
    drain,
)
from pagewire.tests.support.fake_device import FakeDevice
from pagewire.tests.support.fake_engine import generate, make_core, make_parts, make_sequence

pytestmark = pytest.mark.usefixtures("each_executor")

# The order of an iteration


@dataclass
class Hook:
    """Notes when it was called."""

    device: FakeDevice
    sequence: Sequence
    busy: bool = False
    due: bool = False
    announced: list[tuple[int, int]] = field(default_factory=list)  # (plan, steps launched)
    seen: list[tuple[int, int]] = field(default_factory=list)  # (steps launched, tokens)

    def before_launch(self, plan: StepPlan) -> None:
        self.announced.append((plan.number, len(self.device.batches)))

    def after_launch(self, plan: StepPlan | None) -> bool:
        self.seen.append((len(self.device.batches), len(self.sequence.token_ids)))
        return self.busy

    def poll(self) -> bool:
        return self.due


def hooked(length: int, overlap: bool) -> tuple[EngineCore, FakeDevice, Hook]:
    """Return an engine, its device, and its hook, which has a sequence to add."""
    parts = make_parts(overlap=overlap)
    hook = Hook(parts.device, make_sequence("a", [1] * length))
    return parts.make_core(hook), parts.device, hook


@BOTH
def test_hooks_see_a_plan_before_it_is_launched_and_outputs_do_not_wait_for_them(
    overlap: bool,
) -> None:
    core, _, hook = hooked(3, overlap)
    core.sequences.add(hook.sequence)
    for number in (1, 2, 3):
        outputs, _ = core.advance(wait=True)
        assert hook.announced == [(n, n - 1) for n in range(1, number + 1)]
        assert bool(outputs) == (number > overlap)
        assert len(hook.seen) == number - 1
        core.run_hooks()
        assert hook.seen[-1] == (number, 3 + number - overlap)


def test_hooks_run_without_a_step_and_keep_the_loop_polling() -> None:
    parts, sequence = make_parts(), make_sequence("a", [1])
    idle, busy = Hook(parts.device, sequence), Hook(parts.device, sequence, busy=True)
    core = parts.make_core(busy, idle)
    assert core.step() == (StepOutputs(), False)
    assert idle.seen and busy.seen and core.hooks_busy
    busy.busy = False
    core.step()
    assert not core.hooks_busy


# Iterations that do not wait


def iterate(core: EngineCore) -> bool:
    """An iteration as the engine's thread makes it."""
    _outputs, worked = core.step(wait=False)
    core.scheduler.table.check_integrity()
    return worked


@pytest.mark.parametrize(("overlap", "depth"), [(False, 1), (True, 2)], ids=["serial", "overlap"])
def test_iterations_go_on_while_the_device_runs_but_launch_no_more_steps(
    overlap: bool, depth: int
) -> None:
    core, device, hook = hooked(5, overlap)
    sequence = hook.sequence
    expected = generate(sequence, LIMIT)
    core.sequences.add(sequence)
    device.has_run = False
    worked = [iterate(core) for _ in range(6)]
    assert worked == [True] * depth + [False] * (6 - depth)
    assert len(device.batches) == depth
    assert (core.awaits_step, len(hook.seen)) == (True, 6)
    assert sequence.token_ids == [1] * 5
    device.has_run = True
    while core.has_work:
        assert iterate(core)
    assert sequence.token_ids[5:] == expected
    assert not core.awaits_step


@BOTH
def test_an_iteration_is_due_when_the_device_has_done_what_is_waited_for(overlap: bool) -> None:
    core, device, hook = hooked(5, overlap)
    assert not core.poll()
    core.sequences.add(hook.sequence)
    device.has_run = False
    iterate(core)
    assert not core.poll()
    hook.due = True
    assert core.poll()
    hook.due = False
    device.has_run = True
    assert core.poll()


@pytest.mark.parametrize(("overlap", "depth"), [(False, 1), (True, 2)], ids=["serial", "overlap"])
def test_chunks_that_sample_nothing_do_not_run_ahead_of_the_device(
    overlap: bool, depth: int
) -> None:
    core, device = make_core(max_num_batched_tokens=4, overlap=overlap)
    core.sequences.add(make_sequence("a", [1] * 40))
    device.has_run = False
    for _ in range(6):
        iterate(core)
    assert len(device.batches) == depth


@BOTH
def test_request_that_is_aborted_while_the_device_runs_leaves_nothing(overlap: bool) -> None:
    core, device = make_core(overlap=overlap)
    core.sequences.add(make_sequence("a", [1] * 5))
    device.has_run = False
    for _ in range(3):
        iterate(core)
    core.sequences.abort("a")
    assert core.scheduler.pool.counts().used == 0
    iterate(core)
    device.has_run = True
    assert drain(core) == []
    assert_idle(core)


@BOTH
def test_last_token_after_a_cached_prefix_is_a_decode_row(overlap: bool) -> None:
    core, device = make_core(overlap=overlap)
    prompt = [1] * 9  # two full blocks and one token
    core.sequences.add(make_sequence("first", prompt, max_tokens=1))
    drain(core)
    computed, rows = core.stats.prompt_tokens_computed, device.num_decode_rows
    second = make_sequence("second", prompt, max_tokens=1)
    core.sequences.add(second)
    drain(core)
    assert second.num_cached_tokens == 8
    assert device.num_decode_rows == rows + 1
    assert core.stats.prompt_tokens_computed == computed + 1
