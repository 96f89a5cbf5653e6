from __future__ import annotations

import torch

from pagewire.shared.engine.device_state import DeviceState
from pagewire.shared.engine.scheduler import ScheduledBatch, ScheduledTokens
from pagewire.shared.engine.sequence import Sequence
from pagewire.tests.support.fake_device import make_sequence


def make_state() -> DeviceState:
    return DeviceState(num_slots=2, max_blocks=4, device=torch.device("cpu"))


def in_slot(slot: int | None, blocks: list[int], seed: int = 0) -> Sequence:
    sequence = make_sequence("r", [1, 2, 3], seed=seed)
    sequence.slot, sequence.block_ids = slot, blocks
    return sequence


def test_introduced_sequence_has_its_parameters_and_blocks_before_it_runs() -> None:
    state = make_state()
    state.introduce([in_slot(1, [7, 8], seed=5)])
    assert state.block_tables.tolist() == [[0] * 4, [7, 8, 0, 0], [0] * 4]
    assert state.seeds.tolist() == [0, 5, 0]


def test_first_step_of_an_introduced_sequence_brings_what_is_new() -> None:
    state = make_state()
    sequence = in_slot(0, [7, 8])
    state.introduce([sequence])
    sequence.block_ids.append(9)
    part = ScheduledTokens(sequence, 3, 1, samples=True, num_preemptions=0, input_token=6)
    state.sync(ScheduledBatch([part], []))
    assert state.block_tables[0].tolist() == [7, 8, 9, 0]
    assert (state.last_token[0].item(), state.position[0].item()) == (6, 3)


def test_preempted_sequence_is_introduced_anew() -> None:
    state = make_state()
    sequence = in_slot(0, [7, 8])
    state.introduce([sequence])
    sequence.num_preemptions, sequence.block_ids = 1, [3, 4]
    state.introduce([sequence])
    assert state.block_tables[0].tolist() == [3, 4, 0, 0]


def test_sequence_without_a_slot_is_not_introduced() -> None:
    state = make_state()
    state.introduce([in_slot(None, [7])])
    assert not state.block_tables.any()
