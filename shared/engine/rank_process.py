"""The program of ranks 1, 2, ...: loads a part of the model, and runs the plans that rank 0 sends.

    python -P -m pagewire.shared.engine.rank_process PARENT RANK PIPE MEMORY SOCKET...

PARENT is the process id of rank 0. PIPE is the descriptor of the socket to rank 0 for plans, MEMORY
that of the memory that all ranks share; each SOCKET is one to another rank, in their order, for
sums. The process ends with rank 0.
It ignores signals from a terminal or a supervisor: rank 0 needs it for requests that finish, and
starts it with these signals blocked.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from contextlib import suppress

from pagewire.shared.base.errors import ConfigError, RankError
from pagewire.shared.base.logs import configure_logging
from pagewire.shared.engine.build import build_rank
from pagewire.shared.engine.execution.executor import Executor, PendingStep
from pagewire.shared.engine.ranks.communicator import RankCommunicator, SocketCommunicator
from pagewire.shared.engine.ranks.executor import Digests
from pagewire.shared.engine.ranks.group import IGNORED_SIGNALS
from pagewire.shared.engine.ranks.messages import (
    OUT_OF_MEMORY,
    Begin,
    Failed,
    Fence,
    Loaded,
    Pack,
    RankPipe,
    Ready,
    Setup,
    Stage,
    encode,
)
from pagewire.shared.engine.ranks.moves import RankMover
from pagewire.shared.engine.scheduling.step import GrammarMasks, StepPlan
from pagewire.shared.model.shard import Shard
from pagewire.shared.settings.config import EngineSettings

logger = logging.getLogger(__name__)

PARENT_POLL_S = 0.5
MOVE_POLL_S, STEP_POLL_S = 0.0001, 0.001  # while a move, or a step, is under way
MOST_STEPS = 2  # that rank 0 has under way


def main(arguments: list[str]) -> int:
    """Run until rank 0 ends; returns the exit code."""
    parent, rank, pipe_fd, memory_fd, *fds = map(int, arguments)
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED_SIGNALS)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    pipe = RankPipe(socket.socket(fileno=pipe_fd), 0)
    others = [other for other in range(len(fds) + 1) if other != rank]
    sockets = {other: socket.socket(fileno=fd) for other, fd in zip(others, fds, strict=True)}
    try:
        _run(rank, pipe, memory_fd, SocketCommunicator(rank, sockets, is_loading=True))
    except RankError as exc:
        failure = Failed(str(exc), missing=exc.rank)
    except ConfigError as exc:
        failure = Failed(str(exc), is_config=True)
    except OUT_OF_MEMORY as exc:
        failure = Failed(f"{type(exc).__name__}: {exc}", is_blameless=True)
    except Exception as exc:  # whatever a device raises: rank 0 ends all ranks
        logger.exception("rank %d has failed", rank)
        failure = Failed(f"{type(exc).__name__}: {exc}")
    else:
        return 0
    with suppress(RankError):  # rank 0 has ended
        pipe.send(encode(failure))
    return 1


def _end_with(parent: int) -> None:
    """End this process when rank 0's has ended, even while it loads or computes."""
    while os.getppid() == parent:
        time.sleep(PARENT_POLL_S)
    os._exit(1)


def _run(rank: int, pipe: RankPipe, memory_fd: int, control: SocketCommunicator) -> None:
    setup = pipe.next_command()
    if not isinstance(setup, Setup):
        return
    configure_logging(setup.log_level, setup.log_format, setup.service)
    for handler in logging.getLogger().handlers:
        handler.addFilter(RankLabel(rank))
    control.patience_s = setup.patience_s
    settings = EngineSettings(**setup.settings)

    def agree(num_blocks: int) -> Begin:
        pipe.send(encode(Loaded(num_blocks)))
        if not isinstance(begin := pipe.next_command(), Begin):
            raise RankError("rank 0 has ended", 0)
        return begin

    runner, communicator = build_rank(settings, Shard(rank, setup.count), control, agree)
    control.is_loading = False
    pipe.send(encode(Ready()))
    run_plans(pipe, runner, RankMover(rank, runner, memory_fd), communicator)


class RankLabel(logging.Filter):
    """Adds the rank to log lines."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank

    def filter(self, record: logging.LogRecord) -> bool:
        """Add it; no line is left out."""
        record.fields = {**getattr(record, "fields", {}), "rank": self._rank}
        return True


def run_plans(
    pipe: RankPipe, executor: Executor, mover: RankMover, communicator: RankCommunicator
) -> None:
    """Run plans and moves until rank 0 ends; report moves, and now and then what was sampled.

    Raises:
        RankError: another rank is lost.
        Exception: whatever the executor raises.
    """
    digests = Digests()
    running: deque[PendingStep] = deque()  # steps whose tokens have not been read
    while True:
        for moved in mover.made():
            pipe.send(encode(moved))
        # Rank 0 has at most two steps under way, so that of three the first one ends soon.
        while len(running) > MOST_STEPS or (running and running[0].is_done()):
            result = running.popleft().wait()
            communicator.check()
            if (sampled := digests.add(result)) is not None:
                pipe.send(encode(sampled))
        is_busy = mover.is_busy or bool(running)
        if is_busy and not pipe.has_command(MOVE_POLL_S if mover.is_busy else STEP_POLL_S):
            continue
        if (command := pipe.next_command()) is None:
            return
        if isinstance(command, StepPlan):
            pending = executor.execute(command)
            if command.has_rows:
                running.append(pending)
        elif isinstance(command, GrammarMasks):
            executor.sample(command)
        elif isinstance(command, Pack):
            mover.move(command)
        elif isinstance(command, Fence):
            mover.fence()
        elif isinstance(command, Stage):
            mover.stage(command)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    logging.shutdown()
    os._exit(code)  # ending the interpreter would take a second, for which rank 0 waits
