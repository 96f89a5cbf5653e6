"""Reads bodies: small ones at once, larger ones in a thread, large ones in a process.

A request that brings its own chat template is read in a process, whatever its size. Owners take
turns in each of the three places.

Decoding, templates and lists of token ids hold Python's interpreter lock: a thread with a body of
13 MB would stall the event loop, and all streams, for a second.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial

import msgspec

from pagewire.services.router.http.api.openai.generation import GenerationInput, PromptInput
from pagewire.services.router.http.body_processes.body_messages import (
    BodyJob,
    BodyRefusal,
    BodyReply,
    too_costly,
    too_slow,
)
from pagewire.services.router.http.body_processes.body_process import read_body
from pagewire.services.router.http.body_processes.child_process import ChildPool, ChildProcess
from pagewire.services.router.http.body_processes.framing import receive_message
from pagewire.services.router.http.body_processes.owner_turns import Turns
from pagewire.services.router.text.served_model import ServedModel, UnboundedHereError
from pagewire.shared.base.errors import ChannelError, OverloadedError, RequestFailedError
from pagewire.shared.settings.config import RouterSettings

INLINE_BODY_BYTES = 8 << 10
THREAD_BODY_BYTES = 64 << 10  # holds the interpreter for a few milliseconds at most
THREADS = 2
PROCESSES = 2
WAIT_S = 120.0  # for a thread or process to come free, and to read
TIMEOUT_S = 60.0  # for each answer, and each part of a body to be taken

_PROGRAM = "pagewire.services.router.http.body_processes.body_process"
_NOT_ITS_OWN = {"cluster_secret", "redis_url", "responses_redis_url", "api_key", "api_key_file"}


class BodyReader:
    """Reads the bodies of one router. Processes start with the first body that needs them.

    Close it with `close`.

    Args:
        settings: the router's.
        model: that it serves.
        max_processes: returns how many processes may read bodies of one owner at once.
    """

    def __init__(
        self,
        settings: RouterSettings,
        model: ServedModel,
        max_processes: Callable[[], int] = lambda: PROCESSES,
    ) -> None:
        self._model = model
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="body")
        own = settings.model_dump(mode="json", exclude=_NOT_ITS_OWN)
        own |= {"model": str(model.path), "served_model_name": model.names}
        self._pool = ChildPool(_PROGRAM, own, PROCESSES, "large-body")
        self._here, self._in_threads = Turns(1), Turns(THREADS)
        self._in_processes = Turns(PROCESSES, max_processes)

    async def read_here(self, job: BodyJob, raw: bytes | bytearray, owner: str) -> GenerationInput:
        """Check and tokenize a body of up to `INLINE_BODY_BYTES`, one in each pass of the loop.

        It takes up to 6 ms, and there may be many at once: tokens are passed on in between.

        Raises:
            InvalidRequestError: the client's fault; names the field.
        """
        await self._here.begin(owner)
        try:
            await asyncio.sleep(0)
            with suppress(UnboundedHereError):
                return self._read(job, raw)
        finally:
            self._here.end(owner)
        return await self._read_by_process(job, raw, owner)

    async def read_elsewhere(
        self, job: BodyJob, raw: bytes | bytearray, owner: str
    ) -> GenerationInput:
        """Check and tokenize a larger body, off the event loop. Cancelling it in line ends it.

        Raises:
            InvalidRequestError: the client's fault; names the field, unless the whole body takes
                too much memory.
            OverloadedError: too many bodies were before it in line.
            RequestFailedError: the process that reads it ended, or takes too long.
        """
        if len(raw) <= THREAD_BODY_BYTES:
            read = partial(self._read, job, raw)
            with suppress(UnboundedHereError):
                return await self._run(self._in_threads, self._threads, read, owner)
        return await self._read_by_process(job, raw, owner)

    async def _read_by_process(
        self, job: BodyJob, raw: bytes | bytearray, owner: str
    ) -> GenerationInput:
        read = partial(self._read_in_process, job, raw)
        return await self._run(self._in_processes, self._pool.threads, read, owner)

    async def _run(
        self,
        turns: Turns,
        threads: ThreadPoolExecutor,
        read: Callable[[], GenerationInput],
        owner: str,
    ) -> GenerationInput:
        try:
            async with asyncio.timeout(WAIT_S):
                await turns.begin(owner)
                reading = asyncio.get_running_loop().run_in_executor(threads, read)
                # A thread cannot be interrupted, so the turn outlasts a request that is cancelled.
                reading.add_done_callback(partial(_end, turns, owner))
                return await asyncio.shield(reading)
        except TimeoutError as exc:
            raise OverloadedError(f"this large body was not read within {WAIT_S:g} s") from exc

    def _read(self, job: BodyJob, raw: bytes | bytearray) -> GenerationInput:
        return read_body(job.kind, raw, replace(self._model, max_model_len=job.max_model_len))

    def _read_in_process(self, job: BodyJob, raw: bytes | bytearray) -> GenerationInput:
        while True:
            try:
                process = self._pool.take(TIMEOUT_S)
            except OSError as exc:
                problem = f"a process that reads large bodies cannot be started: {exc.strerror}"
                raise RequestFailedError(problem) from exc
            was_idle = not process.is_new
            try:
                reply, prompts = _read_there(process, job, raw)
                break
            except (ChannelError, OSError, msgspec.DecodeError) as exc:
                is_closed = isinstance(exc, (ChannelError, ConnectionError))
                ended_by = process.killed_by() if is_closed else None
                self._pool.end(process)
                if ended_by == signal.SIGABRT:  # as libraries do that get no more memory
                    raise too_costly(len(raw)) from exc
                if ended_by == signal.SIGPROF:
                    raise too_slow() from exc
                if was_idle and is_closed:
                    continue  # an idle process may have ended
                problem = f"the process that reads large bodies failed: {exc}"
                raise RequestFailedError(problem) from exc
        self._pool.keep(process, reply.memory_bytes)
        if isinstance(reply.result, BodyRefusal):
            raise reply.result.error()
        return msgspec.structs.replace(reply.result, prompts=prompts)

    def close(self) -> None:
        """End all threads and processes, whatever they read."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._pool.close()


def _read_there(
    process: ChildProcess, job: BodyJob, raw: bytes | bytearray
) -> tuple[BodyReply, tuple[PromptInput, ...]]:
    """Return what a process answers, and the request's prompts.

    Raises:
        ChannelError: the process has ended.
        OSError: it has, or takes too long.
        msgspec.DecodeError: its answer is not one.
    """
    process.send(job)
    process.connection.sendall(raw)
    reply = receive_message(process.connection, BodyReply)
    prompts = [receive_message(process.connection, PromptInput) for _ in range(reply.num_prompts)]
    return reply, tuple(prompts)


def _end(turns: Turns, owner: str, reading: asyncio.Future[GenerationInput]) -> None:
    """End a turn, also that of a client that has left: nobody else wants its error."""
    turns.end(owner)
    if not reading.cancelled():
        reading.exception()
