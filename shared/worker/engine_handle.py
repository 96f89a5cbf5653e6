"""What a service may use of its worker's engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar, cast

from pagewire.shared.base.errors import PagewireError, TransferError, TransferTimeoutError
from pagewire.shared.engine.core import EngineCore
from pagewire.shared.engine.thread import Command, EngineThread
from pagewire.shared.kv.kv_layout import KvLayout
from pagewire.shared.kv.model_identity import ModelIdentity

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EngineHandle:
    """What a service needs to give the engine work and to get its results.

    Attributes:
        core: the engine; use it only in the engine's thread.
        thread: the thread that runs it.
        model_identity: what its blocks depend on.
        layout: layout of its blocks.
        vocab_size: token ids are below it.
        eos_token_ids: the model's end-of-sequence tokens.
        in_loop: wraps a callback so that it may be called from any thread and runs in the event
            loop.
    """

    core: EngineCore
    thread: EngineThread
    model_identity: ModelIdentity
    layout: KvLayout
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    in_loop: Callable[[Callable[..., None]], Callable[..., None]]

    def submit(self, command: Command, *, admitted: bool = False) -> None:
        """Have a command run in the engine's thread; see `EngineThread.submit`.

        Raises:
            OverloadedError: the engine does not keep up; never for admitted work.
        """
        self.thread.submit(command, admitted=admitted)

    async def call(self, work: Callable[[EngineCore], T], timeout_s: float) -> T:
        """Have something done in the engine's thread, and return its result.

        Raises:
            OverloadedError: the engine does not keep up.
            TransferTimeoutError: the engine did not do it in time; it may still do it later.
            PagewireError: raised by the work.
            TransferError: the work raised anything else, which the log has.
        """
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def settle(result: T | None, error: PagewireError | None) -> None:
            if done.done():
                return
            if error is None:
                done.set_result(cast("T", result))
            else:
                done.set_exception(error)

        def run(core: EngineCore) -> None:
            try:
                result = work(core)
            except PagewireError as exc:
                self.in_loop(settle)(None, exc)
            except Exception as exc:  # of a device, a library, or the system
                logger.exception("a call from the event loop failed in the engine's thread")
                self.in_loop(settle)(None, TransferError(f"{type(exc).__name__}: {exc}"))
            else:
                self.in_loop(settle)(result, None)

        self.submit(run)
        try:
            async with asyncio.timeout(timeout_s):
                return await done
        except TimeoutError as exc:
            raise TransferTimeoutError(f"the engine is busy: no answer in {timeout_s:g} s") from exc


@dataclass(slots=True, eq=False)
class EngineResource(Generic[T]):
    """Something that the event loop has the engine's thread open and close.

    Attributes:
        engine: its thread opens and closes it.
        release: closes it; ignores what is closed already.
        value: it; None until it is open. Set in the engine's thread.
    """

    engine: EngineHandle
    release: Callable[[T], None]
    value: T | None = field(default=None, init=False)

    async def open(self, make: Callable[[], T], timeout_s: float) -> T:
        """Have the engine's thread open the resource; return it.

        Args:
            make: opens it.
            timeout_s: see `EngineHandle.call`.

        Raises:
            PagewireError: see `EngineHandle.call`.
        """

        def run(_core: EngineCore) -> T:
            # Set in the engine's thread: `close` finds it there, even if this call timed out.
            self.value = make()
            return self.value

        return await self.engine.call(run, timeout_s)

    def close(self) -> None:
        """Close it, even if `open` timed out and the engine's thread has not opened it yet."""

        def run(_core: EngineCore) -> None:
            if self.value is not None:
                self.release(self.value)

        self.engine.submit(run, admitted=True)
