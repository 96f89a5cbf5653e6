"""A prefill engine over the fake device, with its packer."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import torch

from pagewire.services.prefill.packer import DIVIDED_BYTES, PiecePacker, StagedPiece
from pagewire.services.prefill.spans import Span
from pagewire.shared.engine.core import EngineCore
from pagewire.shared.engine.sequence import Sequence
from pagewire.shared.kv_cache.parts import BlockParts
from pagewire.shared.transfer.staging import StagingPool
from pagewire.tests.support.fake_device import (
    BYTES_PER_TOKEN,
    NUM_PARTS,
    FakeDevice,
    make_core,
    make_sequence,
)

BLOCK_SIZE = 4
PARTS = BlockParts.of(NUM_PARTS, BLOCK_SIZE * BYTES_PER_TOKEN)
WHOLE = PARTS.whole
CPU = torch.device("cpu")
LARGE = 1 << 30  # a receiver's slots


@dataclass
class PrefillSide:
    """A prefill engine with its packer; whoever takes a piece gives its slot back at once.

    Attributes:
        pieces: job -> (piece, span, tokens) in the order in which they were packed.
        announced: pieces, in the order in which they were announced.
        dropped: of these.
        failed: jobs that could not be packed.
    """

    core: EngineCore
    device: FakeDevice
    staging: StagingPool
    keep_slots: bool = False
    divided_bytes: int = DIVIDED_BYTES
    pieces: defaultdict[str, list[tuple[int, Span, list[int]]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    held: list[StagedPiece] = field(default_factory=list)
    announced: list[StagedPiece] = field(default_factory=list)
    dropped: list[StagedPiece] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    packer: PiecePacker = field(init=False)

    def __post_init__(self) -> None:
        self.packer = PiecePacker(
            self.device,
            self.staging,
            BLOCK_SIZE,
            PARTS,
            self.on_packed,
            self.divided_bytes,
            self.announced.append,
            self.dropped.append,
            self.failed.append,
        )
        self.core.hooks.append(self.packer)

    def on_packed(self, piece: StagedPiece) -> None:
        span = piece.span
        assert piece.nbytes == PARTS.packed_bytes(len(span.positions), len(span.parts))
        tokens = piece.slot.buffer[: span.num_units * PARTS.nbytes].view(torch.int32).tolist()
        self.pieces[piece.job_id].append((piece.piece, span, tokens))
        if self.keep_slots:
            self.held.append(piece)
        else:
            piece.slot.release()

    def start(self, job_id: str, prompt: list[int], first_block: int = 0) -> Sequence:
        sequence = make_sequence(job_id, prompt, prefill_only=True)
        self.core.add(sequence)
        self.packer.start(job_id, first_block, LARGE)
        return sequence

    def end(self, job_id: str) -> None:
        self.packer.drop(job_id)
        self.core.abort(job_id)

    def positions(self, job_id: str = "job") -> list[int]:
        return [position for _, span, _ in self.pieces[job_id] for position in span.positions]

    def spans(self, job_id: str = "job") -> list[tuple[list[int], list[int]]]:
        return [(list(span.positions), list(span.parts)) for _, span, _ in self.pieces[job_id]]

    def tokens(self, job_id: str = "job") -> list[int]:
        """Those of all units, put together again; each must have come once."""
        size = BLOCK_SIZE // NUM_PARTS
        units: dict[tuple[int, int], list[int]] = {}
        for _, span, tokens in self.pieces[job_id]:
            names = [(position, part) for position in span.positions for part in span.parts]
            assert units.keys().isdisjoint(names)
            units |= {name: tokens[n * size :][:size] for n, name in enumerate(names)}
        return [token for name in sorted(units) for token in units[name]]

    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            self.core.step()
            self.core.scheduler.check_integrity()

    def give_back(self) -> None:
        self.held.pop(0).slot.release()


def prefill_side(
    num_slots: int = 4,
    blocks_per_slot: int = 2,
    *,
    keep_slots: bool = False,
    divided_bytes: int = DIVIDED_BYTES,
    **engine: int,
) -> PrefillSide:
    core, device = make_core(block_size=BLOCK_SIZE, **engine)
    staging = StagingPool(num_slots, PARTS.packed_bytes(blocks_per_slot), CPU)
    return PrefillSide(core, device, staging, keep_slots, divided_bytes)


def assert_complete(side: PrefillSide, job_id: str, prompt: list[int], first_block: int) -> None:
    """Each part of each block from the first on came once, with the prompt's tokens in it."""
    num_blocks = -(-len(prompt) // BLOCK_SIZE)
    assert sorted(set(side.positions(job_id))) == list(range(first_block, num_blocks))
    assert [piece for piece, _, _ in side.pieces[job_id]] == list(range(len(side.pieces[job_id])))
    expected = prompt[first_block * BLOCK_SIZE :]
    tokens = side.tokens(job_id)
    assert tokens[: len(expected)] == expected
    assert len(tokens) == (num_blocks - first_block) * BLOCK_SIZE
