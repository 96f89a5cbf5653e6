"""Steps that fail, names that are taken, requests that are aborted."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from pagewire.shared.base.errors import InvalidRequestError
from pagewire.shared.engine.core import EngineCore
from pagewire.shared.engine.execution.executor import Executor, PendingStep
from pagewire.shared.engine.failed_steps import MAX_FAILED_PROMPTS, MAX_FAILED_STEPS
from pagewire.shared.engine.scheduling.step import StepPlan
from pagewire.shared.worker.engine_loss import ended
from pagewire.tests.support.engine_iterations import (
    BOTH,
    LIMIT,
    assert_idle,
    drain,
    ends_of,
    tokens_of,
)
from pagewire.tests.support.fake_engine import generate, make_core, make_sequence

pytestmark = pytest.mark.usefixtures("each_executor")

# Steps that fail


@BOTH
@pytest.mark.parametrize("where", ["fail_execute", "fail_wait"])
def test_failed_step_fails_its_newest_row_alone(
    overlap: bool, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    core, device = make_core(max_num_seqs=3, overlap=overlap)
    sequences = [make_sequence(name, [seed] * 5, seed=seed) for seed, name in enumerate("abc")]
    expected = {each.request_id: generate(each, LIMIT) for each in sequences}
    for sequence in sequences:
        core.sequences.add(sequence)
    outputs = [*core.step()[0], *core.step()[0]]
    device.fail(where, "device on fire")
    outputs += drain(core)
    failed = [o for o in outputs if o.finish_reason == "error"]
    assert {o.error for o in failed} == {"the model step failed"}
    assert {o.request_id for o in failed} == {"c"}
    for name in "ab":
        assert tokens_of(outputs, name) == expected[name]
    assert "device on fire" in caplog.text
    assert_idle(core)


class Poisoned:
    """An executor that fails each step with a certain token in a chunk."""

    def __init__(self, inner: Executor, token: int) -> None:
        self.inner, self.token = inner, token

    def execute(self, plan: StepPlan) -> PendingStep:
        if any(self.token in chunk.token_ids for chunk in plan.chunks):
            raise RuntimeError("poison")
        return self.inner.execute(plan)


@BOTH
def test_prompt_that_fails_its_steps_is_found_among_others(
    overlap: bool, caplog: pytest.LogCaptureFixture
) -> None:
    core, _ = make_core(num_blocks=64, max_num_seqs=8, overlap=overlap)
    early = [make_sequence(f"early{seed}", [1] * 5, seed=seed) for seed in range(2)]
    late = [make_sequence(f"late{seed}", [2] * 6, seed=seed) for seed in range(2)]
    expected = {each.request_id: generate(each, LIMIT) for each in (*early, *late)}
    core.executor = Poisoned(core.executor, 3)
    for sequence in early:
        core.sequences.add(sequence)
    outputs = [*core.step()[0], *core.step()[0]]
    for sequence in (late[0], make_sequence("poison", [2, 3, 2]), late[1]):
        core.sequences.add(sequence)
    outputs += drain(core)
    assert ends_of(outputs) == {"poison": "error"} | dict.fromkeys(expected, "length")
    assert {name: tokens_of(outputs, name) for name in expected} == expected
    assert_idle(core)


def test_failed_result_spares_those_of_the_step_after_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    core, device = make_core(overlap=True)
    device.fail("fail_wait", "device on fire")
    core.sequences.add(make_sequence("fails", [0] * 3))
    core.step()
    later = make_sequence("later", [1] * 5)
    expected = generate(later, LIMIT)
    core.sequences.add(later)
    outputs = drain(core)
    assert ends_of(outputs) == {"fails": "error", "later": "length"}
    assert tokens_of(outputs, "later") == expected
    assert "device on fire" in caplog.text
    assert_idle(core)


def test_late_failure_does_not_hit_a_namesake(caplog: pytest.LogCaptureFixture) -> None:
    core, device = make_core(overlap=True)
    device.fail("fail_wait", "device on fire")
    core.sequences.add(make_sequence("a", [0] * 3))
    core.step()
    core.sequences.abort("a")
    namesake = make_sequence("a", [1] * 5)
    expected = generate(namesake, LIMIT)
    core.sequences.add(namesake)
    outputs = drain(core)
    assert ends_of(outputs) == {"a": "length"}
    assert tokens_of(outputs, "a") == expected
    assert "device on fire" in caplog.text
    assert_idle(core)


@BOTH
@pytest.mark.parametrize("where", ["fail_execute", "fail_wait"])
def test_device_that_fails_every_step_ends_the_loop(
    overlap: bool, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    core, device = make_core(overlap=overlap)
    for number in range(20):
        core.sequences.add(make_sequence(f"r{number}", [1, number % 7]))
    failed: list[str] = []
    with pytest.raises(RuntimeError, match="device lost"):
        while core.has_work:
            device.fail(where, "device lost")
            outputs, _ = core.step()
            failed += ends_of(outputs)
    # With overlap, a step that does not count may have been launched after each that fails.
    assert MAX_FAILED_PROMPTS <= len(device.batches) <= MAX_FAILED_STEPS * (1 + overlap)
    assert len(failed) < 20


def test_step_whose_launch_ends_the_loop_is_blamed_not_the_one_on_the_device(
    caplog: pytest.LogCaptureFixture,
) -> None:
    core, _ = make_core(overlap=True)
    core.executor = Poisoned(core.executor, 3)
    for number in range(MAX_FAILED_PROMPTS - 1):
        core.sequences.add(make_sequence(f"poison{number}", [3, number]))
        core.step()
    core.sequences.add(make_sequence("good", [1] * 5))
    core.step()
    assert core.awaits_step
    core.sequences.add(make_sequence("last poison", [3, 6]))
    with pytest.raises(RuntimeError, match="poison") as caught:
        core.step()
    loss = ended(core.steps.current, caught.value)
    assert [suspect.request_id for suspect in loss.suspects] == ["last poison"]
    assert "RuntimeError in a step of" in loss.text


def test_prompt_that_is_sent_again_may_fail_more_often_than_different_ones(
    caplog: pytest.LogCaptureFixture,
) -> None:
    core, device = make_core(overlap=False)
    for number in range(MAX_FAILED_STEPS - 1):
        core.sequences.add(make_sequence(f"r{number}", [1, 2]))
        device.fail("fail_execute", "poison")
        assert ends_of(drain(core)) == {f"r{number}": "error"}
    core.sequences.add(make_sequence("last", [1, 2]))
    device.fail("fail_execute", "device lost")
    with pytest.raises(RuntimeError, match="device lost"):
        drain(core)


@BOTH
def test_failures_with_good_steps_between_them_do_not_end_the_loop(
    overlap: bool, caplog: pytest.LogCaptureFixture
) -> None:
    core, device = make_core(overlap=overlap)
    for number in range(2 * MAX_FAILED_STEPS):
        core.sequences.add(make_sequence(f"good{number}", [1]))
        assert ends_of(drain(core)) == {f"good{number}": "length"}
        core.sequences.add(make_sequence(f"bad{number}", [1]))
        device.fail("fail_execute", "out of memory")
        assert ends_of(drain(core)) == {f"bad{number}": "error"}
    assert_idle(core)


class LosesOne:
    """An executor that fails to launch a plan, before or after it has applied its changes."""

    def __init__(self, inner: Executor, number: int, applied: bool) -> None:
        self.inner, self.number, self.applied = inner, number, applied

    def execute(self, plan: StepPlan) -> PendingStep:
        if plan.number != self.number:
            return self.inner.execute(plan)
        if self.applied:
            self.inner.execute(msgspec.structs.replace(plan, decodes=[], chunks=[], inputs=[]))
        raise RuntimeError("out of memory")


@pytest.mark.parametrize("applied", [False, True], ids=["nothing-applied", "applied"])
def test_failed_launch_spares_those_that_it_did_not_prepare(
    applied: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The plan frees a device slot, and has the copy of one child; the other has found no room."""
    core, _ = make_core(num_blocks=4, max_num_seqs=3, caching=False)
    parent, child, other = (make_sequence(f"s{seed}", [1] * 6, seed=seed) for seed in range(3))
    expected = generate(other, LIMIT)
    core.sequences.add(make_sequence("gone", [0] * 2))
    core.sequences.add(parent, (child, other))
    core.step()
    core.sequences.abort("gone")
    assert core.scheduler.table.running == [parent, child]
    core.executor = LosesOne(core.executor, 2, applied)
    outputs = drain(core)
    assert ends_of(outputs) == {"s0": "length", "s1": "error", "s2": "length"}
    assert tokens_of(outputs, "s2") == expected
    assert "out of memory" in caplog.text
    for seed in range(3):  # one in each device slot
        core.sequences.add(make_sequence(f"s{seed}", [0] * 2, seed=seed, max_tokens=2))
    assert ends_of(drain(core)) == dict.fromkeys(("s0", "s1", "s2"), "length")
    assert_idle(core)


@BOTH
@pytest.mark.parametrize("applied", [False, True], ids=["nothing-applied", "applied"])
def test_failed_launch_spares_one_that_waits_for_a_step_of_its_own(
    overlap: bool, applied: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """It has its device slot and its blocks by the plan that fails, and computes nothing yet."""
    core, _ = make_core(overlap=overlap)
    suspect = make_sequence("suspect", [2] * 5)
    suspect.strikes = 1
    expected = generate(suspect, LIMIT)
    core.sequences.add(make_sequence("fails", [1] * 5))
    core.sequences.add(suspect)
    core.executor = LosesOne(core.executor, 1, applied)
    outputs = drain(core)
    assert ends_of(outputs) == {"fails": "error", "suspect": "length"}
    assert tokens_of(outputs, "suspect") == expected
    assert_idle(core)


# Names


def test_name_in_use_is_refused() -> None:
    core, _ = make_core()
    first = make_sequence("a", [1] * 3)
    core.sequences.add(first)
    with pytest.raises(InvalidRequestError, match="has the id") as caught:
        core.sequences.add(make_sequence("a", [2]))
    assert caught.value.param == "request_id"
    assert core.sequences.get("a") is first
    assert len(tokens_of(drain(core), "a")) == 4


def test_name_of_a_held_prefill_job_is_refused_until_it_is_forgotten() -> None:
    core, _ = make_core()
    core.sequences.add(make_sequence("job", [1] * 9, prefill_only=True))
    assert ends_of(drain(core)) == {"job": "length"}
    assert core.scheduler.pool.counts().used == 3
    with pytest.raises(InvalidRequestError, match="has the id"):
        core.sequences.add(make_sequence("job", [1]))
    core.sequences.abort("job")
    assert_idle(core)
    core.sequences.add(make_sequence("job", [1]))


# Abort


def abort_waiting(core: EngineCore) -> None:
    core.sequences.add(make_sequence("a", [1]))


def abort_running(core: EngineCore) -> None:
    core.sequences.add(make_sequence("a", [1] * 9))
    core.step()


def abort_in_mid_prompt(core: EngineCore) -> None:
    core.sequences.add(make_sequence("a", [1] * 40))
    core.step()


def abort_reserved(core: EngineCore) -> None:
    core.sequences.add(make_sequence("a", [1] * 9, remote_prefill=True))
    core.step()


def abort_fallen_back(core: EngineCore) -> None:
    abort_reserved(core)
    sequence = core.sequences.get("a")
    assert sequence is not None
    core.sequences.recompute_locally(sequence, 3)


def abort_held(core: EngineCore) -> None:
    core.sequences.add(make_sequence("a", [1] * 9, prefill_only=True))
    drain(core)


@BOTH
@pytest.mark.parametrize(
    "bring",
    [
        abort_waiting,
        abort_running,
        abort_in_mid_prompt,
        abort_reserved,
        abort_fallen_back,
        abort_held,
    ],
)
def test_abort_frees_everything_and_says_nothing(
    overlap: bool, bring: Callable[[EngineCore], None]
) -> None:
    core, _ = make_core(overlap=overlap)
    bring(core)
    core.sequences.abort("a")
    assert core.sequences.get("a") is None
    assert core.scheduler.pool.counts().used == 0
    assert drain(core) == []
    assert_idle(core)
    core.sequences.abort("a")
