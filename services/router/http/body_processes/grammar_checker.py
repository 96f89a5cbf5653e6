"""Tries each grammar once, in a child process, before a request with it is dispatched."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections import Counter, OrderedDict
from dataclasses import dataclass, field

import msgspec

from pagewire.services.router.http.body_processes.child_process import (
    SHUTS_DOWN,
    ChildPool,
    ChildProcess,
)
from pagewire.services.router.http.body_processes.framing import receive_message
from pagewire.services.router.http.body_processes.grammar_process import (
    GrammarProcessReady,
    GrammarVerdict,
)
from pagewire.services.router.text.served_model import ServedModel
from pagewire.shared.base.aio import start_task
from pagewire.shared.base.errors import (
    BusyError,
    ChannelError,
    InvalidRequestError,
    RequestFailedError,
)
from pagewire.shared.base.fair_queue import FairQueue
from pagewire.shared.grammar.limits import MAX_COMPILE_S, MAX_FOLLOW_S

PROCESSES = 2
START_TIMEOUT_S = 60.0  # for a process to start Python and load the vocabulary
# Limit of one grammar by the clock. Its CPU time ends far earlier, unless the machine is busy.
TIMEOUT_S = 15.0
VERDICT_WAIT_S = 30.0  # for one request, with the grammars that wait before its own
TRIES = 3
MAX_WAITING = 1024
MAX_WAITING_EACH = 256  # grammars of one owner that may wait
MAX_KNOWN_CHARS = 16 << 20

_NOT_BY_ITSELF = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_PROGRAM = "pagewire.services.router.http.body_processes.grammar_process"
_ENDED = "the grammar is nested too deeply, or too large, to be compiled"
_TOO_COSTLY = (
    f"the grammar takes more than {MAX_COMPILE_S:g} s of CPU time to compile, or {MAX_FOLLOW_S:g} "
    "s to follow: make it smaller, with fewer alternatives and lower counts and multiples"
)
_NOT_IN_TIME = "the grammar was not tried in time"


class _KilledError(Exception):
    """The process was killed by an operator, or by the kernel because of low memory."""


@dataclass(slots=True, eq=False)
class _Trial:
    """A grammar that is tried, or waits for that.

    Attributes:
        verdict: what is wrong with the grammar, None if nothing is.
        waiting: how many requests wait for the verdict, by their owner.
        is_running: it does not wait in line any more.
        is_given_up: it was ended before its verdict.
        process: the one that tries it now.
    """

    text: str
    verdict: asyncio.Future[str | None]
    waiting: Counter[str] = field(default_factory=Counter)
    is_running: bool = False
    is_given_up: bool = False
    process: ChildProcess | None = None

    def give_up(self) -> None:
        """End the trial. If its process has just turned to another grammar, that is tried again."""
        self.is_given_up = True
        if self.process is not None:
            self.process.kill()

    def use(self, process: ChildProcess) -> None:
        """Let the trial's end be that of a process; called in a thread."""
        self.process = process
        if self.is_given_up:
            process.kill()


class GrammarChecker:
    """Checks grammars. Its processes start with the first grammar that is not known yet.

    Requests belong to owners, who take turns. A grammar waits in the line of each owner that has a
    request with it. If all of these requests leave, so does the grammar. If it is being tried, it
    goes on, so that whoever asks again gets the verdict, but it is given up as soon as another
    grammar waits for its turn.

    Close it with `close`.

    Attributes:
        pool: of its processes.
    """

    def __init__(self, model: ServedModel) -> None:
        settings = {
            "model": str(model.path),
            "vocab_size": model.vocab_size,
            "eos_token_ids": model.eos_token_ids,
        }
        self.pool = ChildPool(_PROGRAM, settings, PROCESSES, "grammar")
        self._known: OrderedDict[str, str | None] = OrderedDict()  # text -> what is wrong
        self._known_chars = 0
        self._trials: dict[str, _Trial] = {}
        self._line: FairQueue[str, _Trial] = FairQueue(MAX_WAITING, MAX_WAITING_EACH)
        self._running: dict[asyncio.Task[None], _Trial] = {}

    async def check(self, text: str, field: str, owner: str) -> None:
        """Check a grammar text. Cancelling it takes the grammar out of the owner's line.

        Args:
            text: of the grammar.
            field: the request's field that it comes from.
            owner: who sent the request.

        Raises:
            InvalidRequestError: it is wrong, or costs too much; names the field.
            OverloadedError: too many others wait to be tried.
            BusyError: it is not tried in time, because of others or of a busy machine.
            RequestFailedError: no process can try it, or the router shuts down.
        """
        if self.pool.is_closed:
            raise RequestFailedError(SHUTS_DOWN)
        if text in self._known:
            self._known.move_to_end(text)
            problem = self._known[text]
        else:
            problem = await self._learn(text, owner)
        if problem is not None:
            raise InvalidRequestError(f"{field}: {problem}", field)

    async def _learn(self, text: str, owner: str) -> str | None:
        """Wait until a grammar has been tried; return what is wrong with it."""
        trial = self._trials.get(text)
        if trial is None:
            trial = _Trial(text, asyncio.get_running_loop().create_future())
            trial.verdict.add_done_callback(_retrieve)
        if not trial.is_running:
            self._line.push(owner, trial)
        self._trials[text] = trial
        trial.waiting[owner] += 1
        try:
            self._begin_trials()
            done, _ = await asyncio.wait([trial.verdict], timeout=VERDICT_WAIT_S)
            if not done:
                raise BusyError(_NOT_IN_TIME)
            return trial.verdict.result()
        finally:
            self._leave(trial, owner)

    def _leave(self, trial: _Trial, owner: str) -> None:
        """Let a request go, and with it a grammar that nobody waits for and that is not tried."""
        trial.waiting[owner] -= 1
        if trial.waiting[owner]:
            return
        del trial.waiting[owner]
        self._line.remove(owner, trial)
        if trial.is_running:
            self._begin_trials()
        elif not trial.waiting:
            del self._trials[trial.text]

    def _begin_trials(self) -> None:
        """Begin the trials whose turn it is; let one that nobody waits for give way to others."""
        if self.pool.is_closed:
            return
        while len(self._running) < PROCESSES and (turn := self._line.pop()) is not None:
            owner, trial = turn
            trial.is_running = True
            for other in trial.waiting:
                self._line.remove(other, trial)
            task = start_task(self._run(trial, owner), "trial of a grammar")
            self._running[task] = trial
            task.add_done_callback(self._end_trial)
        if len(self._line):
            for trial in self._running.values():
                if not (trial.waiting or trial.is_given_up or trial.verdict.done()):
                    trial.give_up()
                    self._trials.pop(trial.text, None)

    async def _run(self, trial: _Trial, owner: str) -> None:
        """Try a grammar and remember the result, in a turn of its owner."""
        text, loop = trial.text, asyncio.get_running_loop()
        try:
            problem, is_final = await loop.run_in_executor(self.pool.threads, self._try, trial)
            if is_final:
                self._remember(text, problem)
            trial.verdict.set_result(problem)
        except Exception as exc:  # noqa: BLE001 raised again by the future
            trial.verdict.set_exception(exc)
        finally:
            if self._trials.get(text) is trial:
                del self._trials[text]
            self._line.end_turn(owner)

    def _end_trial(self, task: asyncio.Task[None]) -> None:
        del self._running[task]
        self._begin_trials()

    def _remember(self, text: str, problem: str | None) -> None:
        self._known[text] = problem
        self._known_chars += len(text)
        while self._known_chars > MAX_KNOWN_CHARS:
            oldest, _ = self._known.popitem(last=False)
            self._known_chars -= len(oldest)

    def _try(self, trial: _Trial) -> tuple[str | None, bool]:
        """Return what is wrong with a grammar, and whether another attempt would find the same.

        If the process was killed, that does not depend on the grammar: another process tries it.
        """
        for _ in range(TRIES):
            with contextlib.suppress(_KilledError):
                return self._try_once(trial)
            if trial.is_given_up:
                raise BusyError(_NOT_IN_TIME)
        raise RequestFailedError("the processes that try grammars were killed")

    def _try_once(self, trial: _Trial) -> tuple[str | None, bool]:
        try:
            process = self.pool.take(START_TIMEOUT_S)
        except OSError as exc:
            raise _cannot_try(exc) from exc
        memory_bytes: int | None = None
        trial.use(process)
        try:
            if process.is_new and (problem := self._begin(process)) is not None:
                return problem, False
            process.connection.settimeout(TIMEOUT_S)
            process.send(trial.text)
            verdict = receive_message(process.connection, GrammarVerdict)
            memory_bytes = verdict.memory_bytes
        except TimeoutError as exc:
            raise BusyError(_NOT_IN_TIME) from exc
        except (ChannelError, OSError, msgspec.DecodeError) as exc:
            if self.pool.is_closed:
                raise _cannot_try(exc) from exc
            return self._reason_of_end(process), True
        finally:
            trial.process = None
            if memory_bytes is None:
                self.pool.end(process)
            else:
                self.pool.keep(process, memory_bytes)
        return verdict.problem, True

    def _reason_of_end(self, process: ChildProcess) -> str:
        """Return what is wrong with a grammar whose process has ended."""
        by = process.killed_by()
        if by in _NOT_BY_ITSELF:
            raise _KilledError
        return _TOO_COSTLY if by == signal.SIGPROF else _ENDED

    def _begin(self, process: ChildProcess) -> str | None:
        """Wait until a new process can try grammars; return why it cannot with this vocabulary."""
        try:
            process.send_settings()
            return receive_message(process.connection, GrammarProcessReady).problem
        except TimeoutError as exc:
            raise BusyError(_NOT_IN_TIME) from exc
        except (ChannelError, OSError, msgspec.DecodeError) as exc:
            if not self.pool.is_closed and process.killed_by() in _NOT_BY_ITSELF:
                raise _KilledError from exc
            raise _cannot_try(exc) from exc

    def close(self) -> None:
        """End all threads and processes, busy ones included."""
        self.pool.close()
        for task in self._running:
            task.cancel()  # its thread ends with its process
        for trial in self._trials.values():
            if not trial.verdict.done():
                trial.verdict.set_exception(RequestFailedError(SHUTS_DOWN))


def _cannot_try(exc: Exception) -> RequestFailedError:
    return RequestFailedError(f"no process can try a grammar: {exc}")


def _retrieve(verdict: asyncio.Future[str | None]) -> None:
    """Take a verdict that nobody may wait for any more, so that asyncio does not complain."""
    if not verdict.cancelled():
        verdict.exception()
