"""Sequences that come together, with one prompt: it is computed once, then they fork."""

from __future__ import annotations

import msgspec
import pytest

from pagewire.shared.base.errors import InvalidRequestError, OverloadedError
from pagewire.shared.engine.core import EngineCore
from pagewire.shared.engine.scheduling.sequence import Sequence
from pagewire.shared.engine.scheduling.status import RequestStatus
from pagewire.shared.engine.scheduling.step import Expect, StepPlan
from pagewire.shared.request.logprobs import Logprobs, join
from pagewire.tests.support.engine_iterations import (
    BOTH,
    LIMIT,
    assert_idle,
    drain,
    ends_of,
    tokens_of,
)
from pagewire.tests.support.fake_device import score
from pagewire.tests.support.fake_engine import generate, make_core, make_sequence

pytestmark = pytest.mark.usefixtures("each_executor")


class Plans:
    """Keeps what is launched."""

    def __init__(self) -> None:
        self.all: list[StepPlan] = []

    def before_launch(self, plan: StepPlan) -> None:
        pass

    def after_launch(self, plan: StepPlan | None) -> bool:
        if plan is not None:
            self.all.append(plan)
        return False

    def poll(self) -> bool:
        return False


def family(
    length: int, count: int = 3, *, max_tokens: int = 12, remote_prefill: bool = False
) -> list[Sequence]:
    """A sequence and its children, with a seed each."""
    return [
        make_sequence(
            f"s{seed}",
            [1] * length,
            seed=seed,
            max_tokens=max_tokens,
            remote_prefill=remote_prefill,
        )
        for seed in range(count)
    ]


def add(core: EngineCore, sequences: list[Sequence]) -> dict[str, list[int]]:
    """Add a sequence with its children; returns what each should end with."""
    wanted = {each.request_id: generate(each, LIMIT) for each in sequences}
    core.sequences.add(sequences[0], tuple(sequences[1:]))
    return wanted


@BOTH
@pytest.mark.parametrize("length", [1, 2, 5, 7, 8, 9])
@pytest.mark.parametrize("max_tokens", [1, 12])
def test_children_share_a_prompt_that_is_computed_once(
    overlap: bool, length: int, max_tokens: int
) -> None:
    core, device = make_core(overlap=overlap, caching=False)
    wanted = add(core, family(length, max_tokens=max_tokens))
    outputs = drain(core)
    assert {name: tokens_of(outputs, name) for name in wanted} == wanted
    assert ends_of(outputs) == dict.fromkeys(wanted, "length")
    assert device.batches[0] == (length, 1)
    # Each child runs the last token of the prompt again, and samples from it.
    assert core.stats.prompt_tokens_computed == length + 2
    assert core.stats.prefix_queries == length
    assert_idle(core)


@BOTH
@pytest.mark.parametrize("length", [5, 6, 7, 8, 9])
def test_children_share_full_blocks_and_copy_the_last(overlap: bool, length: int) -> None:
    plans = Plans()
    core, _ = make_core(hooks=[plans], overlap=overlap, caching=False)
    sequences = family(length)
    wanted = add(core, sequences)
    while core.scheduler.table.unforked:
        core.step()
    core.scheduler.table.check_integrity()
    num_copies = 2 * int((length - 1) % 4 > 0)  # each runs the prompt's last token itself
    assert core.scheduler.pool.counts().used == len(sequences[0].tables[0]) + num_copies
    outputs = drain(core)
    assert sum(len(plan.copies) for plan in plans.all) == num_copies
    assert [tokens_of(outputs, name) for name in ("s1", "s2")] == [wanted["s1"], wanted["s2"]]
    assert_idle(core)


def test_child_that_ends_as_it_forks_copies_nothing() -> None:
    plans = Plans()
    core, _ = make_core(hooks=[plans], caching=False)
    add(core, family(6, count=2))
    core.step()
    assert core.scheduler.table.unforked == set()
    core.sequences.abort("s1")
    drain(core)
    assert not any(plan.copies for plan in plans.all)
    assert_idle(core)


def test_block_that_a_plan_copies_is_not_reserved_by_it() -> None:
    plans = Plans()
    core, _ = make_core(hooks=[plans], num_blocks=4, caching=False)
    wanted = add(core, family(6, count=2, max_tokens=3))
    core.step()
    core.sequences.abort("s0")
    remote = make_sequence("remote", [0] * 8, remote_prefill=True)
    core.sequences.add(remote)  # KV may be written as soon as the steps before its plan are done
    outputs, _ = core.step()
    assert plans.all[-1].copies
    outputs = [*outputs, *core.step()[0]]
    assert remote.status is RequestStatus.RESERVED
    for plan in plans.all:
        expected = {b for work in plan.kv if isinstance(work, Expect) for b in work.block_ids}
        assert expected.isdisjoint(block for pair in plan.copies for block in pair)
    core.sequences.abort("remote")
    assert tokens_of([*outputs, *drain(core)], "s1") == wanted["s1"]
    assert_idle(core)


@BOTH
def test_children_that_are_preempted_are_computed_again(overlap: bool) -> None:
    core, _ = make_core(num_blocks=8, overlap=overlap, caching=False)
    wanted = add(core, family(6))
    outputs = drain(core)
    assert core.scheduler.table.num_preemptions > 0
    assert {name: tokens_of(outputs, name) for name in wanted} == wanted
    assert_idle(core)


@pytest.mark.parametrize("size", [{"max_num_seqs": 1}, {"num_blocks": 2}], ids=["slots", "blocks"])
def test_child_without_room_waits_in_the_queue(size: dict[str, int]) -> None:
    core, _ = make_core(caching=False, **size)
    wanted = add(core, family(6, count=2, max_tokens=2))
    first, _ = core.step()
    assert [each.request_id for each in core.scheduler.table.waiting] == ["s1"]
    outputs = [*first, *drain(core)]
    assert {name: tokens_of(outputs, name) for name in wanted} == wanted
    assert_idle(core)


@pytest.mark.parametrize("caching", [False, True])
def test_children_without_room_queue_before_all_others(caching: bool) -> None:
    core, _ = make_core(max_num_seqs=2, max_num_batched_tokens=9, caching=caching)
    wanted = add(core, family(9, count=4))
    other = make_sequence("other", [0] * 5)
    wanted |= add(core, [other])
    first, _ = core.step()
    assert [each.request_id for each in core.scheduler.table.waiting] == ["s2", "s3", "other"]
    outputs = [*first, *drain(core)]
    assert {name: tokens_of(outputs, name) for name in wanted} == wanted
    # With a cache they find the full blocks again.
    assert core.stats.prompt_tokens_computed == 9 + 1 + (1 if caching else 9) * 2 + 5
    assert_idle(core)


@BOTH
def test_child_takes_the_place_of_a_sequence_that_ends_too_early(overlap: bool) -> None:
    core, device = make_core(overlap=overlap, max_num_batched_tokens=8, caching=False)
    wanted = add(core, family(10))
    core.step()  # its first chunk
    core.sequences.abort("s0")
    outputs = drain(core)
    assert tokens_of(outputs, "s0") == []
    assert {name: tokens_of(outputs, name) for name in ("s1", "s2")} == {
        name: wanted[name] for name in ("s1", "s2")
    }
    assert sum(tokens for tokens, _ in device.batches[:3]) == 8 + 10  # the second time in full
    assert_idle(core)


def test_child_goes_on_when_the_step_of_its_parent_fails() -> None:
    core, device = make_core(overlap=True, caching=False)
    wanted = add(core, family(9))
    device.fail("fail_wait", "device on fire")
    outputs = drain(core)
    assert ends_of(outputs) == {"s0": "error", "s1": "length", "s2": "length"}
    assert {name: tokens_of(outputs, name) for name in ("s1", "s2")} == {
        name: wanted[name] for name in ("s1", "s2")
    }
    assert device.batches[2] == (9, 1)  # the first child computes all of its prompt
    assert_idle(core)


def test_child_that_ends_before_it_forks_leaves_the_others_alone() -> None:
    core, _ = make_core(caching=False)
    wanted = add(core, family(9))
    core.sequences.abort("s1")
    assert core.sequences.get("s1") is None
    outputs = drain(core)
    assert {name: tokens_of(outputs, name) for name in wanted} == wanted | {"s1": []}
    assert_idle(core)


@BOTH
@pytest.mark.parametrize("length", [8, 9])
def test_children_of_a_prompt_computed_elsewhere_fork_when_its_kv_is_there(
    overlap: bool, length: int
) -> None:
    core, device = make_core(overlap=overlap, caching=False)
    sequences = family(length, remote_prefill=True)
    wanted = add(core, sequences)
    core.step()
    assert [each.status for each in sequences] == [
        RequestStatus.RESERVED,
        RequestStatus.WAITING,
        RequestStatus.WAITING,
    ]
    assert len(core.scheduler.table.reserved) == 1
    device.write_prompt(sequences[0])
    core.sequences.activate(sequences[0], wanted["s0"][0])
    outputs = drain(core)
    assert {name: tokens_of(outputs, name) for name in wanted} == wanted | {"s0": wanted["s0"][1:]}
    assert core.stats.prompt_tokens_computed == 2
    assert_idle(core)


@BOTH
def test_children_of_a_sequence_that_is_recomputed_locally_fork_from_it(overlap: bool) -> None:
    core, _ = make_core(overlap=overlap, caching=False)
    parent, *children = family(9, remote_prefill=True)
    wanted = add(core, [parent, *children])
    core.step()
    first = wanted["s0"][0]
    core.sequences.recompute_locally(parent, first)  # it goes on after its own first token
    outputs = drain(core)
    assert {name: tokens_of(outputs, name) for name in wanted} == wanted | {"s0": wanted["s0"][1:]}
    assert core.stats.prompt_tokens_computed == 10 + 2
    assert_idle(core)


def test_first_child_is_reserved_when_its_reserved_parent_ends() -> None:
    core, _ = make_core(caching=False)
    parent, child, other = family(9, remote_prefill=True)
    add(core, [parent, child, other])
    core.step()
    core.sequences.abort(parent.request_id)
    core.step()
    assert child.status is RequestStatus.RESERVED
    assert core.scheduler.table.unforked == {other}
    core.sequences.abort(child.request_id)
    core.sequences.abort(other.request_id)
    drain(core)
    assert_idle(core)


def test_children_get_the_log_probabilities_of_the_prompt_which_is_scored_once() -> None:
    core, device = make_core(max_num_batched_tokens=6)
    sequences = family(9)
    for each in sequences:
        each.spec = msgspec.structs.replace(each.spec, prompt_logprobs=0)
    wanted = add(core, sequences)
    outputs = drain(core)
    for name in wanted:
        mine = [output for output in outputs if output.request_id == name]
        parts: list[Logprobs] = [
            part.prompt_logprobs.tokens for part in mine if part.prompt_logprobs is not None
        ]
        assert all(part.prompt_logprobs is not None for part in mine[: len(parts)])
        assert join(parts) == score([1] * 8)
        assert tokens_of(outputs, name) == wanted[name]
    assert device.batches[:2] == [(6, 1), (3, 1)]
    assert core.stats.prompt_tokens_computed == 9 + 2
    assert_idle(core)


def test_children_count_in_the_queue() -> None:
    core, _ = make_core(max_waiting=4)
    add(core, family(5, count=3))
    with pytest.raises(OverloadedError, match="3 requests are waiting"):
        core.sequences.add(make_sequence("p", [0] * 3), (make_sequence("q", [0] * 3),))
    add(core, [make_sequence("p", [0] * 3)])
    with pytest.raises(OverloadedError):
        core.sequences.add(make_sequence("q", [0] * 3))
    drain(core)
    assert_idle(core)


def test_child_under_a_name_in_use_is_refused_with_its_parent() -> None:
    core, _ = make_core()
    add(core, [make_sequence("one", [1] * 3)])
    with pytest.raises(InvalidRequestError, match="has the id one"):
        core.sequences.add(make_sequence("two", [1] * 3), (make_sequence("one", [1] * 3),))
    assert core.sequences.get("two") is None
    drain(core)
    assert_idle(core)
