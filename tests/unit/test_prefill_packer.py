from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.services.prefill.packer import DIVIDED_BYTES
from pagewire.services.prefill.spans import Span
from pagewire.shared.engine.block_mover import PendingMove
from pagewire.shared.request import RequestStatus
from pagewire.shared.transfer.pieces import piece_sizes
from pagewire.tests.support.fake_device import make_sequence
from pagewire.tests.support.prefill_side import (
    BLOCK_SIZE,
    PARTS,
    WHOLE,
    assert_complete,
    prefill_side,
)

PROMPT = [1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4]  # 4 full blocks and 2 tokens


@settings(max_examples=60)
@given(
    num_slots=st.integers(1, 3),
    blocks_per_slot=st.integers(1, 3),
    chunk=st.integers(1, 9),
    jobs=st.lists(st.tuples(st.integers(1, 20), st.integers(0, 3)), min_size=1, max_size=4),
    give_back_every=st.integers(1, 3),
    divided_bytes=st.sampled_from([0, 3 * PARTS.block_bytes, DIVIDED_BYTES]),
)
def test_pieces_cover_every_block_once_however_scarce_slots_are(
    num_slots: int,
    blocks_per_slot: int,
    chunk: int,
    jobs: list[tuple[int, int]],
    give_back_every: int,
    divided_bytes: int,
) -> None:
    side = prefill_side(
        num_slots,
        blocks_per_slot,
        keep_slots=True,
        divided_bytes=divided_bytes,
        max_num_batched_tokens=chunk,
        num_blocks=24,
    )
    prompts = {
        f"job{i}": [(i + n) % 7 for n in range(length)] for i, (length, _) in enumerate(jobs)
    }
    firsts = {
        f"job{i}": min(first, (length - 1) // BLOCK_SIZE) for i, (length, first) in enumerate(jobs)
    }
    for job_id, prompt in prompts.items():
        side.start(job_id, prompt, firsts[job_id])
    for now in range(300):
        side.turn()
        if side.held and now % give_back_every == 0:
            side.give_back()
        side.staging.check_integrity()
    for job_id, prompt in prompts.items():
        assert_complete(side, job_id, prompt, firsts[job_id])
        side.end(job_id)
    side.staging.check_integrity(all_free=True)
    assert side.core.scheduler.pool.counts().used == 0


def test_blocks_leave_while_later_chunks_compute() -> None:
    side = prefill_side(max_num_batched_tokens=6)
    side.start("job", PROMPT)
    seen = []
    for _ in range(3):
        side.turn()
        seen.append(side.positions())
    assert seen == [[0], [0, 1, 2], [0, 1, 2, 3, 4]]


def test_cached_blocks_leave_with_the_first_step() -> None:
    side = prefill_side(max_num_batched_tokens=4)
    side.start("warms", PROMPT[:12])
    side.turn(4)
    side.start("job", PROMPT)
    side.turn()
    assert side.positions() == [0, 1, 2, 3]
    side.turn()
    assert_complete(side, "job", PROMPT, 0)


def test_packed_piece_leaves_before_the_next_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    side = prefill_side(num_slots=8, blocks_per_slot=1)
    pack = side.device.pack
    gone_before: list[int] = []

    def watched(*args: Any) -> PendingMove:
        gone_before.append(len(side.positions()))
        return pack(*args)

    monkeypatch.setattr(side.device, "pack", watched)
    side.start("job", PROMPT)
    side.turn(8)
    assert gone_before == [0, 1, 2, 3, 4]


def test_the_piece_that_is_packed_next_is_announced() -> None:
    side = prefill_side(num_slots=8, blocks_per_slot=1)
    side.device.has_moved = False
    side.start("job", PROMPT)
    side.turn(3)
    assert [piece.piece for piece in side.announced] == [0]
    assert side.staging.num_free == 3
    side.device.has_moved = True
    side.turn()
    assert_complete(side, "job", PROMPT, 0)
    assert [piece.piece for piece in side.announced] == [0]  # the others were packed by then
    assert side.dropped == []


def test_what_is_packed_at_once_is_not_announced() -> None:
    side = prefill_side()
    side.start("job", PROMPT)
    side.turn(8)
    assert_complete(side, "job", PROMPT, 0)
    assert side.announced == []


def test_an_announced_piece_of_a_dropped_job_is_dropped_once_it_is_packed() -> None:
    side = prefill_side(num_slots=8, blocks_per_slot=8)
    side.device.has_moved = False
    side.start("job", PROMPT)
    side.start("next", PROMPT)
    side.turn(2)
    side.end("job")
    side.turn()
    assert ([piece.job_id for piece in side.announced], side.dropped) == (["job"], [])
    side.device.has_moved = True
    side.turn()
    assert side.dropped == side.announced
    assert_complete(side, "next", PROMPT, 0)


def test_pieces_fit_the_slots_of_the_receiver() -> None:
    side = prefill_side(blocks_per_slot=4)
    sequence = make_sequence("job", PROMPT, prefill_only=True)
    side.core.add(sequence)
    side.packer.start("job", 0, PARTS.packed_bytes(2) + 7)
    side.turn(8)
    assert [positions for positions, _ in side.spans()] == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize("keep_slots", [False, True], ids=["slots-to-spare", "scarce-slots"])
def test_only_the_ends_of_a_long_run_are_smaller_pieces(keep_slots: bool) -> None:
    side = prefill_side(
        blocks_per_slot=8,
        keep_slots=keep_slots,
        num_blocks=100,
        max_num_batched_tokens=400,
        max_model_len=400,
    )
    side.start("job", [1] * 360)
    for _ in range(30):
        side.turn()
        if side.held:
            side.give_back()
    sizes = [len(positions) for positions, _ in side.spans()]
    assert sizes == piece_sizes(90, 8)


def test_preempted_job_sends_no_block_twice() -> None:
    side = prefill_side(num_blocks=7, max_num_batched_tokens=5)
    talker = make_sequence("talks", [1] * 7, max_tokens=6)
    side.core.add(talker)
    side.turn(2)
    job = side.start("job", PROMPT)
    while job.status is not RequestStatus.PREEMPTED:
        side.turn()
    assert 0 < len(side.positions()) < 5
    while not job.is_finished:
        side.turn()
    side.turn()
    assert side.core.scheduler.num_preemptions == 1
    assert_complete(side, "job", PROMPT, 0)


def test_piece_whose_blocks_were_lost_while_it_was_packed_is_packed_again() -> None:
    side = prefill_side(num_blocks=7, max_num_batched_tokens=5)
    side.core.add(make_sequence("talks", [1] * 7, max_tokens=6))
    side.turn(2)
    side.device.has_moved = False
    job = side.start("job", PROMPT)
    while job.status is not RequestStatus.PREEMPTED:
        side.turn()
    assert side.staging.num_free < 4
    side.device.has_moved = True  # but others may have written to the blocks meanwhile
    side.turn()
    assert side.pieces == {}
    assert side.staging.num_free == 4
    assert side.announced
    assert side.dropped == side.announced
    while not job.is_finished:
        side.turn()
    side.turn()
    assert_complete(side, "job", PROMPT, 0)


def test_lost_piece_is_packed_again_under_its_number() -> None:
    side = prefill_side()
    side.start("job", PROMPT)
    side.turn(2)
    first, second, third = side.pieces["job"]
    side.packer.send_again("job", 1, Span(range(2, 4), WHOLE))
    side.turn()
    assert side.pieces["job"] == [first, second, third, second]


def test_lost_piece_goes_before_new_ones() -> None:
    side = prefill_side(num_slots=1, blocks_per_slot=1, keep_slots=True)
    side.start("job", PROMPT)
    side.turn()
    side.packer.send_again("job", 0, Span(range(1), WHOLE))
    for _ in range(2):
        side.give_back()
        side.turn()
    assert side.positions() == [0, 0, 1]


def test_lost_piece_of_a_preempted_job_waits_for_its_blocks() -> None:
    side = prefill_side(num_blocks=7, max_num_batched_tokens=5)
    side.core.add(make_sequence("talks", [1] * 7, max_tokens=6))
    side.turn(2)
    job = side.start("job", PROMPT)
    while job.status is not RequestStatus.PREEMPTED:
        side.turn()
    sent = list(side.pieces["job"])
    side.packer.send_again("job", *sent[0][:2])
    side.turn()
    assert side.pieces["job"] == sent
    while not job.is_finished:
        side.turn()
    side.turn()
    again = [piece for piece in side.pieces["job"] if piece == sent[0]]
    assert len(again) == 2


def test_request_for_a_job_that_is_gone_is_ignored() -> None:
    side = prefill_side()
    side.start("job", PROMPT)
    side.turn(2)
    side.end("job")
    packed = len(side.pieces["job"])
    side.packer.send_again("job", 0, Span(range(2), WHOLE))
    side.turn()
    assert len(side.pieces["job"]) == packed
    side.staging.check_integrity(all_free=True)


def test_slots_of_a_dropped_job_come_back_when_the_device_is_done_with_them() -> None:
    side = prefill_side(num_slots=2)
    side.device.has_moved = False
    side.start("job", PROMPT)
    side.turn()
    assert (side.core.hooks_busy, side.staging.num_free) == (True, 0)
    side.end("job")
    side.turn()
    assert side.staging.num_free == 0
    side.device.has_moved = True
    side.turn()
    assert (side.core.hooks_busy, side.pieces) == (False, {})
    side.staging.check_integrity(all_free=True)


def test_job_without_a_slot_does_not_keep_the_loop_awake() -> None:
    side = prefill_side(num_slots=1, keep_slots=True)
    side.start("job", PROMPT)
    side.turn(2)
    assert side.staging.num_free == 0
    assert not side.core.hooks_busy


@pytest.mark.parametrize("where", ["fail_execute", "fail_wait"])
def test_job_whose_step_failed_sends_nothing_more(
    where: str, caplog: pytest.LogCaptureFixture
) -> None:
    side = prefill_side(max_num_batched_tokens=8)
    job = side.start("job", PROMPT)
    side.turn()
    setattr(side.device, where, RuntimeError("device on fire"))
    side.turn()
    sent = len(side.positions())
    assert job.status is RequestStatus.FINISHED_ERROR
    side.turn(3)
    assert len(side.positions()) == sent
    side.end("job")
    side.staging.check_integrity(all_free=True)


def test_packing_that_fails_fails_its_job_and_no_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    side = prefill_side(blocks_per_slot=1)
    pack = side.device.pack
    refused: list[int] = []

    def fail_once(*args: Any) -> PendingMove:
        if not refused:
            refused.append(1)
            raise RuntimeError("device on fire")
        return pack(*args)

    side.start("job", PROMPT)
    side.start("next", PROMPT[::-1])
    monkeypatch.setattr(side.device, "pack", fail_once)
    side.turn(8)
    assert "device on fire" in caplog.text
    assert (side.failed, side.positions("job")) == (["job"], [])
    assert_complete(side, "next", PROMPT[::-1], 0)
    side.staging.check_integrity(all_free=True)
