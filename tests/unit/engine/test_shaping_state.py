"""The tables of shaped device slots: made when these get an owner, and of nobody before."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagewire.kernels import load_ops
from pagewire.kernels.shaping_tables import ShapingRow, pack_bits
from pagewire.shared.engine.execution.device_state import DeviceState
from pagewire.shared.engine.execution.shaping_state import ShapingState
from pagewire.shared.engine.scheduling.step import (
    DecodeInput,
    NewDeviceSlot,
    PrefillChunk,
    StepPlan,
)
from pagewire.shared.request.sampling import RequestSpec

VOCAB = 50
PENALTY = RequestSpec(seed=0, frequency_penalty=0.5)
PLAIN = RequestSpec(seed=0)


def make_state() -> ShapingState:
    state = DeviceState(num_slots=3, max_blocks=4, device=torch.device("cpu"))
    return ShapingState(load_ops("torch", "cpu"), state, VOCAB)


def plan(*new: NewDeviceSlot, freed: tuple[int, ...] = (), **more: Any) -> StepPlan:
    return StepPlan(number=1, new_slots=list(new), freed=list(freed), **more)


def test_a_slot_has_what_its_owner_asks_for() -> None:
    state = make_state()
    spec = RequestSpec(
        seed=0,
        repetition_penalty=1.5,
        presence_penalty=0.25,
        logit_bias={7: 1.5},
        min_tokens=4,
        allowed_token_ids=(3, 40),
        bad_words=((1, 2), (9,)),
    )
    state.apply(plan(NewDeviceSlot(1, spec, [5, 6, 5, 8, 8], 3, [11, 12])))
    row = ShapingRow(
        output_start=3,
        stops_from=7,
        stop_ids=[11, 12],
        biases={7: 1.5},
        bad_words=[[1, 2], [9]],
        is_limited=True,
        repetition=1.5,
        presence=0.25,
        output=[8, 8],
    )
    assert state.tables.rows[1].tolist() == row.words().tolist()
    assert state.tables.allowed[1].tolist() == pack_bits([3, 40], VOCAB).tolist()
    assert state.tables.seen[1].tolist() == pack_bits([5, 6, 8], VOCAB).tolist()
    assert state.tables.counts[1].nonzero()[:, 0].tolist() == [8]
    assert state.is_shaped([0, 1]) and not state.is_shaped([0, 2])


def test_the_next_owner_finds_nothing_of_the_one_before() -> None:
    state = make_state()
    state.apply(plan(NewDeviceSlot(0, PENALTY, [1, 2, 3], 2)))
    state.apply(plan(freed=(0,)))
    assert not state.is_shaped([0])
    state.apply(plan(NewDeviceSlot(0, PLAIN)))
    assert not state.tables.rows.any()
    state.apply(plan(NewDeviceSlot(0, PENALTY, [4], 1), freed=(0,)))
    state.apply(plan(NewDeviceSlot(0, PLAIN), freed=(0,)))  # in one plan
    assert not state.tables.rows.any() and not state.is_shaped([0, 1, 2])


def test_an_input_is_noted_if_no_step_here_has_sampled_it() -> None:
    state = make_state()
    news = [NewDeviceSlot(slot, PENALTY, [1, 2, 3], 2) for slot in (0, 2)]
    state.apply(plan(*news, NewDeviceSlot(1, PLAIN)))
    # One that it was given, the token of another slot, and one that another worker has sampled.
    state.apply(plan(inputs=[DecodeInput(0, 3, 2), DecodeInput(1, 9, 7), DecodeInput(2, 9, 3)]))
    counts = [state.tables.counts[slot].nonzero()[:, 0].tolist() for slot in (0, 1, 2)]
    assert counts == [[3], [], [3, 9]]
    assert state.tables.seen[2].tolist() == pack_bits([1, 2, 3, 9], VOCAB).tolist()


@pytest.mark.parametrize("begins_by", ["a token of another worker", "its last token", "a chunk"])
def test_an_input_of_a_held_row_is_not_noted_again(begins_by: str) -> None:
    state, given, first = make_state(), [1, 2, 3], 3
    new = NewDeviceSlot(0, PENALTY, given, 2)
    if begins_by == "a chunk":
        state.apply(plan(new, chunks=[PrefillChunk(0, 0, given, samples=True)]))
    else:
        state.apply(plan(new))
        put = DecodeInput(0, 9, 3) if begins_by.startswith("a token") else DecodeInput(0, 3, 2)
        first = put.position + 1
        state.apply(plan(inputs=[put]))
        state.apply(plan(inputs=[put]))  # it was skipped at once
    counts = state.tables.counts.clone()
    for position in (first, first + 1):  # steps here have sampled these, and have noted them
        state.apply(plan(inputs=[DecodeInput(0, 7, position)]))
    assert torch.equal(state.tables.counts, counts)


def test_a_plan_of_plain_slots_launches_nothing() -> None:
    state = make_state()
    state.ops = None
    before = [table.data_ptr() for table in state.tables]
    state.apply(plan(NewDeviceSlot(0, PLAIN), inputs=[DecodeInput(0, 1, 2)]))
    assert [table.data_ptr() for table in state.tables] == before
    assert not any(table.any() for table in state.tables)
