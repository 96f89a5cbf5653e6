"""The memory through which the GPUs of a model's ranks exchange values.

Each rank has a buffer that all ranks map. It begins with flags, int64 `[programs, ranks]`; then
come receive buffers `[programs, 2, ranks]`: program, parity of the round, and the rank that writes.
`_rank_exchange.py` says how they are used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

# Programs of a launch at most, each with flags and receive buffers of its own. All run at once, so
# a GPU has no more than multiprocessors. Measured on two H200s: with 64, sums from 4 MB on take up
# to 1.3 times as long.
PROGRAMS = 128
# What a program receives in a round from all ranks, at most.
ROUND_BYTES = 64 << 10
ALIGNED = 512  # bytes, of which receive buffers begin at a multiple

_FLAG_BYTES = 8


class RankMemory(NamedTuple):
    """The buffers of all ranks, as one rank sees them.

    Attributes:
        rank: this one.
        addresses: `[ranks]` int64, of each rank's buffer, as this rank has mapped it.
        state: `[1 + programs]` int64: the timeout in ns, then each program's number of rounds, or
            -1 once it has missed another rank.
        missing: `[1]` int64 in memory of the host, if possible: 0, or 1 + the number of the rank
            that was first missed.
    """

    rank: int
    addresses: torch.Tensor
    state: torch.Tensor
    missing: torch.Tensor

    @property
    def num_ranks(self) -> int:
        """How many ranks share the memory."""
        return len(self.addresses)

    @property
    def num_programs(self) -> int:
        """Number of programs that have receive buffers."""
        return len(self.state) - 1


def part_bytes(count: int) -> int:
    """Return how much a program sends to each of `count` ranks in a round, at most."""
    return ROUND_BYTES // count // ALIGNED * ALIGNED


def buffer_bytes(count: int, programs: int = PROGRAMS) -> int:
    """Return the size of a rank's buffer, which must be zeros before another rank writes."""
    flags = -(-programs * count * _FLAG_BYTES // ALIGNED) * ALIGNED
    return flags + programs * 2 * count * part_bytes(count)


def make_rank_memory(
    rank: int,
    addresses: Sequence[int],
    device: torch.device,
    timeout_s: float,
    programs: int = PROGRAMS,
) -> RankMemory:
    """Return a rank's view of the ranks' buffers.

    Args:
        rank: this one.
        addresses: of each rank's buffer, as this rank has mapped it.
        device: where this rank computes.
        timeout_s: how long a kernel waits for another rank.
        programs: of a launch at most; the same on all ranks.
    """
    state = [round(timeout_s * 1e9), *[0] * programs]
    missing = torch.zeros(1, dtype=torch.int64, pin_memory=device.type == "cuda")
    return RankMemory(rank, _on(device, addresses), _on(device, state), missing)


def _on(device: torch.device, numbers: Sequence[int]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device=device)
