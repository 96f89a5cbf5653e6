from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.kernels.kv_staging import packed_bytes
from pagewire.services.decode.scatterer import Completion, PieceFate, PieceScatterer
from pagewire.services.prefill.packer import PackedPiece, PiecePacker
from pagewire.shared.engine.core import EngineCore
from pagewire.shared.engine.sequence import Sequence
from pagewire.shared.protocol import PieceHeader
from pagewire.shared.request import RequestStatus
from pagewire.shared.transfer.staging import StagingPool, StagingSlot
from pagewire.tests.support.fake_device import (
    BYTES_PER_TOKEN,
    FakeDevice,
    generate,
    make_core,
    make_sequence,
)

BLOCK_SIZE = 4
BLOCK_BYTES = BLOCK_SIZE * BYTES_PER_TOKEN
PROMPT = [1, 2, 3, 4, 5, 6, 0, 1, 2, 3]  # 2 full blocks and 2 tokens
CPU = torch.device("cpu")
LARGE = 1 << 30  # a receiver's slots


def header_of(piece: PackedPiece) -> PieceHeader:
    return PieceHeader(
        job_id=piece.job_id,
        decode_epoch=1,
        prefill_epoch=1,
        piece=piece.piece,
        positions=piece.positions,
        seed=piece.seed,
        nbytes=piece.nbytes,
    )


@dataclass
class Pair:
    """A prefill and a decode engine, with pieces on their way from one to the other.

    Attributes:
        under_way: pieces that were packed and are in the decode side's staging.
        fates: what the scatterer said, in order.
        activated: jobs whose blocks a sequence runs on with.
    """

    blocks_per_piece: int = 1
    prefill: EngineCore = field(init=False)
    prefill_device: FakeDevice = field(init=False)
    decode: EngineCore = field(init=False)
    decode_device: FakeDevice = field(init=False)
    under_way: list[tuple[PieceHeader, StagingSlot]] = field(default_factory=list)
    fates: list[tuple[str, int, PieceFate]] = field(default_factory=list)
    activated: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.prefill, self.prefill_device = make_core(block_size=BLOCK_SIZE)
        self.decode, self.decode_device = make_core(block_size=BLOCK_SIZE)
        slot_bytes = packed_bytes(self.blocks_per_piece, BLOCK_BYTES)
        self.send_staging = StagingPool(2, slot_bytes, CPU)
        self.receive_staging = StagingPool(16, slot_bytes, CPU)
        self.packer = PiecePacker(
            self.prefill_device, self.send_staging, BLOCK_SIZE, BLOCK_BYTES, self._carry
        )
        self.scatterer = PieceScatterer(self.decode, self._on_scattered)
        self.prefill.hooks.append(self.packer)
        self.decode.hooks.append(self.scatterer)

    def _carry(self, piece: PackedPiece) -> None:
        slot = self.receive_staging.try_acquire()
        assert slot is not None
        slot.buffer[: piece.nbytes] = piece.slot.buffer[: piece.nbytes]
        piece.slot.release()
        self.under_way.append((header_of(piece), slot))

    def _on_scattered(self, request_id: str, header: PieceHeader, fate: PieceFate) -> None:
        self.fates.append((request_id, header.piece, fate))

    def reserve(self, prompt: list[int]) -> Sequence:
        """Reserve blocks on the decode side and have the prefill side compute them."""
        sequence = make_sequence("request", prompt, remote_prefill=True)
        self.decode.add(sequence)
        self.decode.step()
        assert sequence.status is RequestStatus.RESERVED
        self.scatterer.reserve(sequence)
        assert self.decode_device.introduced == [sequence.request_id]
        job = make_sequence("job", prompt, prefill_only=True)
        self.prefill.add(job)
        self.packer.start("job", job, sequence.num_computed_tokens // BLOCK_SIZE, LARGE)
        return sequence

    def compute(self) -> None:
        """Run the job to its end, all of its pieces under way."""
        for _ in range(12):
            self.prefill.step()

    def land(self, index: int = 0) -> PieceHeader:
        """Let a piece that is under way be scattered."""
        header, slot = self.under_way.pop(index)
        self.scatterer.scatter("request", header, slot)
        return header

    def know_first_token(self, sequence: Sequence, job_id: str = "job") -> None:
        """Tell the scatterer what the sequence runs on from when a job's blocks are there."""
        positions = range(sequence.num_computed_tokens // BLOCK_SIZE, len(sequence.block_ids))
        token = generate(sequence, 64)[0]
        completion = Completion(job_id, positions, token, lambda: self.activated.append(job_id))
        self.scatterer.complete(sequence.request_id, completion)

    def assert_idle(self) -> None:
        self.send_staging.check_integrity(all_free=True)
        self.receive_staging.check_integrity(all_free=True)
        assert not self.scatterer.after_launch()


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
    pair.packer.start("other job", other, 0, LARGE)
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
)
def test_tokens_are_right_whatever_order_pieces_land_in_and_whatever_gets_damaged(
    length: int, cached: int, blocks_per_piece: int, order: Random, damage: float
) -> None:
    pair = Pair(blocks_per_piece)
    prompt = [n % 7 for n in range(length)]
    warms = make_sequence("warms", prompt[: min(cached * BLOCK_SIZE, length)] or [0])
    pair.decode.add(warms)
    while not warms.is_finished:
        pair.decode.step()
    sequence = pair.reserve(prompt)
    expected = generate(sequence, 64)
    pair.compute()
    missing = set(range(sequence.num_computed_tokens // BLOCK_SIZE, len(sequence.block_ids)))
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
            pair.packer.send_again("job", header.piece, header.positions)
            pair.prefill.step()
        else:
            missing -= set(header.positions)
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
    pair.packer.send_again("job", 0, [0])
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
    pair.packer.send_again("job", 0, [0])
    pair.prefill.step()
    pair.land(-1)
    pair.decode.step()
    other = make_sequence("other job", PROMPT, prefill_only=True)
    pair.prefill.add(other)
    pair.packer.start("other job", other, 0, LARGE)
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
