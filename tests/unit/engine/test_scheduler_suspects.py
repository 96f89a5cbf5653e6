"""Prompts that are suspected of harming steps run alone, and every second step is for others."""

from __future__ import annotations

from pagewire.shared.control.protocol import CLEARING_TOKENS
from pagewire.shared.engine.scheduling.scheduler import Scheduler
from pagewire.shared.engine.scheduling.sequence import Sequence
from pagewire.shared.engine.scheduling.status import RequestStatus
from pagewire.tests.support.fake_engine import make_core, make_sequence


def make_scheduler(num_blocks: int = 64) -> Scheduler:
    """Return a scheduler whose steps run at most 16 tokens."""
    core, _ = make_core(num_blocks=num_blocks, max_num_seqs=8, caching=False)
    return core.scheduler


def add(scheduler: Scheduler, name: str, length: int, strikes: int = 0) -> Sequence:
    sequence = make_sequence(name, [1] * length, max_tokens=40)
    sequence.strikes = strikes
    scheduler.table.add(sequence)
    return sequence


def chunks(scheduler: Scheduler) -> str:
    """Decide a step; returns the names of its chunks."""
    return " ".join(chunk.sequence.request_id for chunk in scheduler.schedule().chunks)


def test_others_run_in_every_second_step_of_a_long_suspect() -> None:
    scheduler = make_scheduler()
    add(scheduler, "suspect", 100, strikes=1)
    assert chunks(scheduler) == "suspect"
    add(scheduler, "a", 20)
    add(scheduler, "b", 10)
    steps = [chunks(scheduler) for _ in range(8)]
    expected = ["a", "suspect", "a b", "suspect", "suspect", "suspect", "suspect", "suspect"]
    assert steps == expected


def test_others_do_not_wait_for_all_suspects_that_came_before_them() -> None:
    scheduler = make_scheduler()
    for number in range(3):
        add(scheduler, f"s{number}", 4, strikes=1)
    for name in "abcde":
        add(scheduler, name, 8)
    steps = [chunks(scheduler) for _ in range(2 * CLEARING_TOKENS + 3)]
    assert steps[:5] == ["s0", "a b", "c d", "d e", ""]
    suspects = {step: number for number, step in enumerate(steps) if step.startswith("s")}
    assert suspects == {"s0": 0, "s1": CLEARING_TOKENS + 1, "s2": 2 * CLEARING_TOKENS + 2}


def test_suspect_that_ends_makes_room_for_the_next_one() -> None:
    scheduler = make_scheduler()
    suspects = [add(scheduler, name, 4, strikes=1) for name in ("s0", "s1")]
    assert chunks(scheduler) == "s0"
    scheduler.table.finish(suspects[0], RequestStatus.FINISHED_ABORTED)
    assert chunks(scheduler) == "s1"
    assert [suspect.strikes for suspect in suspects] == [1, 1]


def test_suspect_that_is_preempted_is_admitted_again() -> None:
    scheduler = make_scheduler()
    suspect = add(scheduler, "s", 4, strikes=1)
    assert chunks(scheduler) == "s"
    scheduler.table.preempt(suspect)
    suspect.num_late_tokens = 0
    assert chunks(scheduler) == "s"


def test_rows_go_on_in_the_steps_of_suspects() -> None:
    scheduler = make_scheduler()
    add(scheduler, "row", 4)
    assert chunks(scheduler) == "row"
    add(scheduler, "suspect", 70, strikes=1)
    add(scheduler, "other", 30)
    for expected in ("suspect", "other", "suspect", "other", "suspect", "suspect", "suspect"):
        decision = scheduler.schedule()
        assert decision.rows.request_ids[0] == "row"
        assert [chunk.sequence.request_id for chunk in decision.chunks] == [expected]


def test_suspect_that_no_other_prompt_waits_with_runs_in_every_step() -> None:
    """The other prompt has no room for its blocks: the suspect does not lose steps to it."""
    scheduler = make_scheduler(num_blocks=16)
    add(scheduler, "suspect", 60, strikes=1)
    add(scheduler, "too long", 40)
    assert [chunks(scheduler) for _ in range(4)] == ["suspect"] * 4


def test_suspect_is_scheduled_once_in_a_step_that_admits_it() -> None:
    scheduler = make_scheduler()
    first = add(scheduler, "s0", 4, strikes=1)
    add(scheduler, "s1", 4, strikes=1)
    assert chunks(scheduler) == "s0"
    scheduler.table.finish(first, RequestStatus.FINISHED_ABORTED)
    decision = scheduler.schedule()
    computed = [each for each in decision.sequences if each.request_id == "s1"]
    assert len(computed) == 1 and decision.prepared == []
