from __future__ import annotations

import torch

from pagewire.shared.engine.execution.device_state import DeviceState
from pagewire.shared.engine.scheduling.step import (
    DecodeInput,
    NewDeviceSlot,
    StepPlan,
    TableEntries,
)
from pagewire.shared.request.sampling import RequestSpec


def make_state() -> DeviceState:
    return DeviceState(num_slots=2, max_blocks=2, device=torch.device("cpu"), num_groups=2)


def admitted(slot: int, blocks: list[int], seed: int = 0) -> StepPlan:
    """A plan without rows that prepares a device slot."""
    new = NewDeviceSlot(slot, RequestSpec(seed=seed))
    entries = TableEntries([slot] * len(blocks), list(range(len(blocks))), blocks)
    return StepPlan(number=1, new_slots=[new], blocks=entries)


def test_prepared_slot_has_its_parameters_and_blocks_before_it_runs() -> None:
    state = make_state()
    state.apply(admitted(1, [7, 8], seed=5))
    assert state.block_tables.tolist() == [[[0, 0]] * 2, [[7, 8], [0, 0]], [[0, 0]] * 2]
    assert state.host_tables.tolist() == state.block_tables.tolist()
    assert state.parameters["seeds"].tolist() == [0, 5, 0]


def test_later_plan_brings_what_is_new() -> None:
    state = make_state()
    state.apply(admitted(0, [7, 8]))
    plan = StepPlan(
        number=2, blocks=TableEntries([0], [2], [9]), inputs=[DecodeInput(0, 6, 3)], decodes=[0]
    )
    state.apply(plan)
    assert state.block_tables[0].tolist() == [[7, 8], [9, 0]]
    assert (state.last_token[0].item(), state.position[0].item()) == (6, 3)


def test_next_owner_of_a_slot_has_its_own_blocks_and_parameters() -> None:
    state = make_state()
    state.apply(admitted(0, [7, 8], seed=5))
    state.apply(admitted(0, [3, 4], seed=6))
    assert state.block_tables[0].tolist() == [[3, 4], [0, 0]]
    assert state.parameters["seeds"][0].item() == 6


def test_padding_is_applied_without_a_change_of_any_slot() -> None:
    state = make_state()
    state.apply(admitted(1, [7, 8], seed=5))
    state.apply(StepPlan(number=2, inputs=[DecodeInput(1, 6, 3)], decodes=[1]))
    tensors = [state.last_token, state.position, state.block_tables, *state.parameters.values()]
    before = [tensor.clone() for tensor in tensors]
    tables = state.host_tables.copy()
    state.apply_padding()
    assert all(map(torch.equal, tensors, before))
    assert (state.host_tables == tables).all()
