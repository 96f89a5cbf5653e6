"""A worker's engine, as the service around it sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pagewire.shared.engine.core import EngineCore
from pagewire.shared.engine.executor import BlockMoves, StepHook
from pagewire.shared.engine.thread import Command, EngineThread
from pagewire.shared.kv_cache.parts import BlockParts
from pagewire.shared.protocol import BlockLayout


@dataclass(frozen=True, slots=True)
class EngineHandle:
    """What a service needs to give the engine work and to hear from it.

    Attributes:
        core: to be used in the engine's thread alone.
        moves: of its KV blocks, likewise.
        thread: runs it.
        layout: of its blocks.
        vocab_size: token ids are below it.
        eos_token_ids: of the model.
        in_loop: wraps a callback so that it may be called from any thread and runs in the event
            loop.
    """

    core: EngineCore
    moves: BlockMoves
    thread: EngineThread
    layout: BlockLayout
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    in_loop: Callable[[Callable[..., None]], Callable[..., None]]

    @property
    def parts(self) -> BlockParts:
        """How a block is divided."""
        return BlockParts.of_layout(self.layout)

    def add_hook(self, hook: StepHook) -> None:
        """Have something done between steps. To be called before the engine runs."""
        self.core.hooks.append(hook)

    def submit(self, command: Command, *, admitted: bool = False) -> None:
        """Have a command run in the engine's thread; see `EngineThread.submit`.

        Raises:
            OverloadedError: the engine does not keep up; never for admitted work.
        """
        self.thread.submit(command, admitted=admitted)
