"""Sessions whose blocks stay cached while other requests come and go."""

from __future__ import annotations

import pytest

from pagewire.shared.engine.core import EngineCore
from pagewire.shared.engine.scheduling.status import RequestStatus
from pagewire.shared.request.sampling_types import RetainSeconds
from pagewire.tests.support.engine_iterations import assert_idle, drain
from pagewire.tests.support.fake_engine import generate, make_core, make_sequence

pytestmark = pytest.mark.usefixtures("each_executor")

FIRST = [1] * 16  # a pool has 16 blocks of 4 tokens


def run(core: EngineCore, name: str, prompt: list[int], retain_s: RetainSeconds = 0) -> int:
    """Run a request to its end; return how many tokens of its prompt were cached."""
    sequence = make_sequence(name, prompt, max_tokens=8, owner="key", retain_s=retain_s)
    core.sequences.add(sequence)
    outputs = drain(core)
    assert_idle(core)
    return next(each.cached_tokens for each in outputs if each.cached_tokens is not None)


def next_turn(core: EngineCore) -> list[int]:
    first = make_sequence("turn 1", FIRST, max_tokens=8)
    return [*FIRST, *generate(first, core.scheduler.limits.max_model_len), 2]


@pytest.mark.parametrize(
    ("retain_s", "pause_s", "cached"),
    [(0, 1.0, 0), (300, 299.0, 20), (300, 301.0, 0), (3600, 301.0, 20)],
    ids=["not retained", "within the time", "after it", "a longer time"],
)
def test_other_requests_do_not_evict_a_session_that_pauses(
    retain_s: RetainSeconds, pause_s: float, cached: int
) -> None:
    now_s = 10.0
    core, _ = make_core(max_retained=8, clock=lambda: now_s)
    run(core, "turn 1", FIRST, retain_s)
    now_s += pause_s
    for number in range(4):
        run(core, f"other {number}", [3 + number] * 16)
    # Of the answer, all full blocks were kept, too; its newest token has not run.
    assert run(core, "turn 2", next_turn(core), retain_s) == cached


def test_a_session_that_pauses_gives_way_to_a_request_that_needs_all_blocks() -> None:
    core, _ = make_core(max_retained=16)
    run(core, "turn 1", FIRST, 3600)
    assert core.scheduler.pool.num_retained == 5
    run(core, "large", [2] * 54)
    assert core.scheduler.pool.num_retained == 0


def test_a_prefill_job_retains_its_prompt_until_it_has_been_sent_and_after() -> None:
    core, _ = make_core(max_retained=16)
    job = make_sequence("job", FIRST, prefill_only=True, retain_s=300)
    core.sequences.add(job)
    drain(core)
    core.scheduler.table.forget("job")
    assert core.scheduler.pool.counts().cached == core.scheduler.pool.num_retained == 4


def test_nothing_is_retained_of_a_request_that_was_preempted_or_failed() -> None:
    core, _ = make_core(max_retained=16)
    sequence = make_sequence("failed", FIRST, max_tokens=8, retain_s=300)
    core.sequences.add(sequence)
    core.step()
    core.scheduler.table.preempt(sequence)
    assert core.scheduler.pool.num_retained == 0
    core.scheduler.table.finish(sequence, RequestStatus.FINISHED_ERROR)
    assert core.scheduler.pool.num_retained == 0
