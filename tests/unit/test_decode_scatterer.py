from __future__ import annotations

from collections.abc import Callable
from itertools import product
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.services.decode.scatterer import PieceFate
from pagewire.services.prefill.packer import DIVIDED_BYTES
from pagewire.services.prefill.spans import Span
from pagewire.shared.engine.sequence import Sequence
from pagewire.shared.request import RequestStatus
from pagewire.tests.support.engine_pair import Pair, span_of
from pagewire.tests.support.fake_device import generate, make_sequence
from pagewire.tests.support.prefill_side import BLOCK_SIZE, LARGE, WHOLE

PROMPT = [1, 2, 3, 4, 5, 6, 0, 1, 2, 3]  # 2 full blocks and 2 tokens


@pytest.mark.parametrize("pieces_before_token", [0, 1, 3])
def test_sequence_runs_on_when_pieces_and_first_token_are_there(pieces_before_token: int) -> None:
    pair = Pair()
    sequence = pair.reserve(PROMPT)
    expected = generate(sequence, 64)
    pair.compute()
    for landed in range(4):
        if landed == pieces_before_token:
            pair.know_first_token(sequence)
        if landed < 3:
            assert pair.activated == []
            pair.land()
            pair.decode.step()
    assert pair.fates == [("request", piece, PieceFate.SCATTERED) for piece in range(3)]
    assert pair.activated == ["job"]
    while not sequence.is_finished:
        pair.decode.step()
    assert sequence.token_ids == PROMPT + expected
    pair.assert_idle()


def test_a_job_that_a_later_one_writes_over_activates_nothing() -> None:
    pair = Pair(blocks_per_piece=3)
    sequence = pair.reserve(PROMPT)
    expected = generate(sequence, 64)
    pair.compute()
    header, slot = pair.under_way[0]
    later = msgspec.structs.replace(header, job_id="later")
    for _ in range(2):
        copy = pair.receive_staging.try_acquire()
        assert copy is not None
        copy.buffer[:] = slot.buffer
        pair.under_way.append((later, copy))
    pair.under_way[1][1].buffer[0] ^= 0xFF
    pair.decode_device.has_moved = False
    pair.land()
    pair.know_first_token(sequence)
    pair.land()  # damaged, behind the other piece and before that is known to be there
    pair.decode_device.has_moved = True
    pair.decode.step()
    assert [fate for _, _, fate in pair.fates] == [PieceFate.SCATTERED, PieceFate.DAMAGED]
    assert pair.activated == []
    pair.land()
    pair.know_first_token(sequence, "later")
    while not sequence.is_finished:
        pair.decode.step()
    assert pair.activated == ["later"]
    assert sequence.token_ids == PROMPT + expected
    pair.assert_idle()


def test_loop_turns_on_at_once_behind_the_last_piece() -> None:
    pair = Pair(blocks_per_piece=3)
    sequence = pair.reserve(PROMPT)
    pair.compute()
    pair.know_first_token(sequence)
    pair.land()
    _, worked = pair.decode.step()
    assert (worked, sequence.status) == (True, RequestStatus.RUNNING)


def test_blocks_of_two_jobs_are_not_mixed() -> None:
    pair = Pair()
    sequence = pair.reserve(PROMPT)
    pair.compute()
    pair.land()
    pair.decode.step()
    other = make_sequence("other job", PROMPT, prefill_only=True)
    pair.prefill.add(other)
    pair.packer.start("other job", 0, LARGE)
    pair.compute()
    pair.know_first_token(sequence)
    pair.know_first_token(sequence, "other job")  # the first was given up
    for _ in range(3):  # the rest of the first, and the other's first
        pair.land()
        pair.decode.step()
    assert (pair.activated, sequence.status) == ([], RequestStatus.RESERVED)
    while pair.under_way:
        pair.land()
        pair.decode.step()
    assert pair.activated == ["other job"]


def test_first_token_of_a_sequence_that_has_ended_changes_nothing() -> None:
    pair = Pair()
    sequence = pair.reserve(PROMPT)
    pair.compute()
    for _ in range(3):
        pair.land()
    pair.decode.step()
    pair.decode.abort(sequence.request_id)
    pair.know_first_token(sequence)
    assert (pair.activated, sequence.status) == ([], RequestStatus.FINISHED_ABORTED)
    pair.assert_idle()


@settings(max_examples=50)
@given(
    length=st.integers(1, 40),
    cached=st.integers(0, 5),
    blocks_per_piece=st.integers(1, 4),
    order=st.randoms(use_true_random=False),
    damage=st.sampled_from([0.0, 0.5]),
    divided_bytes=st.sampled_from([0, DIVIDED_BYTES]),
)
def test_tokens_are_right_whatever_order_pieces_land_in_and_whatever_gets_damaged(
    length: int,
    cached: int,
    blocks_per_piece: int,
    order: Random,
    damage: float,
    divided_bytes: int,
) -> None:
    pair = Pair(blocks_per_piece, divided_bytes)
    prompt = [n % 7 for n in range(length)]
    warms = make_sequence("warms", prompt[: min(cached * BLOCK_SIZE, length)] or [0])
    pair.decode.add(warms)
    while not warms.is_finished:
        pair.decode.step()
    sequence = pair.reserve(prompt)
    expected = generate(sequence, 64)
    pair.compute()
    wanted = range(sequence.num_computed_tokens // BLOCK_SIZE, len(sequence.block_ids))
    missing = set(product(wanted, WHOLE))
    for _ in range(200):
        if not pair.under_way:
            break
        index = order.randrange(len(pair.under_way))
        header, slot = pair.under_way[index]
        is_damaged = order.random() < damage
        if is_damaged:
            slot.buffer[order.randrange(header.nbytes)] ^= 1 << order.randrange(8)
        pair.land(index)
        pair.decode.step()
        assert pair.fates[-1][2] is (PieceFate.DAMAGED if is_damaged else PieceFate.SCATTERED)
        if is_damaged:
            pair.packer.send_again("job", header.piece, span_of(header))
            pair.prefill.step()
        else:
            missing -= set(product(header.positions, span_of(header).parts))
    assert not missing
    pair.know_first_token(sequence)
    while not sequence.is_finished:
        pair.decode.step()
    assert sequence.token_ids == prompt + expected
    pair.assert_idle()


def end_by_abort(pair: Pair, sequence: Sequence) -> None:
    pair.decode.abort(sequence.request_id)


def end_by_fall_back(pair: Pair, sequence: Sequence) -> None:
    pair.decode.fall_back(sequence, None)
    pair.decode.step()
    assert sequence.status is RequestStatus.RUNNING


def end_by_running(pair: Pair, sequence: Sequence) -> None:
    pair.decode_device.write_prompt(sequence)
    pair.decode.activate(sequence, generate(sequence, 64)[0])


@pytest.mark.parametrize("end", [end_by_abort, end_by_fall_back, end_by_running])
def test_late_piece_touches_nothing(end: Callable[[Pair, Sequence], None]) -> None:
    pair = Pair()
    sequence = pair.reserve(PROMPT)
    pair.compute()
    end(pair, sequence)
    heir = make_sequence("heir", [5] * 12)
    pair.decode.add(heir)
    pair.decode.step()
    before = [list(block) for block in pair.decode_device.cells]
    while pair.under_way:
        pair.land()
    assert [list(block) for block in pair.decode_device.cells] == before
    assert [fate for _, _, fate in pair.fates] == [PieceFate.UNWANTED] * 3
    pair.assert_idle()


def test_piece_of_a_request_that_ends_while_it_is_scattered_is_reported_for_that_request() -> None:
    pair = Pair()
    sequence = pair.reserve(PROMPT)
    pair.compute()
    pair.decode_device.has_moved = False
    pair.land()
    pair.decode.abort(sequence.request_id)
    pair.decode.step()
    assert (pair.fates, pair.decode.hooks_busy) == ([], True)
    assert pair.receive_staging.num_free == 16 - 3  # the device may still read the slot
    # Nobody else gets the blocks that the device may still write to.
    assert pair.decode.scheduler.pool.counts().used == pair.blocks_per_piece
    pair.decode.scheduler.check_integrity()
    pair.decode_device.has_moved = True
    pair.decode.step()
    fates = [("request", 0, PieceFate.SCATTERED)]
    assert (pair.fates, pair.decode.hooks_busy) == (fates, False)
    assert pair.receive_staging.num_free == 16 - 2
    assert pair.decode.scheduler.pool.counts().used == 0
    pair.decode.scheduler.check_integrity()


@pytest.mark.parametrize("has_moved", [True, False], ids=["landed", "landing"])
def test_second_copy_of_a_piece_cannot_spoil_the_first(has_moved: bool) -> None:
    pair = Pair()
    pair.reserve(PROMPT)
    pair.compute()
    pair.packer.send_again("job", 0, Span(range(1), WHOLE))
    pair.prefill.step()
    pair.decode_device.has_moved = has_moved
    pair.land()
    pair.decode.step()
    before = [list(block) for block in pair.decode_device.cells]
    pair.under_way[-1][1].buffer[0] ^= 1
    pair.land(-1)
    assert pair.decode_device.cells == before
    pair.decode_device.has_moved = True
    pair.decode.step()
    assert sorted(fate.name for _, _, fate in pair.fates) == ["SCATTERED", "UNWANTED"]


def test_piece_is_taken_again_behind_a_damaged_one_and_from_another_job() -> None:
    pair = Pair()
    sequence = pair.reserve(PROMPT)
    pair.compute()
    pair.under_way[0][1].buffer[0] ^= 1
    pair.land()
    pair.decode.step()
    pair.packer.send_again("job", 0, Span(range(1), WHOLE))
    pair.prefill.step()
    pair.land(-1)
    pair.decode.step()
    other = make_sequence("other job", PROMPT, prefill_only=True)
    pair.prefill.add(other)
    pair.packer.start("other job", 0, LARGE)
    pair.compute()
    while pair.under_way:
        pair.land()
    pair.decode.step()
    assert [fate.name for _, _, fate in pair.fates] == ["DAMAGED"] + ["SCATTERED"] * 6
    block = sequence.block_ids[0]
    assert pair.decode_device.cells[block] == PROMPT[:4]


@pytest.mark.parametrize("blank", [False, True], ids=["earlier-piece", "nothing"])
def test_slot_into_which_the_piece_was_never_written_is_damage(blank: bool) -> None:
    pair = Pair(blocks_per_piece=3)
    pair.reserve(PROMPT)
    pair.compute()
    header, slot = pair.under_way[0]
    if blank:
        slot.buffer.zero_()
    pair.under_way[0] = (msgspec.structs.replace(header, seed=header.seed ^ 1), slot)
    pair.land()
    pair.decode.step()
    assert pair.fates == [("request", 0, PieceFate.DAMAGED)]
    pair.assert_idle()


def test_slot_comes_back_if_scattering_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_args: object) -> None:
        raise RuntimeError("device on fire")

    pair = Pair()
    pair.reserve(PROMPT)
    pair.compute()
    monkeypatch.setattr(pair.decode_device, "unpack", fail)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="on fire"):
            pair.land()
    pair.assert_idle()
