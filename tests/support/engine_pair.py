"""A prefill and a decode engine over fake devices, and the pieces between them."""

from __future__ import annotations

from dataclasses import dataclass, field

from pagewire.services.decode.scatterer import Completion, PieceFate, PieceScatterer
from pagewire.services.prefill.packer import DIVIDED_BYTES, PiecePacker, StagedPiece
from pagewire.services.prefill.spans import Span
from pagewire.shared.engine.core import EngineCore
from pagewire.shared.engine.sequence import Sequence
from pagewire.shared.protocol import PieceHeader
from pagewire.shared.request import RequestStatus
from pagewire.shared.transfer.staging import StagingPool, StagingSlot
from pagewire.tests.support.fake_device import FakeDevice, generate, make_core, make_sequence
from pagewire.tests.support.prefill_side import BLOCK_SIZE, CPU, LARGE, PARTS, WHOLE


def header_of(piece: StagedPiece) -> PieceHeader:
    return PieceHeader(
        job_id=piece.job_id,
        decode_epoch=1,
        prefill_epoch=1,
        piece=piece.piece,
        positions=list(piece.span.positions),
        first_part=piece.span.parts.start,
        num_parts=len(piece.span.parts),
        seed=piece.seed,
        nbytes=piece.nbytes,
    )


def span_of(header: PieceHeader) -> Span:
    positions = range(header.positions[0], header.positions[-1] + 1)
    return Span(positions, WHOLE[header.first_part :][: header.num_parts])


@dataclass
class Pair:
    """A prefill and a decode engine, with pieces on their way from one to the other.

    Attributes:
        under_way: pieces that were packed and are in the decode side's staging.
        fates: what the scatterer said, in order.
        activated: jobs whose blocks a sequence runs on with.
    """

    blocks_per_piece: int = 1
    divided_bytes: int = DIVIDED_BYTES
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
        slot_bytes = PARTS.packed_bytes(self.blocks_per_piece)
        self.send_staging = StagingPool(2, slot_bytes, CPU)
        self.receive_staging = StagingPool(16, slot_bytes, CPU)
        self.packer = PiecePacker(
            self.prefill_device,
            self.send_staging,
            BLOCK_SIZE,
            PARTS,
            self._carry,
            self.divided_bytes,
        )
        self.scatterer = PieceScatterer(self.decode, self.decode_device, self._on_scattered)
        self.prefill.hooks.append(self.packer)
        self.decode.hooks.append(self.scatterer)

    def _carry(self, piece: StagedPiece) -> None:
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
        assert self.decode_device.prepared == [sequence.slot]
        job = make_sequence("job", prompt, prefill_only=True)
        self.prefill.add(job)
        self.packer.start("job", sequence.num_computed_tokens // BLOCK_SIZE, LARGE)
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
        completion = Completion(
            job_id, positions, WHOLE, token, lambda: self.activated.append(job_id)
        )
        self.scatterer.complete(sequence.request_id, completion)

    def assert_idle(self) -> None:
        self.send_staging.check_integrity(all_free=True)
        self.receive_staging.check_integrity(all_free=True)
        assert not self.scatterer.after_launch(None)
