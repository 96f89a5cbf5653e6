"""Plans as values: recorded and run again, and run in another process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import pytest

from pagewire import LLM, SamplingParams
from pagewire.shared.base.errors import IntegrityError
from pagewire.shared.engine.execution.executor import Executor, PendingStep
from pagewire.shared.engine.scheduling.sequence import new_sequence
from pagewire.shared.engine.scheduling.status import RequestStatus
from pagewire.shared.engine.scheduling.step import (
    GrammarMasks,
    NewDeviceSlot,
    PrefillChunk,
    StepPlan,
    StepResult,
    TableEntries,
)
from pagewire.shared.request.sampling import RequestSpec

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = [[n * 37 % 1000 + 10 for n in range(length)] for length in (1, 17, 60, 140, 33, 16)]
GREEDY = RequestSpec(temperature=0.0, max_tokens=20, ignore_eos=True)
SAMPLING = [
    SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=0.8, top_p=0.9, seed=7, max_tokens=24, ignore_eos=True),
] * 3
TIGHT = {"device": "cpu", "num_blocks": 12, "max_num_batched_tokens": 40}  # some are preempted


def make_llm(**more: Any) -> LLM:
    llm = LLM("demo", **TIGHT, **more)
    llm.core.overlap = True
    return llm


def tokens_of(llm: LLM) -> list[list[int]]:
    tokens = [output.token_ids for output in llm.generate(PROMPTS, SAMPLING)]
    assert llm.core.scheduler.table.num_preemptions > 0
    llm.core.scheduler.table.check_integrity()
    return tokens


class Keeper:
    """An executor that passes everything on and keeps it.

    Attributes:
        record: plans and masks in their order, each as msgpack.
        steps: the results.
    """

    def __init__(self, llm: LLM) -> None:
        self.executor = llm.engine.runner
        self.record: list[bytes] = []
        self.steps: list[PendingStep] = []

    def execute(self, plan: StepPlan) -> PendingStep:
        self.record.append(msgspec.msgpack.encode(plan))
        self.steps.append(self.executor.execute(plan))
        return self.steps[-1]

    def sample(self, masks: GrammarMasks) -> None:
        self.record.append(msgspec.msgpack.encode(masks))
        self.executor.sample(masks)


def replay(record: Iterable[bytes], executor: Executor) -> Iterator[StepResult]:
    """Run recorded plans in an executor whose device slots are unused; yields their results.

    A plan's blocks must hold what they held when it was recorded: what came from other workers is
    not part of a record.

    Raises:
        msgspec.DecodeError: this is not a record.
    """
    pending: PendingStep | None = None
    for item in record:
        step = msgspec.msgpack.decode(item, type=StepPlan | GrammarMasks)
        if isinstance(step, GrammarMasks):
            executor.sample(step)
            continue
        if pending is not None:
            yield pending.wait()
        pending = executor.execute(step)
    if pending is not None:
        yield pending.wait()


@pytest.fixture(scope="module")
def kept(one_thread: None) -> tuple[list[list[int]], Keeper]:
    """The tokens of a run, and what was recorded of it."""
    llm = make_llm()
    keeper = Keeper(llm)
    llm.core.executor = keeper
    return tokens_of(llm), keeper


def test_recorded_plans_give_the_same_tokens_again(kept: tuple[list[list[int]], Keeper]) -> None:
    tokens, keeper = kept
    results = list(replay(keeper.record, make_llm().engine.runner))
    assert results == [step.wait() for step in keeper.steps]
    assert sum(len(result.tokens) for result in results) >= sum(map(len, tokens))


def test_a_changed_plan_gives_other_tokens(kept: tuple[list[list[int]], Keeper]) -> None:
    """So that a plan does say what the tokens depend on."""
    _tokens, keeper = kept
    first = msgspec.msgpack.decode(keeper.record[0], type=StepPlan)
    other = msgspec.structs.replace(first.blocks, block_ids=first.blocks.block_ids[::-1])
    swapped = [(new.slot + 1) % len(first.new_slots) for new in first.new_slots]
    mixed = [
        msgspec.structs.replace(new, slot=slot)
        for new, slot in zip(first.new_slots, swapped, strict=True)
    ]
    wrong = msgspec.structs.replace(first, blocks=other, new_slots=mixed)
    record = [msgspec.msgpack.encode(wrong), *keeper.record[1:]]
    results = list(replay(record, make_llm().engine.runner))
    assert results != [step.wait() for step in keeper.steps]


def test_two_ranks_give_the_same_tokens(kept: tuple[list[list[int]], Keeper]) -> None:
    assert tokens_of(make_llm(tensor_parallel_size=2)) == kept[0]


def test_step_that_awaits_a_supply_samples_what_is_allowed() -> None:
    runner = make_llm().engine.runner
    slots = [NewDeviceSlot(slot, RequestSpec(temperature=0, seed=0)) for slot in (0, 1)]
    plan = StepPlan(
        number=1,
        new_slots=slots,
        blocks=TableEntries([0, 1], [0, 0], [3, 5]),
        chunks=[PrefillChunk(slot, 0, PROMPTS[5][:12], samples=True) for slot in (0, 1)],
    )
    free = runner.execute(plan).wait().tokens
    assert free[0] == free[1]
    awaiting = runner.execute(msgspec.structs.replace(plan, number=2, awaits_masks=True))
    assert not awaiting.is_done()
    with pytest.raises(IntegrityError, match="step 2 waits"):
        runner.execute(StepPlan(number=3, decodes=[0]))
    mask = bytearray(2048 // 8)
    mask[77 // 8] |= 1 << 77 % 8
    runner.sample(GrammarMasks(number=2, masks={1: bytes(mask)}))
    assert awaiting.wait().tokens == [free[0], 77]


def test_child_goes_on_as_its_parent_does() -> None:
    llm = make_llm()
    core = llm.core
    parent, child = (new_sequence(name, PROMPTS[3][:37], GREEDY, ()) for name in ("p", "c"))
    core.sequences.add(parent, (child,))
    while core.scheduler.table.unforked:
        core.step()
    assert child.status is RequestStatus.RUNNING
    while core.has_work:
        core.step()
    assert core.stats.prompt_tokens_computed == 37 + 1
    assert child.token_ids == parent.token_ids
    assert len(child.token_ids) == 37 + 20
    core.scheduler.table.check_integrity()
