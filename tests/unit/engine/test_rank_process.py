"""What a rank does between its commands: steps and moves of a device take their time."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from pagewire.shared.base.errors import RankError
from pagewire.shared.engine.execution.block_mover import PendingMove
from pagewire.shared.engine.rank_process import run_plans
from pagewire.shared.engine.ranks.communicator import SocketCommunicator
from pagewire.shared.engine.ranks.messages import (
    Command,
    Fence,
    Moved,
    Pack,
    RankPipe,
    Stage,
    encode,
)
from pagewire.shared.engine.ranks.moves import RankMover
from pagewire.shared.engine.scheduling.step import StepPlan, StepResult

WAIT_S = 10.0
MOVES = [Pack(n, 0, 8, 1, [0], 0, 1, 0, 0) for n in (1, 2)]


class Event:
    """An event of a device, which a test sets."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def set(self) -> None:
        self._event.set()

    def query(self) -> bool:
        return self._event.is_set()

    def is_done(self) -> bool:
        return self._event.is_set()

    def wait(self) -> StepResult:
        assert self._event.wait(WAIT_S)
        return StepResult(0, [1])


@dataclass
class SlowDevice:
    """Runs steps and moves that end when a test says so.

    Attributes:
        steps: events at their ends.
        moves: likewise.
        done: what has been launched, in order.
    """

    steps: list[Event] = field(default_factory=list)
    moves: list[Event] = field(default_factory=list)
    done: list[str] = field(default_factory=list)
    launched: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    kv_pool: torch.Tensor = field(default_factory=lambda: torch.zeros(1))

    def execute(self, plan: StepPlan) -> Event:
        self._launch(f"step {plan.number}")
        self.steps.append(Event())
        return self.steps[-1]

    def pack(self, *_arguments: Any) -> PendingMove:
        self._launch("pack")
        self.moves.append(Event())
        move: Any = self.moves[-1]
        return PendingMove(move)

    def fence(self) -> None:
        self._launch("fence")

    def _launch(self, what: str) -> None:
        self.done.append(what)
        self.launched.release()

    def await_launches(self, count: int) -> None:
        for _ in range(count):
            assert self.launched.acquire(timeout=WAIT_S)


@contextmanager
def rank(device: Any, communicator: Any, memory_fd: int = -1) -> Iterator[tuple[RankPipe, Any]]:
    """Run a rank in a thread; yield rank 0's end of its pipe, and the future of its end."""
    ours, theirs = socket.socketpair()
    pipe = RankPipe(ours, 1)
    mover = RankMover(1, device, memory_fd)
    with ThreadPoolExecutor(1) as pool, ours, theirs:
        future = pool.submit(run_plans, RankPipe(theirs, 0), device, mover, communicator)
        try:
            yield pipe, future
        finally:
            ours.shutdown(socket.SHUT_RDWR)
            for event in (*device.steps, *device.moves):
                event.set()


@pytest.fixture
def memory_fd(tmp_path: Any) -> Iterator[int]:
    path = tmp_path / "staging"
    path.write_bytes(bytes(64))
    with path.open("r+b") as file:
        yield file.fileno()


def send(pipe: RankPipe, *commands: Command) -> None:
    for command in commands:
        pipe.send(encode(command))


def plan(number: int) -> StepPlan:
    return StepPlan(number=number, decodes=[0])


def test_steps_do_not_wait_for_moves_and_moves_are_reported_when_they_are_made(
    memory_fd: int,
) -> None:
    device = SlowDevice()
    with rank(device, Mock(SocketCommunicator), memory_fd) as (pipe, future):
        send(pipe, Stage(64), *MOVES, plan(1), Fence(), plan(2))
        device.await_launches(5)
        assert device.done == ["pack", "pack", "step 1", "fence", "step 2"]
        with pytest.raises(RankError, match="reported nothing"):
            pipe.next_report(0.2)
        for number, move in enumerate(device.moves, 1):
            move.set()
            assert pipe.next_report(WAIT_S) == Moved(number)
        assert not future.done()


def test_a_step_that_has_waited_in_vain_ends_the_rank() -> None:
    device = SlowDevice()
    missed = RankError("rank 0 has not answered for 5 s", 0)
    communicator = SimpleNamespace(check=Mock(side_effect=[None, missed]))
    with rank(device, communicator) as (pipe, future):
        send(pipe, plan(1), plan(2))
        device.await_launches(2)
        for step in device.steps:
            step.set()
        send(pipe, plan(3))
        assert future.exception(WAIT_S) is missed
