"""A sequence that continues another's tokens, and steps that wait for a supply."""

from __future__ import annotations

import pytest

from pagewire.shared.engine.core import EngineCore
from pagewire.shared.engine.sequence import Sequence
from pagewire.shared.engine.status import RequestStatus
from pagewire.shared.engine.step import (
    Expect,
    NewSlot,
    PrefillChunk,
    StepPlan,
    Supply,
    TableEntries,
)
from pagewire.shared.errors import InvalidRequestError
from pagewire.shared.sampling import RequestSpec
from pagewire.tests.support.engine_iterations import (
    BOTH,
    LIMIT,
    assert_idle,
    drain,
    ends_of,
    tokens_of,
)
from pagewire.tests.support.fake_device import VOCAB, generate, make_core, make_sequence

pytestmark = pytest.mark.usefixtures("each_executor")


class Plans:
    """Keeps what is launched."""

    def __init__(self, core: EngineCore) -> None:
        self.all: list[StepPlan] = []
        core.hooks.append(self)

    def before_launch(self, plan: StepPlan) -> None:
        pass

    def after_launch(self, plan: StepPlan | None) -> bool:
        if plan is not None:
            self.all.append(plan)
        return False

    def is_due(self) -> bool:
        return False


def child_of(parent: Sequence, seed: int = 1, max_tokens: int = 12) -> Sequence:
    prompt = parent.token_ids[: parent.num_prompt_tokens]
    replayed = parent.token_ids[parent.num_prompt_tokens :]
    return make_sequence("child", prompt, replayed=replayed, seed=seed, max_tokens=max_tokens)


@BOTH
@pytest.mark.parametrize("length", [5, 6, 7, 8, 9])
def test_fork_shares_full_blocks_and_copies_the_last(overlap: bool, length: int) -> None:
    core, device = make_core(overlap=overlap, caching=False)
    plans = Plans(core)
    parent = make_sequence("parent", [1] * length, max_tokens=12)
    expected = generate(parent, LIMIT)
    core.add(parent)
    core.step()
    core.step()
    child = child_of(parent)
    wanted = generate(child, LIMIT)[child.num_replayed_tokens :]
    known, used = len(parent.token_ids) - 1, core.scheduler.pool.counts().used
    core.fork(parent, child)
    core.scheduler.check_integrity()
    num_copies = int(known % 4 > 0)
    assert core.scheduler.pool.counts().used == used + num_copies
    outputs = drain(core)
    assert sum(len(plan.copies) for plan in plans.all) == num_copies
    assert tokens_of(outputs, "child") == wanted
    assert parent.token_ids[length:] == expected
    assert max(tokens for tokens, _ in device.batches) == length  # nothing is computed twice
    assert_idle(core)


@BOTH
@pytest.mark.parametrize("length", [5, 8, 9])
def test_fork_of_the_prompt_samples_a_first_token_of_its_own(overlap: bool, length: int) -> None:
    core, device = make_core(overlap=overlap, caching=False)
    parent = make_sequence("parent", [1] * length, max_tokens=12)
    child = make_sequence("child", [1] * length, seed=1, max_tokens=12, remote_prefill=True)
    expected = generate(parent, LIMIT), generate(child, LIMIT)
    core.add(parent)
    while len(parent.token_ids) < length + 3:
        core.step()
    core.fork(parent, child)
    outputs = drain(core)
    assert (parent.token_ids[length:], tokens_of(outputs, "child")) == expected
    assert max(tokens for tokens, _ in device.batches) == length  # nothing is computed twice
    assert_idle(core)


def test_fork_of_a_prompt_under_way_outlives_the_failure_of_its_step() -> None:
    core, device = make_core(overlap=True)
    parent, child = make_sequence("parent", [1] * 9), make_sequence("child", [1] * 9, seed=1)
    expected = generate(child, LIMIT)
    core.add(parent)
    device.fail("fail_wait", "device on fire")
    core.step()
    core.fork(parent, child)
    outputs = drain(core)
    assert ends_of(outputs) == {"parent": "error", "child": "length"}
    assert tokens_of(outputs, "child") == expected
    assert device.batches[:2] == [(9, 1), (9 + 1, 2)]  # the child computes all of its prompt
    assert_idle(core)


def test_fork_of_a_fork_copies_from_the_first() -> None:
    core, _ = make_core(caching=False)
    parent = make_sequence("parent", [1] * 6)
    core.add(parent)
    core.step()
    child, other = child_of(parent), child_of(parent, seed=0)
    other.request_id = "other"
    wanted = [generate(s, LIMIT)[s.num_replayed_tokens :] for s in (child, other)]
    core.fork(parent, child)
    core.fork(child, other)
    outputs = drain(core)
    assert [tokens_of(outputs, name) for name in ("child", "other")] == wanted
    assert_idle(core)


def test_fork_that_ends_at_once_copies_nothing() -> None:
    core, _ = make_core(caching=False)
    plans = Plans(core)
    parent = make_sequence("parent", [1] * 6)
    core.add(parent)
    core.step()
    core.fork(parent, child_of(parent))
    core.abort("child")
    drain(core)
    assert not any(plan.copies for plan in plans.all)
    assert_idle(core)


def test_block_that_a_plan_copies_is_not_reserved_by_it() -> None:
    core, _ = make_core(num_blocks=4, caching=False)
    plans = Plans(core)
    parent = make_sequence("parent", [1] * 6)
    core.add(parent)
    core.step()
    child = child_of(parent, max_tokens=3)
    wanted = generate(child, core.scheduler.limits.max_model_len)[child.num_replayed_tokens :]
    core.fork(parent, child)
    core.abort("parent")
    remote = make_sequence("remote", [0] * 8, remote_prefill=True)
    core.add(remote)  # its KV may be written as soon as the steps before its plan are done
    outputs, _ = core.step()
    outputs = [*outputs, *core.step()[0]]
    assert remote.status is RequestStatus.RESERVED
    for plan in plans.all:
        expected = {b for work in plan.kv if isinstance(work, Expect) for b in work.block_ids}
        assert expected.isdisjoint(block for pair in plan.copies for block in pair)
    core.abort("remote")
    assert tokens_of([*outputs, *drain(core)], "child") == wanted
    assert_idle(core)


@pytest.mark.parametrize("size", [{"max_num_seqs": 1}, {"num_blocks": 2}], ids=["slots", "blocks"])
def test_fork_without_room_waits_in_the_queue(size: dict[str, int]) -> None:
    core, _ = make_core(caching=False, **size)
    parent = make_sequence("parent", [1] * 6, max_tokens=2)
    core.add(parent)
    core.step()
    child = child_of(parent, max_tokens=2)
    wanted = generate(child, core.scheduler.limits.max_model_len)[1:]
    core.fork(parent, child)
    outputs = drain(core)
    assert tokens_of(outputs, "child") == wanted
    assert ends_of(outputs) == {"parent": "length", "child": "length"}
    assert_idle(core)


def test_fork_under_a_name_in_use_is_refused() -> None:
    core, _ = make_core()
    parent = make_sequence("parent", [1] * 6)
    core.add(parent)
    core.step()
    with pytest.raises(InvalidRequestError, match="already"):
        core.fork(parent, make_sequence("parent", [1] * 6))
    drain(core)
    assert_idle(core)


def test_step_that_awaits_a_supply_samples_what_is_allowed() -> None:
    _, device = make_core()
    plan = StepPlan(
        number=1,
        new_slots=[NewSlot(0, RequestSpec(seed=0)), NewSlot(1, RequestSpec(seed=0))],
        blocks=TableEntries([0, 1], [0, 0], [0, 1]),
        chunks=[PrefillChunk(slot, 0, [1, 2, 3], samples=True) for slot in (0, 1)],
        awaits_supply=True,
    )
    free = make_sequence("free", [1, 2, 3])
    token = generate(free, LIMIT)[0]
    other = (token + 3) % VOCAB
    pending = device.execute(plan)
    device.supply(Supply(number=1, masks={1: bytes([1 << other])}))
    assert pending.wait().tokens == [token, other]
