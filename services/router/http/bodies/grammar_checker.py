"""Tries each grammar once, in a child process, before a request with it is dispatched."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections import OrderedDict

import msgspec

from pagewire.services.router.http.bodies.child_process import SHUTS_DOWN, ChildPool, ChildProcess
from pagewire.services.router.http.bodies.grammar_process import Ready, Verdict
from pagewire.services.router.http.bodies.framing import receive_message
from pagewire.services.router.text.served_model import ServedModel
from pagewire.shared.errors import (
    ChannelError,
    InvalidRequestError,
    OverloadedError,
    RequestFailedError,
)

PROCESSES = 2
START_TIMEOUT_S = 60.0  # of a process: the interpreter, and the vocabulary
TIMEOUT_S = 5.0  # of a grammar, by the clock: a backstop
VERDICT_WAIT_S = 30.0  # of one request, with the grammars before its own
TRIES = 3
MAX_WAITING = 256
MAX_KNOWN_CHARS = 16 << 20

_NOT_BY_ITSELF = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_PROGRAM = "pagewire.services.router.http.bodies.grammar_process"
_ENDED = "the grammar is nested too deeply, or too large, to be compiled"
_TOO_LONG = f"the grammar takes longer than {TIMEOUT_S:g} s to compile"


class _KilledError(Exception):
    """The process was killed by an operator, or by the kernel because of low memory."""


class _NoVocabularyError(Exception):
    """No grammar can be tried with this model."""


class GrammarChecker:
    """Checks grammars. Its processes start with the first grammar that is not known yet.

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
        self._trying: dict[str, asyncio.Task[str | None]] = {}

    async def check(self, text: str, field: str) -> None:
        """Check a grammar text.

        Args:
            text: of the grammar.
            field: the request's field that it comes from.

        Raises:
            InvalidRequestError: it is wrong, or costs too much; names the field.
            OverloadedError: too many others wait to be tried, or it waits for too long.
            RequestFailedError: no process can try it, or the router shuts down.
        """
        if self.pool.is_closed:
            raise RequestFailedError(SHUTS_DOWN)
        if text in self._known:
            self._known.move_to_end(text)
            problem = self._known[text]
        else:
            task = self._trying.get(text)
            if task is None:
                if len(self._trying) >= MAX_WAITING:
                    raise OverloadedError("too many grammars wait to be tried")
                task = self._trying[text] = asyncio.create_task(self._learn(text))
                task.add_done_callback(_retrieve)
            try:
                problem = await asyncio.wait_for(asyncio.shield(task), VERDICT_WAIT_S)
            except TimeoutError:
                raise OverloadedError("the grammar waits too long to be tried") from None
        if problem is not None:
            raise InvalidRequestError(f"{field}: {problem}", field)

    async def _learn(self, text: str) -> str | None:
        """Try a grammar and remember the result."""
        try:
            if self.pool.is_closed:
                raise RequestFailedError(SHUTS_DOWN)
            loop = asyncio.get_running_loop()
            problem, is_final = await loop.run_in_executor(self.pool.threads, self._try, text)
        except asyncio.CancelledError:
            if self.pool.is_closed:  # it waited for a thread
                raise RequestFailedError(SHUTS_DOWN) from None
            raise
        finally:
            del self._trying[text]
        if is_final:
            self._known[text] = problem
            self._known_chars += len(text)
            while self._known_chars > MAX_KNOWN_CHARS:
                oldest, _ = self._known.popitem(last=False)
                self._known_chars -= len(oldest)
        return problem

    def _try(self, text: str) -> tuple[str | None, bool]:
        """Return what is wrong with a grammar, and whether another attempt would find the same.

        If the process was killed, that does not depend on the grammar: another process tries it.
        """
        for _ in range(TRIES):
            with contextlib.suppress(_KilledError):
                return self._try_once(text)
        raise RequestFailedError("the processes that try grammars are killed")

    def _try_once(self, text: str) -> tuple[str | None, bool]:
        try:
            process = self.pool.take(START_TIMEOUT_S)
        except OSError as exc:
            raise _cannot_try(exc) from exc
        memory_bytes: int | None = None
        try:
            if process.is_new:
                self._begin(process)
            process.send(text)
            verdict = receive_message(process.connection, Verdict)
            memory_bytes = verdict.memory_bytes
        except _NoVocabularyError as exc:
            return str(exc), False
        except TimeoutError:
            return _TOO_LONG, False
        except (ChannelError, OSError, msgspec.DecodeError) as exc:
            if self.pool.is_closed:
                raise _cannot_try(exc) from exc
            if process.killed_by() in _NOT_BY_ITSELF:
                raise _KilledError from exc
            return _ENDED, True
        finally:
            if memory_bytes is None:
                self.pool.end(process)
            else:
                self.pool.keep(process, memory_bytes)
        return verdict.problem, True

    def _begin(self, process: ChildProcess) -> None:
        """Wait until a new process can try grammars."""
        try:
            process.send_settings()
            if (problem := receive_message(process.connection, Ready).problem) is not None:
                raise _NoVocabularyError(problem)
            process.connection.settimeout(TIMEOUT_S)
        except (ChannelError, OSError, msgspec.DecodeError) as exc:
            is_late = isinstance(exc, TimeoutError)
            if not (is_late or self.pool.is_closed) and process.killed_by() in _NOT_BY_ITSELF:
                raise _KilledError from exc
            raise _cannot_try(exc) from exc

    def close(self) -> None:
        """End all threads and processes, busy ones included."""
        self.pool.close()


def _cannot_try(exc: Exception) -> RequestFailedError:
    return RequestFailedError(f"no process can try a grammar: {exc}")


def _retrieve(task: asyncio.Task[str | None]) -> None:
    """Take a result that nobody may wait for any more, so that asyncio does not complain."""
    if not task.cancelled():
        task.exception()
