"""The first segment of a link: it shows whether the carrier brings what is sent, and how fast."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagewire.shared.engine.execution.block_mover import PendingMove
from pagewire.shared.engine.execution.executor import BlockMoves
from pagewire.shared.kv.carriers.base import Pending

TEST_JOB = "test"
MAX_TEST_BYTES = 64 << 20
_PATTERN_BYTES = 4096  # at the payload's end; the rest is whatever lies there


def _pattern(nbytes: int, seed: int) -> torch.Tensor:
    """Return how a test's payload is to end, uint8 [_PATTERN_BYTES or fewer]."""
    numbers = torch.arange(min(nbytes, _PATTERN_BYTES), dtype=torch.int64)
    return ((numbers * 2654435761 + seed) >> 7).to(torch.uint8)


def fill_test(moves: BlockMoves, payload: torch.Tensor, seed: int) -> PendingMove:
    """Queue the writing of a test's payload, uint8 [nbytes], into a staging slot."""
    host = _pattern(len(payload), seed)
    if payload.is_cuda:
        host = host.pin_memory()
    return moves.queue(lambda: payload[-len(host) :].copy_(host, non_blocking=True))


@dataclass(frozen=True, slots=True)
class TestCheck:
    """The reading of a test's payload.

    Attributes:
        expected: how it is to end.
        read: how it ends, on the host, once it is done.
    """

    expected: torch.Tensor
    read: torch.Tensor
    pending: Pending

    def is_done(self) -> bool:
        """Whether it has been read."""
        return self.pending.is_done()

    def is_intact(self) -> bool:
        """Whether it is what was sent; to be asked once it is done."""
        return torch.equal(self.read, self.expected)


def check_test(moves: BlockMoves, payload: torch.Tensor, seed: int) -> TestCheck:
    """Queue the reading of a test's payload, uint8 [nbytes]."""
    expected = _pattern(len(payload), seed)
    read = torch.empty(expected.shape, dtype=torch.uint8, pin_memory=payload.is_cuda)
    source = payload[-len(expected) :]
    return TestCheck(expected, read, moves.queue(lambda: read.copy_(source, non_blocking=True)))
