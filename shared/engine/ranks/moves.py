"""Moves of KV blocks on all ranks: each moves its part between its pool and the shared staging.

A staging slot has the parts of all ranks, one after the other, each with its checksums; a rank has
several if the other worker has more ranks. So one rank, which has the engine, sends and receives
the whole; a segment is intact if all parts are.

On GPUs staging is rank 0's memory, which the other ranks map. What one GPU queues does not come
after another's moves: a move of all ranks has been made once each has reported its part.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from pagewire.shared.base.errors import RankError, TransferError
from pagewire.shared.engine.execution.block_mover import BlockMove, PendingCheck, PendingMove
from pagewire.shared.engine.execution.model_runner import ModelRunner
from pagewire.shared.engine.ranks.executor import OthersMove, RanksExecutor
from pagewire.shared.engine.ranks.messages import Moved, Pack, Stage, Unpack
from pagewire.shared.engine.ranks.shared_staging import map_shared
from pagewire.shared.kv.packing import part_bytes

POLL_S = 0.0001


class RanksMove(PendingCheck):
    """Follows a move of KV blocks on all ranks."""

    __slots__ = ("_executor", "_others", "_own")
    is_of_one_device = False

    def __init__(self, own: PendingMove, others: OthersMove, executor: RanksExecutor) -> None:
        super().__init__(np.zeros((), np.int64), None)
        self._own, self._others, self._executor = own, others, executor

    def poll(self) -> bool:
        """Read what ranks report; return whether all have moved their parts, without waiting.

        Raises:
            RankError: a rank is lost.
        """
        return self._executor.look_at(self._others) and self._own.poll()

    def verify(self) -> bool:
        """Wait for the move; return whether all checksums are right.

        Raises:
            RankError: a rank is lost.
        """
        while not self._executor.look_at(self._others):
            time.sleep(POLL_S)
        return self._others.is_intact and isinstance(self._own, PendingCheck) and self._own.verify()


class _OwnMove(PendingMove):
    """Work on this rank's device, after which other ranks' moves do not come by themselves."""

    __slots__ = ()
    is_of_one_device = False


@dataclass(slots=True)
class RanksMoves:
    """The `BlockMoves` of rank 0, which has the other ranks move their parts.

    Other ranks run moves and plans in the order in which they are sent.

    Attributes:
        executor: sends what the others do.
        own: moves this rank's part.
        staging: the staging slots, in the memory that all ranks share.
    """

    executor: RanksExecutor
    own: ModelRunner
    staging: torch.Tensor
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def has_group_events(self, plan: int) -> bool:
        """Whether this plan records an event for each layer group; see `BlockMoves`."""
        return self.own.has_group_events(plan)

    def pack(self, move: BlockMove, after: int) -> PendingMove:
        """Gather blocks into staging on all ranks, as `BlockMoves` says."""
        others, own = self._begin(Pack, move, after)
        return RanksMove(self.own.pack(own, after), others, self.executor)

    def unpack(self, move: BlockMove, after: int) -> PendingCheck:
        """Scatter staging into blocks on all ranks and check them, as `BlockMoves` says."""
        others, own = self._begin(Unpack, move, after)
        return RanksMove(self.own.unpack(own, after), others, self.executor)

    def queue(self, work: Callable[[], object]) -> PendingMove:
        """Queue other work on this rank's device, as `BlockMoves` says."""
        return _OwnMove(self.own.queue(work).end)

    def fence(self) -> None:
        """Have later plans wait for the moves so far, on all ranks."""
        self.executor.fence()
        self.own.fence()

    def warm_launch_path(self) -> None:
        """Do parts of a move and a launch on this rank, without effect."""
        self.own.warm_launch_path()

    def _begin(self, kind: type[Pack], move: BlockMove, after: int) -> tuple[OthersMove, BlockMove]:
        """Have the others move their parts; return what follows them, and the own part.

        Raises:
            TransferError: the heads cannot be divided so.
        """
        layout, (block_ids, groups, staging, seed, parts) = self.own.layout, move
        if parts % layout.ranks or (divided := layout.divided(parts)) is None:
            raise TransferError(f"the KV heads of {layout.ranks} ranks do not make {parts} parts")
        start, own_parts = staging.data_ptr() - self.staging.data_ptr(), parts // layout.ranks
        size = own_parts * part_bytes(divided, len(block_ids), len(groups))
        number, first, count = next(self._numbers), groups.start, len(groups)
        command = kind(number, start, size, own_parts, block_ids, first, count, seed, after)
        own = move._replace(staging=staging[:size], parts=own_parts)
        return self.executor.move(command), own


@dataclass(slots=True)
class RankMover:
    """Makes the moves that rank 0 asks another rank for.

    Attributes:
        rank: this one.
        runner: moves its part of blocks.
        memory_fd: a file that all ranks can map.
    """

    rank: int
    runner: ModelRunner
    memory_fd: int
    _memory: torch.Tensor | None = None
    # Moves that have been launched, and their numbers, in their order.
    _pending: deque[tuple[int, PendingMove]] = field(default_factory=deque)

    @property
    def is_busy(self) -> bool:
        """Whether a move is under way."""
        return bool(self._pending)

    def stage(self, command: Stage) -> None:
        """Map the staging slots.

        Raises:
            TransferError: rank 0's memory cannot be mapped.
        """
        self._memory = map_shared(command, self.memory_fd, self.runner.kv_pool.device)

    def move(self, command: Pack) -> None:
        """Launch the move of this rank's part.

        Raises:
            RankError: the command came before the staging memory.
        """
        if self._memory is None:
            raise RankError("blocks cannot be moved before there is staging", self.rank)
        start = command.start + self.rank * command.size
        # Not with brackets: these would switch to rank 0's GPU, which takes memory there.
        part = self._memory.narrow(0, start, command.size)
        groups = range(command.first_group, command.first_group + command.num_groups)
        move = BlockMove(command.block_ids, groups, part, command.seed, command.parts)
        make = self.runner.unpack if isinstance(command, Unpack) else self.runner.pack
        self._pending.append((command.number, make(move, command.after)))

    def fence(self) -> None:
        """Have later plans wait for the moves so far."""
        self.runner.fence()

    def made(self) -> Iterator[Moved]:
        """Yield a report of each move that has been made since the last call."""
        while self._pending and self._pending[0][1].poll():
            number, move = self._pending.popleft()
            yield Moved(number, not isinstance(move, PendingCheck) or move.verify())
