"""The packer, where the blocks of a prompt's last chunk leave by parts."""

from __future__ import annotations

import pytest

from pagewire.services.prefill.spans import Span
from pagewire.shared.request import RequestStatus
from pagewire.tests.support.fake_device import make_sequence
from pagewire.tests.support.prefill_side import PARTS, assert_complete, prefill_side

PROMPT = [1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4]  # 4 full blocks and 2 tokens


def test_the_last_chunk_leaves_by_parts_each_behind_its_layers() -> None:
    side = prefill_side(num_slots=8, divided_bytes=0, max_num_batched_tokens=8)
    side.start("job", PROMPT + PROMPT)
    side.turn(5)
    assert side.spans() == [
        ([0, 1], [0, 1]),
        ([2, 3], [0, 1]),
        ([4, 5], [0, 1]),
        ([6, 7], [0, 1]),
        ([8], [0]),
        ([8], [1]),
    ]
    assert [plan for _, _, plan in side.device.moved[-2:]] == [5, 5]
    assert_complete(side, "job", PROMPT + PROMPT, 0)


def test_a_part_of_more_blocks_than_fit_a_slot_fills_whole_slots() -> None:
    side = prefill_side(num_slots=8, divided_bytes=0, max_num_batched_tokens=32)
    side.start("job", PROMPT)
    side.turn(2)
    assert side.spans() == [([0, 1, 2, 3], [0]), ([4], [0]), ([0, 1, 2, 3], [1]), ([4], [1])]


@pytest.mark.parametrize(("bound", "parts"), [(4, [[0], [1]]), (5, [[0, 1]])])
def test_only_a_last_chunk_above_the_bound_is_divided(bound: int, parts: list[list[int]]) -> None:
    side = prefill_side(
        blocks_per_slot=8, divided_bytes=bound * PARTS.block_bytes, max_num_batched_tokens=32
    )
    side.start("job", PROMPT)
    side.turn(2)
    assert side.spans() == [([0, 1, 2, 3, 4], part) for part in parts]
    assert_complete(side, "job", PROMPT, 0)


def test_blocks_of_a_step_that_tells_nothing_but_its_end_leave_whole() -> None:
    side = prefill_side(divided_bytes=0, max_num_batched_tokens=32)
    side.device.replays = True
    side.start("job", PROMPT)
    side.turn(4)
    assert side.spans() == [([0, 1], [0, 1]), ([2, 3], [0, 1]), ([4], [0, 1])]


def test_parts_wait_for_slots_and_another_job_gets_its_own() -> None:
    side = prefill_side(
        num_slots=2, keep_slots=True, divided_bytes=0, num_blocks=32, max_num_batched_tokens=40
    )
    side.start("job", PROMPT)
    side.start("other", PROMPT)
    for _ in range(30):
        side.turn()
        if side.held:
            side.give_back()
    assert_complete(side, "job", PROMPT, 0)
    assert_complete(side, "other", PROMPT, 0)
    side.staging.check_integrity(all_free=True)


def test_lost_part_is_packed_again_as_it_was() -> None:
    side = prefill_side(num_slots=8, divided_bytes=0, max_num_batched_tokens=32)
    side.start("job", PROMPT)
    side.turn(2)
    pieces = list(side.pieces["job"])
    number, span, _ = pieces[2]
    side.packer.send_again("job", number, span)
    side.turn()
    assert side.pieces["job"] == [*pieces, pieces[2]]
    assert span == Span(range(4), range(1, 2))


@pytest.mark.parametrize("replays", [False, True], ids=["launched", "replayed"])
@pytest.mark.parametrize("given_back", [0, 1, 2, 3])
def test_job_preempted_between_its_parts_sends_the_rest_of_them(
    given_back: int, replays: bool
) -> None:
    """Of the last chunk's four pieces, one slot lets some leave; then the blocks are lost."""
    side = prefill_side(
        num_slots=1,
        keep_slots=True,
        divided_bytes=0,
        max_num_batched_tokens=32,
        overlap=True,
        num_blocks=7,
    )
    side.core.add(make_sequence("talks", [1] * 7, max_tokens=3))
    side.turn()
    job = side.start("job", PROMPT)
    side.turn()  # launched, and not read yet
    for _ in range(given_back):
        side.give_back()
        side.packer.after_launch(None)
    sent = len(side.pieces["job"])
    was = job.status
    side.device.replays = replays
    side.turn()
    assert (was, job.status) == (RequestStatus.RUNNING, RequestStatus.PREEMPTED)
    for _ in range(20):
        if side.held:
            side.give_back()
        side.turn()
    assert job.is_finished and sent == given_back + 1
    assert_complete(side, "job", PROMPT, 0)
