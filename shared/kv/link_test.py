"""The first segment of a link: it shows whether the carrier brings what is sent, and how fast."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagewire.shared.engine.block_mover import PendingMove
from pagewire.shared.engine.executor import BlockMoves
from pagewire.shared.kv.carriers.base import Pending
from pagewire.shared.kv.messages import Segment

TEST_JOB = "test"
MAX_TEST_BYTES = 64 << 20
_PATTERN_BYTES = 4096  # at the payload's end; the rest is whatever lies in the slot


def _pattern(segment: Segment) -> torch.Tensor:
    """Return how a test's payload is to end, uint8 [_PATTERN_BYTES or fewer]."""
    numbers = torch.arange(min(segment.nbytes, _PATTERN_BYTES), dtype=torch.int64)
    return ((numbers * 2654435761 + segment.seed) >> 7).to(torch.uint8)


def _end_of(buffer: torch.Tensor, segment: Segment) -> torch.Tensor:
    return buffer[max(0, segment.nbytes - _PATTERN_BYTES) : segment.nbytes]


def fill_test(moves: BlockMoves, buffer: torch.Tensor, segment: Segment) -> PendingMove:
    """Queue the writing of a test's payload into a slot."""
    host = _pattern(segment)
    if buffer.is_cuda:
        host = host.pin_memory()
    return moves.queue(lambda: _end_of(buffer, segment).copy_(host, non_blocking=True))


@dataclass(frozen=True, slots=True)
class TestCheck:
    """The reading of a test's payload."""

    segment: Segment
    read: torch.Tensor  # on the host, once it is done
    pending: Pending

    def is_done(self) -> bool:
        """Whether it has been read."""
        return self.pending.is_done()

    def is_intact(self) -> bool:
        """Whether it is what was sent; to be asked once it is done."""
        return torch.equal(self.read, _pattern(self.segment))


def check_test(moves: BlockMoves, buffer: torch.Tensor, segment: Segment) -> TestCheck:
    """Queue the reading of a test's payload."""
    source = _end_of(buffer, segment)
    read = torch.empty(source.shape, dtype=torch.uint8, pin_memory=buffer.is_cuda)
    pending = moves.queue(lambda: read.copy_(source, non_blocking=True))
    return TestCheck(segment, read, pending)
