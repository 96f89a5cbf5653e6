"""A step is launched before the result of the one before is read, and that result fails.

The later step has used what the failed one should have left. So its result does not count.
"""

from __future__ import annotations

import msgspec
import pytest

from pagewire.shared.engine.constraints import Constraints, Masked
from pagewire.shared.engine.launched import Launched
from pagewire.shared.engine.scheduling.sequence import Sequence
from pagewire.shared.engine.scheduling.status import RequestStatus
from pagewire.tests.support.engine_iterations import (
    LIMIT,
    assert_idle,
    drain,
    ends_of,
    reserve,
    tokens_of,
)
from pagewire.tests.support.fake_engine import generate, make_core, make_sequence
from pagewire.tests.support.wrong_results import Failing, Results, Wrong

pytestmark = pytest.mark.usefixtures("each_executor")


class AllAllowed(Constraints):
    """Masks that allow everything and are never late."""

    def check(self, sequence: Sequence) -> None:
        pass

    def open(self, sequence: Sequence) -> None:
        pass

    def fill(self, launched: Launched, wait: bool, usual_step_s: float) -> Masked | None:
        return Masked()


LATER = pytest.mark.parametrize("later", [Failing, Wrong])


@LATER
def test_rows_of_a_later_step_are_computed_again(
    later: type[Failing | Wrong], caplog: pytest.LogCaptureFixture
) -> None:
    core, _ = make_core(overlap=True)
    results = Results(core, {})
    sequences = [make_sequence(name, [seed] * 5, seed=seed) for seed, name in enumerate("abc")]
    expected = {each.request_id: generate(each, LIMIT) for each in sequences}
    for sequence in sequences:
        core.sequences.add(sequence)
    outputs = [*core.step()[0], *core.step()[0]]
    results.break_next(later)
    outputs += drain(core)
    assert ends_of(outputs) == {"a": "length", "b": "length", "c": "error"}
    assert {name: tokens_of(outputs, name) for name in "ab"} == {n: expected[n] for n in "ab"}
    assert all(each.num_in_flight_tokens == 0 for each in sequences)
    assert core.stats.tokens_generated == sum(len(output.token_ids) for output in outputs)
    assert_idle(core)


@LATER
def test_prompt_of_a_later_step_is_not_suspected(
    later: type[Failing | Wrong], caplog: pytest.LogCaptureFixture
) -> None:
    core, _ = make_core(overlap=True)
    Results(core, {}).break_next(later)
    core.sequences.add(make_sequence("fails", [0] * 5))
    core.step()
    sequence = make_sequence("later", [1] * 5)
    expected = generate(sequence, LIMIT)
    core.sequences.add(sequence)
    outputs = drain(core)
    assert ends_of(outputs) == {"fails": "error", "later": "length"}
    assert tokens_of(outputs, "later") == expected
    assert sequence.strikes == 0
    assert_idle(core)


def test_later_steps_do_not_count_as_failed(caplog: pytest.LogCaptureFixture) -> None:
    """All four steps fail in a row. Two prompts are to blame; a third would end the loop."""
    core, _ = make_core(overlap=True)
    Results(core, dict.fromkeys(range(1, 5), Failing))
    outputs = []
    for prompts in ({"a": [0] * 5}, {"b": [1] * 5}, {}, {"c": [2] * 5}):
        for name, prompt in prompts.items():
            core.sequences.add(make_sequence(name, prompt))
        outputs += core.step()[0]
    outputs += drain(core)
    assert ends_of(outputs) == {"a": "error", "b": "error", "c": "length"}
    assert_idle(core)


def test_nobody_is_suspected_while_a_step_runs_whose_result_does_not_count(
    caplog: pytest.LogCaptureFixture,
) -> None:
    core, _ = make_core(overlap=True)
    Results(core, {}).break_next(Wrong)
    core.sequences.add(make_sequence("fails", [0] * 5))
    core.step()
    core.sequences.add(make_sequence("later", [1] * 5))
    core.step()
    step = core.steps.current
    assert step is not None and step.suspects == []
    drain(core)
    assert core.steps.current is None
    assert_idle(core)


@LATER
def test_job_whose_blocks_may_have_been_sent_fails(
    later: type[Failing | Wrong], caplog: pytest.LogCaptureFixture
) -> None:
    """One that has less than a block is computed again."""
    core, _ = make_core(overlap=True, max_num_batched_tokens=8)
    Results(core, {}).break_next(later)
    core.sequences.add(make_sequence("fails", [0] * 5))
    core.step()
    core.sequences.add(make_sequence("sent", [1] * 5, prefill_only=True))
    core.sequences.add(make_sequence("unsent", [2] * 9, prefill_only=True))
    outputs = [*core.step()[0], *drain(core)]
    assert ends_of(outputs) == {"fails": "error", "sent": "error", "unsent": "length"}
    core.scheduler.table.forget("unsent")
    assert_idle(core)


def test_job_that_has_lost_its_blocks_fails_if_they_may_have_been_sent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The next step has given them to an older sequence before the result fails."""
    core, _ = make_core(num_blocks=4, overlap=True, caching=False)
    results = Results(core, {})
    old = make_sequence("old", [1] * 7)
    expected = generate(old, LIMIT)
    core.sequences.add(old)
    outputs = [*core.step()[0]]
    core.sequences.add(make_sequence("job", [2] * 5, prefill_only=True))
    results.break_next(Wrong)
    outputs += core.step()[0]
    assert core.scheduler.table.num_preemptions == 0
    outputs += core.step()[0]
    # The job, and then the row whose step has failed.
    assert core.scheduler.table.num_preemptions == 2
    outputs += drain(core)
    assert ends_of(outputs) == {"old": "length", "job": "error"}
    assert tokens_of(outputs, "old") == expected
    assert_idle(core)


def test_sequence_that_waits_for_another_workers_kv_goes_on_waiting(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nothing of it is computed in the step that reserves its blocks."""
    core, device = make_core(overlap=True)
    Results(core, {1: Failing, 2: Wrong})
    core.sequences.add(make_sequence("fails", [0] * 5))
    remote = reserve(core)
    expected = generate(remote, LIMIT)
    outputs = [*core.step()[0], *core.step()[0]]
    assert remote.status is RequestStatus.RESERVED
    device.write_prompt(remote)
    core.sequences.activate(remote, expected[0])
    outputs += drain(core)
    assert ends_of(outputs) == {"fails": "error", "remote": "length"}
    assert tokens_of(outputs, "remote") == expected[1:]
    assert_idle(core)


@LATER
def test_children_fork_from_a_parent_that_is_computed_again(
    later: type[Failing | Wrong], caplog: pytest.LogCaptureFixture
) -> None:
    core, _ = make_core(overlap=True, caching=False)
    results = Results(core, {})
    core.sequences.add(make_sequence("row", [3] * 2, seed=9))
    outputs = [*core.step()[0]]
    family = [make_sequence(f"s{seed}", [1] * 6, seed=seed) for seed in range(3)]
    wanted = {each.request_id: generate(each, LIMIT) for each in family}
    core.sequences.add(family[0], tuple(family[1:]))
    outputs += core.step()[0]
    results.break_next(later)  # the children's first step, and the one after it
    outputs += drain(core)
    failed = [name for name, end in ends_of(outputs).items() if end == "error"]
    assert len(failed) == 1
    for name in wanted.keys() - set(failed):
        assert tokens_of(outputs, name) == wanted[name]
    assert_idle(core)


@pytest.mark.parametrize("ended", ["row", "newest"])
def test_rows_that_end_meanwhile_stay_ended(ended: str, caplog: pytest.LogCaptureFixture) -> None:
    core, _ = make_core(overlap=True)
    results = Results(core, {})
    sequences = {
        name: make_sequence(name, [seed] * 5, seed=seed, max_tokens=9)
        for seed, name in enumerate(["other", "row", "newest"])
    }
    expected = generate(sequences["other"], LIMIT)
    for sequence in sequences.values():
        core.sequences.add(sequence)
    outputs = [*core.step()[0], *core.step()[0]]
    results.break_next(Wrong)
    outputs += core.step()[0]
    core.sequences.abort(ended)
    outputs += drain(core)
    assert ends_of(outputs).get("newest") == ("error" if ended == "row" else None)
    assert tokens_of(outputs, "other") == expected
    assert all(each.num_in_flight_tokens == 0 for each in sequences.values())
    assert_idle(core)


@pytest.mark.parametrize("has_masks", [True, False])
def test_later_step_that_waits_for_masks_is_drained(
    has_masks: bool, caplog: pytest.LogCaptureFixture
) -> None:
    core, _ = make_core(overlap=True, constraints=AllAllowed())
    results = Results(core, {1: Failing, 2: Wrong})
    if not has_masks:
        results.without_masks = {2}
    core.sequences.add(make_sequence("fails", [0] * 5))
    core.step()
    later = make_sequence("later", [1] * 5)
    expected = generate(later, LIMIT)
    later.spec = msgspec.structs.replace(later.spec, grammar="any")
    core.sequences.add(later)
    outputs = drain(core)
    assert ends_of(outputs) == {"fails": "error", "later": "length"}
    assert tokens_of(outputs, "later") == expected
    assert_idle(core)
