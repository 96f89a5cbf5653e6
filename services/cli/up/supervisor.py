"""Keeps a set of child processes running until it is stopped.

A child that dies is reported with its last lines and started again, after a delay that doubles
with each failure in a row. A child that refuses its configuration (exit code 2), or that keeps
dying before the cluster was ever ready, ends everything instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from pagewire.services.cli.up.log_lines import message_of, what_explains
from pagewire.services.cli.up.processes import TAIL_LINES, Child, ChildSpec, ExitStatus, OutputLog
from pagewire.shared.base.aio import end_task
from pagewire.shared.base.errors import ConfigError, PagewireError

EXIT_CONFIG = 2
RESTARTS = "PAGEWIRE_RESTARTS"
PHASES = 3
DRAINING = "draining: "  # a service's line with what it waits for begins with this
STARTING_GRACE_S = 10.0
CUT_S = 7.0  # for a router to end its streams with an error, which takes 5 s
REPORTED_LINES = 10


class ClusterStartError(PagewireError):
    """A child keeps dying before the cluster was ever ready."""


@dataclass(frozen=True)
class RestartPolicy:
    """When a dead child is started again, in seconds.

    Attributes:
        first_delay_s: before the first restart; doubles with each failure in a row.
        max_delay_s: upper bound of the delay.
        front_max_delay_s: upper bound for a child that requests come through. Without any no
            request is answered, and it starts in a second or two, so that it is tried more often.
            A worker's requests continue elsewhere or wait, and its start costs much more.
        front_served_delay_s: upper bound if such a child was ready, so that it can start.
        stable_s: a child that lived this long has none of its failures counted.
        start_attempts: tries that a child has before the cluster is ready.
    """

    first_delay_s: float = 0.5
    max_delay_s: float = 30.0
    front_max_delay_s: float = 5.0
    front_served_delay_s: float = 1.0
    stable_s: float = 60.0
    start_attempts: int = 3

    def delay(self, failures: int, *, is_front: bool = False, served: bool = False) -> float:
        """Return the pause after n failures in a row.

        Args:
            failures: at least one.
            is_front: requests come through the child.
            served: it was ready before it died.
        """
        longest = self.max_delay_s
        if is_front:
            longest = self.front_served_delay_s if served else self.front_max_delay_s
        return float(min(longest, self.first_delay_s * 2 ** min(failures - 1, 32)))


class State(Enum):
    """The state of a child process, as the progress display names it."""

    STARTING = "starting"
    LOADING = "loading"
    READY = "ready"
    RESTARTING = "restarting"
    STOPPED = "stopped"


class ChildStatus:
    """A child as the display and the reports see it."""

    def __init__(self, spec: ChildSpec, log: OutputLog) -> None:
        self.spec = spec
        self.log = log
        self.state = State.STARTING
        self.since = time.monotonic()
        self.failures = self.restarts = 0
        self.was_ready = False
        self.pid: int | None = None
        self.epoch: int | None = None
        self.dead_epoch: int | None = None

    @property
    def name(self) -> str:
        """The child's name, as its process and log file have it."""
        return self.spec.name

    @property
    def numbered_spec(self) -> ChildSpec:
        """How to run it, with how often it has been restarted, for its metrics."""
        return replace(self.spec, env={**self.spec.env, RESTARTS: str(self.restarts)})

    def enter(self, state: State) -> None:
        """Change to a state; the start time stays if the child is in it already."""
        if state is not self.state:
            self.state, self.since = state, time.monotonic()

    def saw_output(self) -> None:
        """Record that the child has written something, so its program runs."""
        if self.state is State.STARTING:
            self.enter(State.LOADING)


class Supervisor:
    """Owns the children; leaving its context stops all of them.

    Args:
        log_dir: of the children's output.
        say: prints a line for the user.
        policy: when a dead child is started again.
        echo: gets each child's name and its lines.
        grace_s: for a child that is ready to end by itself, longer than it takes for that.

    Attributes:
        failure: resolves to the error that makes it pointless to go on.
    """

    def __init__(
        self,
        log_dir: Path,
        say: Callable[[str], None],
        policy: RestartPolicy | None = None,
        echo: Callable[[str, str], None] | None = None,
        grace_s: float = 10.0,
    ) -> None:
        self._log_dir = log_dir
        self._say = say
        self._policy = policy or RestartPolicy()
        self._echo = echo
        self._grace_s = grace_s
        self._cluster_was_ready = False
        self._stop = [asyncio.Event() for _ in range(PHASES)]  # by spec.stop_phase
        self._hurry = asyncio.Event()
        self._statuses: dict[str, ChildStatus] = {}
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self.failure: asyncio.Future[PagewireError] = asyncio.get_running_loop().create_future()

    async def __aenter__(self) -> Supervisor:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()

    @property
    def statuses(self) -> list[ChildStatus]:
        """All children in the order of their start."""
        return list(self._statuses.values())

    @property
    def all_ready(self) -> bool:
        """Whether every child does its work, as far as is known."""
        return all(status.state is State.READY for status in self._statuses.values())

    def start(self, spec: ChildSpec) -> None:
        """Start a child and keep it running."""
        status = self._statuses[spec.name] = ChildStatus(spec, self._open_log(spec))
        self._keepers[spec.name] = asyncio.create_task(self._keep(status), name=spec.name)

    def mark_ready(self, epochs: Mapping[str, int | None]) -> None:
        """Record the children that have become ready; the others keep their state.

        Args:
            epochs: of those children, by name. A child that died is not ready before its epoch
                is another one: the old one's record stays valid for some seconds.
        """
        for status in self._statuses.values():
            epoch = epochs.get(status.name)
            known = status.name in epochs and (epoch is None or epoch != status.dead_epoch)
            if known and status.pid is not None and status.state is not State.READY:
                if status.was_ready:
                    self._say(f"{status.name} is ready again")
                status.was_ready, status.epoch = True, epoch
                status.enter(State.READY)

    def mark_cluster_ready(self) -> None:
        """From here on a dying child no longer ends everything."""
        self._cluster_was_ready = True

    def spec(self, name: str) -> ChildSpec:
        """Return how a child is run."""
        return self._statuses[name].spec

    def replace(self, spec: ChildSpec) -> None:
        """Change how the child of that name is run, from its next start on."""
        self._statuses[spec.name].spec = spec

    def end_grace_period(self) -> None:
        """End the grace period of children that are stopping."""
        self._hurry.set()

    async def stop(self) -> None:
        """Stop all children, phase after phase; when it returns none is left."""
        for phase, stop in enumerate(self._stop):
            stop.set()
            keepers = [
                keeper
                for name, keeper in self._keepers.items()
                if self._statuses[name].spec.stop_phase == phase
            ]
            await asyncio.gather(*keepers)
        for status in self._statuses.values():
            status.log.close()

    def _open_log(self, spec: ChildSpec) -> OutputLog:
        def on_line(line: str) -> None:
            self._statuses[spec.name].saw_output()
            if self._echo is not None:
                self._echo(spec.name, line)
            elif DRAINING in line and self._stop[spec.stop_phase].is_set():
                self._say(f"{spec.name}: {message_of(line).partition(DRAINING)[2]}")

        return OutputLog(self._log_dir / f"{spec.name}.log", on_line)

    async def _keep(self, status: ChildStatus) -> None:
        stop = self._stop[status.spec.stop_phase]
        while not stop.is_set():
            status.log.clear_tail()
            status.enter(State.STARTING)
            started = time.monotonic()
            try:
                child = await Child.spawn(status.numbered_spec, status.log)
            except OSError as exc:
                self._fail(ClusterStartError(f"cannot start {status.name}: {exc.strerror}"))
                return
            status.pid = child.pid
            ended = await self._wait_or_stop(status, child, stop)
            status.pid, status.dead_epoch = None, status.epoch
            if not stop.is_set() and not await self._restart_delay(status, ended, started, stop):
                return
            status.restarts += 1
        status.enter(State.STOPPED)

    async def _wait_or_stop(
        self, status: ChildStatus, child: Child, stop: asyncio.Event
    ) -> ExitStatus:
        """Wait for the child's own end, or bring it about."""
        await _first_of(child.ended, stop)
        if not child.ended.done():
            child.terminate()
            # One that still loads has no requests, and may take minutes to notice the signal.
            grace_s = self._grace_s if status.state is State.READY else STARTING_GRACE_S
            await _first_of(child.ended, self._hurry, min(grace_s, self._grace_s))
            if status.spec.is_front and not child.ended.done():
                child.terminate()  # the second time: its streams end with an error
                await asyncio.wait({child.ended}, timeout=CUT_S)
            child.kill()
        return await child.ended

    async def _restart_delay(
        self, status: ChildStatus, ended: ExitStatus, started: float, stop: asyncio.Event
    ) -> bool:
        """Report a death and wait for the delay; False if the child is not to be restarted."""
        if time.monotonic() - started >= self._policy.stable_s:
            status.failures = 0
        status.failures += 1
        served = status.state is State.READY
        status.enter(State.RESTARTING)
        if self._is_starting(status) and ended.code == EXIT_CONFIG:
            self._fail(ConfigError(f"{status.name}: {refusal_in(status.log.tail(REPORTED_LINES))}"))
            return False
        self._say(_report(status, ended, time.monotonic() - started))
        if self._is_starting(status) and status.failures >= self._policy.start_attempts:
            self._fail(ClusterStartError(f"giving up: {status.name} does not start"))
            return False
        delay = self._policy.delay(status.failures, is_front=status.spec.is_front, served=served)
        self._say(f"starting {status.name} again in {delay:g} s")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay):
                await stop.wait()
        return True

    def _is_starting(self, status: ChildStatus) -> bool:
        return not (self._cluster_was_ready or status.was_ready)

    def _fail(self, error: PagewireError) -> None:
        if not self.failure.done():
            self.failure.set_result(error)


def _report(status: ChildStatus, ended: ExitStatus, lived_s: float) -> str:
    """Return what explains a child's end: its exit code or signal, and what it wrote last."""
    verb = "died" if ended.code else "ended"
    head = f"{status.name} {verb}: {ended}; it had run for {lived_s:.1f} s"
    if not (lines := what_explains(status.log.tail(TAIL_LINES), REPORTED_LINES)):
        return f"{head} and written nothing ({status.log.path})"
    return "\n".join([f"{head}; its last lines ({status.log.path}):", *[f"  {x}" for x in lines]])


def refusal_in(lines: list[str]) -> str:
    """Return why a service refuses its configuration, by the last lines that it printed."""
    prefix = "pagewire: "
    own = [line.removeprefix(prefix) for line in lines if line.startswith(prefix)]
    last = [line.removeprefix("Error: ") for line in lines[-1:]]  # so a wrong option is reported
    reasons = (own[-1:], last, ["it refuses its configuration"])
    return next(text for texts in reasons for text in texts if text)


async def _first_of(
    ended: asyncio.Task[ExitStatus], event: asyncio.Event, timeout: float | None = None
) -> None:
    """Wait until a child has ended, an event is set, or the time is over."""
    waiting = asyncio.create_task(event.wait())
    try:
        await asyncio.wait({ended, waiting}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await end_task(waiting)
