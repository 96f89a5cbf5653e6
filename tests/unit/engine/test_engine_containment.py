"""Errors of the engine itself: what an iteration touched fails, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import pytest

from pagewire.shared.base.errors import IntegrityError
from pagewire.shared.engine.scheduling.step import StepPlan
from pagewire.shared.kv.block_hash import BlockHash
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


class FailingHook:
    """Fails at some plans."""

    def __init__(self, plans: set[int]) -> None:
        self.plans = plans

    def before_launch(self, plan: StepPlan) -> None:
        pass

    def after_launch(self, plan: StepPlan | None) -> bool:
        if plan is not None and plan.number in self.plans:
            raise RuntimeError("hook on fire")
        return False

    def poll(self) -> bool:
        return False


class FailingListener:
    """Fails when a prefix is cached for the first time."""

    def __init__(self) -> None:
        self.calls = 0

    def added(self, hashes: Seq[BlockHash]) -> None:
        self.calls += 1
        if self.calls == 1:
            raise RuntimeError("index on fire")

    def removed(self, hashes: Seq[BlockHash]) -> None:
        pass


@pytest.mark.parametrize("is_remote", [False, True], ids=["before its turn", "at its admission"])
@BOTH
def test_request_that_cannot_be_hashed_fails_alone(
    overlap: bool, is_remote: bool, caplog: pytest.LogCaptureFixture
) -> None:
    core, _ = make_core(overlap=overlap)
    before, after = make_sequence("before", [1] * 5), make_sequence("after", [0] * 9)
    expected = {s.request_id: generate(s, LIMIT) for s in (before, after)}
    core.sequences.add(before)
    first, _ = core.step()
    outputs = list(first)
    poison = make_sequence("poison", [2**40] * 9, remote_prefill=is_remote)  # cannot be hashed
    core.sequences.add(poison)
    core.sequences.add(after)
    outputs += drain(core)
    assert ends_of(outputs) == {"before": "length", "poison": "error", "after": "length"}
    assert {name: tokens_of(outputs, name) for name in expected} == expected
    assert "scheduling failed" in caplog.text and "OverflowError" in caplog.text
    assert_idle(core)


@BOTH
def test_failing_hook_fails_the_requests_of_its_step(
    overlap: bool, caplog: pytest.LogCaptureFixture
) -> None:
    core, _ = make_core(hooks=[FailingHook({2})], max_num_seqs=1, overlap=overlap)
    for name in "ab":
        core.sequences.add(make_sequence(name, [1] * 5))
    outputs = drain(core)
    assert ends_of(outputs) == {"a": "error", "b": "length"}
    assert "hook on fire" in caplog.text
    assert_idle(core)


@BOTH
def test_failing_hook_fails_what_its_step_reserves(
    overlap: bool, caplog: pytest.LogCaptureFixture
) -> None:
    core, _ = make_core(hooks=[FailingHook({1})], overlap=overlap)
    core.sequences.add(make_sequence("remote", [1] * 9, remote_prefill=True))
    assert ends_of(drain(core)) == {"remote": "error"}
    assert_idle(core)


@BOTH
def test_error_in_postprocessing_fails_the_requests_of_its_step(
    overlap: bool, caplog: pytest.LogCaptureFixture
) -> None:
    core, _ = make_core(max_num_seqs=1, overlap=overlap, listener=FailingListener())
    for name in "ab":
        core.sequences.add(make_sequence(name, [1] * 5))
    outputs = drain(core)
    assert ends_of(outputs) == {"a": "error", "b": "length"}
    assert "index on fire" in caplog.text
    assert_idle(core)


@BOTH
def test_row_that_fails_in_postprocessing_gets_an_error_and_no_token(overlap: bool) -> None:
    core, _ = make_core(overlap=overlap, listener=FailingListener())
    core.sequences.add(make_sequence("ends", [1], max_tokens=6))  # its answer is cached first
    core.sequences.add(make_sequence("goes on", [0], max_tokens=20))
    for _ in range(20):
        outputs, _worked = core.step()
        if outputs.individual and outputs.individual[-1].finish_reason == "error":
            break
    assert ends_of(list(outputs)) == {"ends": "error", "goes on": "error"}
    assert outputs.request_ids == []
    drain(core)
    assert_idle(core)


@BOTH
def test_error_in_preemption_fails_what_was_preempted(overlap: bool) -> None:
    core, _ = make_core(num_blocks=4, overlap=overlap, listener=FailingListener())
    for name, token in (("a", 0), ("b", 1)):
        core.sequences.add(make_sequence(name, [token], max_tokens=11))
    assert ends_of(drain(core)) == {"a": "error", "b": "error"}
    assert_idle(core)


def test_loop_ends_if_the_accounting_is_wrong_after_an_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    core, _ = make_core(hooks=[FailingHook({1})])
    core.scheduler.pool.allocate(1)  # a block that nobody accounts for
    core.sequences.add(make_sequence("a", [1] * 5))
    with pytest.raises(IntegrityError, match="references"):
        core.step()
