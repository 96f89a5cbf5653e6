"""The first segment of a link: a test whether the carrier delivers payloads, and how fast."""

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
    """Return the bytes at the end of a test's payload, uint8 [_PATTERN_BYTES or fewer]."""
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
    """A check of a test's payload, under way on the device.

    Attributes:
        expected: the bytes that should be at the payload's end.
        read: the bytes that are there; on the host, valid once the check is done.
    """

    expected: torch.Tensor
    read: torch.Tensor
    pending: Pending

    def is_done(self) -> bool:
        """Whether the payload has been read."""
        return self.pending.is_done()

    def is_intact(self) -> bool:
        """Whether the payload arrived as it was sent; call this once the check is done."""
        return torch.equal(self.read, self.expected)


def check_test(moves: BlockMoves, payload: torch.Tensor, seed: int) -> TestCheck:
    """Queue the reading of a test's payload, uint8 [nbytes]."""
    expected = _pattern(len(payload), seed)
    read = torch.empty(expected.shape, dtype=torch.uint8, pin_memory=payload.is_cuda)
    source = payload[-len(expected) :]
    return TestCheck(expected, read, moves.queue(lambda: read.copy_(source, non_blocking=True)))
