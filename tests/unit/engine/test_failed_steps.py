"""Who fails with a step, who is computed again, and when too many steps have failed."""

from __future__ import annotations

import pytest

from pagewire.shared.engine.failed_steps import (
    MAX_FAILED_PROMPTS,
    MAX_FAILED_STEPS,
    FailedSteps,
    Verdict,
)
from pagewire.shared.engine.launched import Launched
from pagewire.shared.engine.scheduling.decode_batch import DecodeRows
from pagewire.shared.engine.scheduling.schedule import Schedule, ScheduledTokens
from pagewire.shared.engine.scheduling.sequence import Sequence
from pagewire.shared.engine.scheduling.status import RequestStatus
from pagewire.shared.engine.scheduling.step import Export, StepPlan, StepResult
from pagewire.tests.support.fake_engine import make_sequence


class NoResult:
    """The result of a step that nobody reads."""

    def is_done(self) -> bool:
        return False

    def wait(self) -> StepResult:
        raise RuntimeError("device on fire")


class Names:
    """Sequences by name, in any status; each arrives after those before it."""

    def __init__(self) -> None:
        self.all: dict[str, Sequence] = {}

    def __call__(self, names: str, status: RequestStatus = RequestStatus.RUNNING) -> list[Sequence]:
        for name in names.split():
            if name not in self.all:
                number = len(self.all)
                made = self.all[name] = make_sequence(name, [number])
                made.arrival_s, made.status = float(number), status
        return [self.all[name] for name in names.split()]

    def schedule(self, rows: str = "", chunks: str = "", exported: str = "") -> Schedule:
        """Return a step whose chunks sample."""
        return Schedule(
            plan=StepPlan(number=1, kv=[Export(name, 0, [1], True) for name in exported.split()]),
            rows=DecodeRows(self(rows)),
            chunks=[ScheduledTokens(each, 0, 2, samples=True) for each in self(chunks)],
        )

    def launched(self, rows: str = "", chunks: str = "", exported: str = "") -> Launched:
        return Launched(self.schedule(rows, chunks, exported), NoResult())


def shown(verdict: Verdict) -> dict[str, str]:
    """Return the names in each list that is not empty; those without a token are sorted."""
    lists = {
        "failed": verdict.failed,
        "again": verdict.again,
        "suspected": verdict.suspected,
        "tokenless": sorted(verdict.tokenless, key=lambda each: each.request_id),
    }
    return {key: " ".join(s.request_id for s in value) for key, value in lists.items() if value}


@pytest.mark.parametrize("is_launched", [False, True])
@pytest.mark.parametrize(
    ("rows", "chunks", "expected"),
    [
        ("a b c", "", {"failed": "c", "again": "a b"}),
        ("a b", "p", {"failed": "p", "again": "a b"}),
        ("a", "p q", {"again": "a p q", "suspected": "p q"}),
    ],
)
def test_one_suspect_fails_and_several_run_again(
    rows: str, chunks: str, expected: dict[str, str], is_launched: bool
) -> None:
    failures, launched = FailedSteps(), Names().launched(rows, chunks)
    if is_launched:
        verdict = failures.judge_result(launched, [])
    else:
        verdict = failures.judge_launch(launched.schedule)
    tokenless = " ".join([*rows.split(), *chunks.split()])
    assert shown(verdict) == expected | {"tokenless": tokenless}


def test_suspect_of_earlier_steps_fails_and_the_others_get_another_chance() -> None:
    names = Names()
    (known,) = names("p")
    known.strikes = 1
    verdict = FailedSteps().judge_result(names.launched("", "p q"), [])
    assert shown(verdict) == {"failed": "p", "again": "q", "tokenless": "p q"}


def test_what_a_step_prepares_or_reserves_is_part_of_its_launch_alone() -> None:
    names = Names()
    launched = names.launched("", "p")
    launched.schedule.prepared += names("prepared")
    launched.schedule.reserved += names("reserved", RequestStatus.RESERVED)
    failures = FailedSteps()
    expected = {"failed": "p reserved", "again": "prepared", "tokenless": "p"}
    assert shown(failures.judge_launch(launched.schedule)) == expected
    assert shown(failures.judge_result(launched, [])) == {"failed": "p", "tokenless": "p"}


def test_later_step_has_no_suspects_of_its_own() -> None:
    names = Names()
    step, later = names.launched("a", "p"), names.launched("a p", "q")
    verdict = FailedSteps().judge_result(step, [later])
    assert shown(verdict) == {"failed": "p", "again": "a q", "tokenless": "a a p p q"}


def test_sequences_that_have_ended_or_lost_their_blocks_are_left_alone() -> None:
    names = Names()
    step, later = names.launched("a b c"), names.launched("a b c")
    (ended, preempted, _c) = names("a b c")
    ended.status = RequestStatus.FINISHED_ABORTED
    preempted.status = RequestStatus.PREEMPTED
    step.lost |= {ended, preempted}
    later.lost |= {ended, preempted}
    verdict = FailedSteps().judge_result(step, [later])
    assert shown(verdict) == {"failed": "c", "tokenless": "a a b b c c"}


def test_row_that_was_held_waits_for_no_token_of_its_step() -> None:
    names = Names()
    step, later = names.launched("a b"), names.launched("a b")
    step.skipped |= set(names("a"))
    verdict = FailedSteps().judge_result(step, [later])
    assert shown(verdict) == {"failed": "b", "again": "a", "tokenless": "a b b"}


@pytest.mark.parametrize("is_lost", [False, True])
def test_job_fails_if_blocks_of_it_may_have_been_sent(is_lost: bool) -> None:
    names = Names()
    step, later = names.launched("a", "p sent"), names.launched("a", "last", exported="last")
    for job in names("sent last"):
        job.prefill_only = True
    assert shown(FailedSteps().judge_result(step, [later])) == {
        "failed": "last",
        "again": "a p sent",
        "suspected": "p sent",
        "tokenless": "a a last p sent",
    }
    step.schedule.plan = names.schedule(exported="sent").plan
    if is_lost:
        step.lost |= set(names("sent"))
    assert shown(FailedSteps().judge_result(step, [later]))["failed"] == "sent last"


def test_too_many_steps_have_failed_in_a_row() -> None:
    names, failures = Names(), FailedSteps()
    for number in range(1, MAX_FAILED_STEPS + 1):
        assert not failures.are_too_many()
        failures.judge_launch(names.schedule("", "p" if number % 2 else "p q"))
    assert failures.are_too_many()
    failures.clear()
    for number in range(1, MAX_FAILED_PROMPTS + 1):
        assert not failures.are_too_many()
        failures.judge_result(names.launched("a", f"p{number}"), [])
    assert failures.are_too_many()


def test_later_steps_do_not_count() -> None:
    names, failures = Names(), FailedSteps()
    for number in range(MAX_FAILED_STEPS - 1):
        later = names.launched("", f"p{number}")
        failures.judge_result(names.launched("a"), [later, later])
    assert not failures.are_too_many()
