"""The processes of the other ranks, as rank 0 sees them: their start, their loss, their end."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from pagewire.shared.base.errors import BlamelessRankError, ConfigError, PagewireError, RankError
from pagewire.shared.base.logs import LogForm
from pagewire.shared.engine.ranks.communicator import (
    LOAD_S,
    STEP_S,
    RankCommunicator,
    SocketCommunicator,
    connected,
)
from pagewire.shared.engine.ranks.messages import (
    Begin,
    Failed,
    Loaded,
    RankPipe,
    Ready,
    Report,
    Setup,
    encode,
)
from pagewire.shared.engine.ranks.shared_staging import allocate_shared
from pagewire.shared.model.shard import Shard
from pagewire.shared.model.source import resolve_model
from pagewire.shared.settings.config import EngineSettings, WorkerSettings

logger = logging.getLogger(__name__)

PROGRAM = "pagewire.shared.engine.rank_process"
REPORT_S = 1.0  # for the rest of a report
IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
REASON_S = 0.5  # for a rank that is missed to say why, and to end
EXIT_S = 10.0  # for a killed rank's process to end: its driver frees the GPU's memory first
END_S = 2.0  # for ranks to end by themselves


@dataclass(slots=True, eq=False, weakref_slot=True)
class RankGroup:
    """The other ranks' processes. With one rank there are none, and nothing here does anything.

    Attributes:
        control: rank 0's sockets to the others; None with one rank.
        pipes: to ranks 1, 2, ...
        processes: theirs.
        memory_fd: a file without a name, which all ranks can map; -1 with one rank.
        patience_s: how long rank 0 waits for a rank in a step, or for its part of a move.
    """

    control: SocketCommunicator | None = None
    pipes: Sequence[RankPipe] = ()
    processes: Sequence[subprocess.Popen[bytes]] = ()
    memory_fd: int = -1
    patience_s: float = STEP_S
    _poller: select.poll = field(default_factory=select.poll)
    _failures: dict[int, Failed] = field(default_factory=dict)
    _early: list[tuple[int, Report]] = field(default_factory=list)
    _opened: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _is_ready: bool = False
    _loss: PagewireError | None = None
    _end: weakref.finalize[..., RankGroup] = field(init=False)

    def __post_init__(self) -> None:
        for pipe in self.pipes:
            self._poller.register(pipe.fileno(), select.POLLIN)
        # Also when an `LLM` is collected, or its program ends.
        parts = self.control, self.pipes, self.processes, self._opened
        self._end = weakref.finalize(self, _end, self.memory_fd, *parts)

    @classmethod
    def start(cls, setup: Setup) -> RankGroup:
        """Start the processes of all ranks but this one.

        Raises:
            ConfigError: this machine cannot start them.
            RankError: one has ended.
        """
        with contextlib.ExitStack() as undo:
            try:
                group = cls._started(setup, undo)
            except OSError as exc:
                raise ConfigError(f"the processes of the ranks cannot be started: {exc}") from exc
            undo.pop_all()
        group.send(encode(setup))
        return group

    @classmethod
    def _started(cls, setup: Setup, undo: contextlib.ExitStack) -> RankGroup:
        memory_fd = os.memfd_create("pagewire-staging")
        undo.callback(os.close, memory_fd)
        sockets = connected(setup.count)
        control = SocketCommunicator(0, sockets[0], setup.patience_s, is_loading=True)
        undo.callback(control.close)
        pipes: list[RankPipe] = []
        processes: list[subprocess.Popen[bytes]] = []
        undo.callback(_kill, processes)
        try:
            for rank, connections in enumerate(sockets[1:], 1):
                ours, theirs = socket.socketpair()
                pipes.append(RankPipe(ours, rank))
                undo.callback(ours.close)
                with theirs:
                    processes.append(_start_process(rank, theirs, memory_fd, connections))
        finally:
            for connections in sockets[1:]:
                for connection in connections.values():
                    connection.close()
        return cls(control, pipes, processes, memory_fd, setup.patience_s)

    @property
    def count(self) -> int:
        """Number of ranks, this one included."""
        return 1 + len(self.pipes)

    @property
    def shard(self) -> Shard:
        """This rank's part of the model."""
        return Shard(0, self.count)

    def own(self, communicator: RankCommunicator | None) -> None:
        """Close this rank's communicator when the ranks end."""
        if communicator is not None:
            self._opened.callback(communicator.close)

    def look(self) -> None:
        """Look whether a rank is lost while this one loads; takes little time.

        Raises:
            ConfigError: a rank refuses the settings.
            RankError: a rank is lost.
        """
        if self.has_news():
            self._early += self.reports()

    def fewest_blocks(self, own: int) -> int:
        """Wait until all ranks have loaded; return how many KV blocks each has room for.

        Args:
            own: what this rank has room for.

        Raises:
            ConfigError: a rank refuses the settings.
            RankError: a rank is lost.
        """
        reports = self._await(Loaded, "loaded its part of the model")
        return min([own, *(each.num_blocks for each in reports if isinstance(each, Loaded))])

    def begin(self, begin: Begin) -> None:
        """Have all ranks get ready to run plans.

        Raises:
            RankError: a rank is lost.
        """
        self.send(encode(begin))

    def wait_until_ready(self) -> None:
        """Wait until all ranks can run plans.

        Raises:
            RankError: a rank is lost.
        """
        self._await(Ready, "got ready to run steps")
        self._is_ready = True
        if self.control is not None:
            self.control.is_loading = False

    def send(self, encoded: bytes) -> None:
        """Send a command to all ranks.

        Raises:
            RankError: a rank is lost.
        """
        try:
            for pipe in self.pipes:
                pipe.send(encoded)
        except RankError as exc:
            raise self.loss(exc) from exc

    def check(self) -> None:
        """Check that no rank has been found lost.

        Raises:
            PagewireError: one has; the same error as then.
        """
        if self._loss is not None:
            raise self._loss

    def stage(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        """Return memory that all ranks share, uint8; once only.

        Args:
            num_bytes: its size.
            device: rank 0's. On a GPU, the others map the memory of this one.

        Raises:
            ConfigError: it cannot be allocated.
            RankError: a rank is lost.
        """
        memory, command = allocate_shared(self.memory_fd, num_bytes, device)
        self.send(encode(command))
        return memory

    def has_news(self) -> bool:
        """Whether a rank reports something, or has ended; takes little time."""
        return self._end.alive and bool(self.pipes and self._poller.poll(0))

    def reports(self) -> list[tuple[int, Report]]:
        """Return what ranks have reported, and which rank each is of.

        Raises:
            ConfigError: a rank refuses the settings.
            RankError: a rank is lost.
        """
        due = {fd for fd, _event in self._poller.poll(0)}
        try:
            return [
                (pipe.rank, self._next_report(pipe, REPORT_S))
                for pipe in self.pipes
                if pipe.fileno() in due
            ]
        except RankError as exc:
            raise self.loss(exc) from exc

    def loss(self, missed: RankError) -> PagewireError:
        """End all ranks, and return the error that names the one because of which they end.

        Args:
            missed: says which rank this one has missed. If that rank has ended because it missed
                another one, the error names the other one.

        Returns:
            The same error in each call.
        """
        if self._loss is not None:
            return self._loss
        error: PagewireError = missed
        seen: set[int] = set()
        while isinstance(error, RankError) and error.rank and error.rank not in seen:
            seen.add(error.rank)
            error = self._reason(error.rank) or error
        self._loss = error
        _kill(self.processes)
        self._end()
        return error

    def close(self) -> None:
        """End the other ranks; when this returns, none is left."""
        if not self._is_ready:  # those that load would not notice
            _kill(self.processes)
        self._end()

    def _await(self, kind: type[Report], done: str) -> list[Report]:
        """Wait until each rank has sent a report of this kind, and return these.

        Args:
            kind: the type.
            done: what a rank has done then.
        """
        found = {rank: report for rank, report in self._early if isinstance(report, kind)}
        deadline = time.monotonic() + LOAD_S
        while len(found) < len(self.pipes):
            if not self._poller.poll(1000 * max(0.0, deadline - time.monotonic())):
                rank = next(pipe.rank for pipe in self.pipes if pipe.rank not in found)
                problem = f"rank {rank} has not {done} within {LOAD_S:g} s"
                raise self.loss(RankError(problem, rank))
            for rank, report in self.reports():
                if isinstance(report, kind):
                    found[rank] = report
        return list(found.values())

    def _next_report(self, pipe: RankPipe, timeout_s: float) -> Report:
        report = pipe.next_report(timeout_s)
        if isinstance(report, Failed):
            self._failures[pipe.rank] = report
            raise RankError(report.error, pipe.rank)
        return report

    def _reason(self, rank: int) -> PagewireError | None:
        """Return why a rank has failed or ended; None if it says nothing and has not ended."""
        pipe, process = self.pipes[rank - 1], self.processes[rank - 1]
        patience_s = EXIT_S
        try:
            while rank not in self._failures:
                self._next_report(pipe, REASON_S)
        except RankError as exc:
            if isinstance(exc.__cause__, TimeoutError):  # it is silent, but has not ended
                patience_s = REASON_S
        if (failure := self._failures.get(rank)) is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(patience_s)
                kind = BlamelessRankError if code == -signal.SIGKILL else RankError
                return kind(f"rank {rank} {_ended_by(code)}", rank)
            return None
        if failure.missing is not None:
            # That rank 0 answers again means that its process was stopped meanwhile.
            kind = RankError if failure.missing else BlamelessRankError
            return kind(failure.error, failure.missing)
        error = f"rank {rank}: {failure.error}"
        if failure.is_config:
            return ConfigError(error)
        return BlamelessRankError(error) if failure.is_blameless else RankError(error)


def start_ranks(settings: EngineSettings) -> RankGroup:
    """Start the other ranks of an engine, if there are any.

    Raises:
        ConfigError: this machine cannot start them, or the model cannot be found.
        RankError: one has ended.
    """
    count = settings.tensor_parallel_size
    if count == 1:
        return RankGroup()
    values = settings.model_dump(mode="json", include=set(EngineSettings.model_fields))
    # Rank 0 may have to fetch the model, at the revision that the settings name.
    model = resolve_model(settings.model, revision=settings.revision)
    values |= {"model": str(model), "revision": None}
    logs: tuple[str, LogForm, str] = ("warning", "text", "")
    patience_s = STEP_S
    if isinstance(settings, WorkerSettings):
        logs = (settings.log_level, settings.log_format, settings.worker_id)
        # Half of it, so that a rank is named before the step counts as hanging.
        patience_s = max(STEP_S, settings.step_timeout_s / 2)
    return RankGroup.start(Setup(count, patience_s, values, *logs))


def _start_process(
    rank: int, pipe: socket.socket, memory_fd: int, others: dict[int, socket.socket]
) -> subprocess.Popen[bytes]:
    """Start the process of a rank.

    Args:
        rank: its number.
        pipe: its end of the socket to rank 0.
        memory_fd: see `RankGroup`.
        others: its sockets to all other ranks, by rank.
    """
    fds = [pipe.fileno(), memory_fd, *(others[other].fileno() for other in sorted(others))]
    command = [sys.executable, "-P", "-m", PROGRAM, *map(str, (os.getpid(), rank, *fds))]
    # It inherits the mask, so that no signal ends it before it ignores them.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_SIGNALS)
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=fds)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    logger.info("rank %d is process %d", rank, process.pid)
    return process


def _ended_by(code: int) -> str:
    if code >= 0:
        return f"has ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:  # most of the real-time signals have no name
        return f"was killed by signal {-code}"


def _kill(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Kill processes, and wait until they have ended."""
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()


def _end(
    memory_fd: int,
    control: SocketCommunicator | None,
    pipes: Sequence[RankPipe],
    processes: Sequence[subprocess.Popen[bytes]],
    opened: contextlib.ExitStack,
) -> None:
    """Close the sockets, at whose end ranks end by themselves; kill those that do not."""
    if control is not None:
        control.close()
        os.close(memory_fd)
    for pipe in pipes:
        pipe.close()
    deadline = time.monotonic() + END_S
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    opened.close()
