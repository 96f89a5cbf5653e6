"""An executor in another process: plans go there over a pipe, results come back."""

from __future__ import annotations

import select
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import msgspec

from pagewire import LLM
from pagewire.shared.engine.execution.executor import PendingStep
from pagewire.shared.engine.scheduling.schedule import SchedulerLimits
from pagewire.shared.engine.scheduling.sequence import Sequence
from pagewire.shared.engine.scheduling.step import StepPlan, StepResult, Supply
from pagewire.shared.kv.kv_layout import KvLayout

REPLY_S = 60.0
_LENGTH = struct.Struct("<I")


class NewDevice(msgspec.Struct, tag=True):
    """Begin with a fresh fake device."""

    limits: SchedulerLimits
    num_blocks: int
    layout: KvLayout


class NewModel(msgspec.Struct, tag=True):
    """Begin with the demo model; the settings are those of `LLM`."""

    settings: dict[str, Any]


class Put(msgspec.Struct, tag=True):
    """Write the KV of tokens from a position on, as a transfer from another worker does."""

    block_ids: list[int]
    first: int
    token_ids: list[int]


class Fail(msgspec.Struct, tag=True):
    """Let the fake device's next step fail."""

    where: str
    message: str


class Look(msgspec.Struct, tag=True):
    """Read the fake device's records."""


class Done(msgspec.Struct, tag=True):
    """The command succeeded."""


class Seen(msgspec.Struct, tag=True):
    """The values of the fake device's fields with these names."""

    cells: list[list[int | None]]
    batches: list[tuple[int, int]]
    num_decode_rows: int
    longest_table: int


class Failed(msgspec.Struct, tag=True):
    """The step or command failed."""

    error: str


class Sampled(msgspec.Struct, tag=True):
    """A step's result."""

    result: StepResult


Command = StepPlan | Supply | NewDevice | NewModel | Put | Fail | Look
Reply = Sampled | Done | Seen | Failed


def write_frame(stream: IO[bytes], message: object) -> None:
    data = msgspec.msgpack.encode(message)
    stream.write(_LENGTH.pack(len(data)) + data)
    stream.flush()


def read_frame(stream: IO[bytes]) -> bytes:
    """Return the next message; empty at the end."""
    head = _read(stream, _LENGTH.size)
    return _read(stream, _LENGTH.unpack(head)[0]) if head else b""


def _read(stream: IO[bytes], size: int) -> bytes:
    data = b""
    while len(data) < size and (more := stream.read(size - len(data))):
        data += more
    return data if len(data) == size else b""


class Pending:
    """A command, and its reply once that has come."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe
        self.reply: Reply | None = None

    def is_done(self) -> bool:
        self._pipe.read_replies(wait_for=None)
        return self.reply is not None

    def wait(self) -> StepResult:
        self._pipe.read_replies(wait_for=self)
        if isinstance(self.reply, Failed):
            raise RuntimeError(self.reply.error)
        assert isinstance(self.reply, Sampled)
        return self.reply.result


class Pipe:
    """The pipe: each command gets one reply, in order; a plan that awaits a supply, after that."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._to, self._from = process.stdin, process.stdout
        self._due: list[Pending] = []
        self._lock = threading.RLock()  # a test reads while the engine's thread runs

    def supply(self, supply: Supply) -> None:
        with self._lock:
            write_frame(self._to, supply)

    def send(self, command: Command) -> Pending:
        pending = Pending(self)
        with self._lock:
            write_frame(self._to, command)
            self._due.append(pending)
        return pending

    def ask(self, command: Command) -> Reply:
        pending = self.send(command)
        self.read_replies(wait_for=pending)
        assert pending.reply is not None and not isinstance(pending.reply, Failed), pending.reply
        return pending.reply

    def read_replies(self, wait_for: Pending | None) -> None:
        with self._lock:
            while self._due and (wait_for is None or wait_for.reply is None):
                timeout = 0.0 if wait_for is None else REPLY_S
                if not select.select([self._from], [], [], timeout)[0]:
                    assert wait_for is None, f"no reply within {REPLY_S} s"
                    return
                data = read_frame(self._from)
                assert data, "the executor's process has ended"
                self._due.pop(0).reply = msgspec.msgpack.decode(data, type=Reply)


class PipeExecutor:
    """Sends plans to the executor in the other process."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe

    @classmethod
    def like(cls, llm: LLM, pipe: Pipe) -> PipeExecutor:
        """Load a model in the other process, with the settings and number of blocks of an `LLM`."""
        names = ("dtype", "block_size", "max_num_seqs", "max_num_batched_tokens")
        settings = {name: getattr(llm.settings, name) for name in names}
        settings |= {"device": "cpu", "max_model_len": llm.engine.max_model_len}
        settings["num_blocks"] = llm.engine.core.scheduler.pool.num_blocks
        pipe.ask(NewModel(settings))
        return cls(pipe)

    def execute(self, plan: StepPlan) -> PendingStep:
        return self._pipe.send(plan)

    def supply(self, supply: Supply) -> None:
        self._pipe.supply(supply)


class PipeDevice(PipeExecutor):
    """A fake device in the other process, until another one replaces it.

    It has the parts of `FakeDevice` that engine tests use. Moving blocks between pool and staging
    is another interface, `BlockMoves`, whose buffers are in the device's own process.

    Attributes:
        has_run: whether results are visible.
    """

    def __init__(
        self,
        pipe: Pipe,
        limits: SchedulerLimits,
        num_blocks: int,
        layout: KvLayout,
    ) -> None:
        super().__init__(pipe)
        self.limits = limits
        self.has_run = True
        self._block_size = layout.block_size
        pipe.ask(NewDevice(limits, num_blocks, layout))

    def execute(self, plan: StepPlan) -> PendingStep:
        return HeldPending(self, self._pipe, self._pipe.send(plan))

    def write_prompt(self, sequence: Sequence) -> None:
        first = sequence.num_computed_tokens
        for table in sequence.tables:
            start = max(first, table.first * self._block_size)
            self._pipe.ask(Put(table.block_ids, start, sequence.token_ids[start:]))

    def content(self, sequence: Sequence) -> list[int | None]:
        cells = self.cells
        content = [cell for block in sequence.tables[0].block_ids for cell in cells[block]]
        return content[: sequence.num_computed_tokens]

    @property
    def cells(self) -> list[list[int | None]]:
        return self._look().cells

    @property
    def batches(self) -> list[tuple[int, int]]:
        return self._look().batches

    @property
    def num_decode_rows(self) -> int:
        return self._look().num_decode_rows

    @property
    def longest_table(self) -> int:
        return self._look().longest_table

    def fail(self, where: str, message: str) -> None:
        self._pipe.ask(Fail(where, message))

    def _look(self) -> Seen:
        reply = self._pipe.ask(Look())
        assert isinstance(reply, Seen)
        return reply


class HeldPending:
    """A step whose end becomes visible when the test allows it."""

    def __init__(self, device: PipeDevice, pipe: Pipe, inner: Pending) -> None:
        self._device, self._pipe, self._inner = device, pipe, inner

    def is_done(self) -> bool:
        if self._device.has_run:
            self._pipe.read_replies(wait_for=self._inner)
        return self._device.has_run

    def wait(self) -> StepResult:
        return self._inner.wait()


@contextmanager
def executor_process() -> Iterator[Pipe]:
    """Start the other process; the last `NewDevice` or `NewModel` decides what it runs."""
    command = [sys.executable, "-P", "-m", "pagewire.tests.support.executor_child"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
    try:
        yield Pipe(process)
    finally:
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()
        try:
            process.wait(10.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10.0)
