"""An executor in another process: plans go there over a pipe, results come back."""

from __future__ import annotations

import json
import select
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import msgspec

from pagewire.shared.engine.sequence import Sequence
from pagewire.shared.engine.step import StepPlan, StepResult, Supply

REPLY_S = 60.0
_LENGTH = struct.Struct("<I")


class NewDevice(msgspec.Struct, tag=True):
    """Begin with a fresh fake device."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int


class Put(msgspec.Struct, tag=True):
    """Write the KV of tokens from a position on, as another worker's would come."""

    block_ids: list[int]
    first: int
    token_ids: list[int]


class Show(msgspec.Struct, tag=True):
    """Ask for the cells of the fake device."""


class Cells(msgspec.Struct, tag=True):
    """The answer."""

    cells: list[list[int | None]]


class Failed(msgspec.Struct, tag=True):
    """The step or command failed."""

    error: str


class Sampled(msgspec.Struct, tag=True):
    """A step's result."""

    result: StepResult


Command = StepPlan | Supply | NewDevice | Put | Show
Reply = Sampled | Cells | Failed


def write_frame(stream: IO[bytes], message: object) -> None:
    data = msgspec.msgpack.encode(message)
    stream.write(_LENGTH.pack(len(data)) + data)
    stream.flush()


def read_frame(stream: IO[bytes]) -> bytes | None:
    """Return the next message, or None at the end."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    return stream.read(_LENGTH.unpack(head)[0])


class PipePending:
    """A step of the other process."""

    def __init__(self, executor: PipeExecutor) -> None:
        self._executor = executor
        self.reply: Reply | None = None

    def is_done(self) -> bool:
        self._executor.read_replies(wait_for=None)
        return self.reply is not None

    def wait(self) -> StepResult:
        self._executor.read_replies(wait_for=self)
        if not isinstance(self.reply, Sampled):
            raise RuntimeError(str(self.reply))
        return self.reply.result


class PipeExecutor:
    """Every command has one reply, in order; the one of a plan that awaits comes when it does."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._to, self._from = process.stdin, process.stdout
        self._due: list[PipePending] = []

    def execute(self, plan: StepPlan) -> PipePending:
        return self.send(plan)

    def supply(self, supply: Supply) -> None:
        write_frame(self._to, supply)

    def send(self, command: Command) -> PipePending:
        write_frame(self._to, command)
        pending = PipePending(self)
        self._due.append(pending)
        return pending

    def read_replies(self, wait_for: PipePending | None) -> None:
        while self._due and (wait_for is None or wait_for.reply is None):
            timeout = 0.0 if wait_for is None else REPLY_S
            if not select.select([self._from], [], [], timeout)[0]:
                assert wait_for is None, f"no reply within {REPLY_S} s"
                return
            data = read_frame(self._from)
            assert data is not None, "the executor's process has ended"
            self._due.pop(0).reply = msgspec.msgpack.decode(data, type=Reply)


class PipeDevice(PipeExecutor):
    """A fake device in the other process.

    Attributes:
        has_run: whether results may be seen.
    """

    has_run = True

    def execute(self, plan: StepPlan) -> PipePending:
        return HeldPending(self, super().execute(plan))

    def renew(self, **size: int) -> None:
        self._ask(NewDevice(**size))

    def write_prompt(self, sequence: Sequence) -> None:
        first = sequence.num_computed_tokens
        self._ask(Put(sequence.block_ids, first, sequence.token_ids[first:]))

    @property
    def cells(self) -> list[list[int | None]]:
        reply = self._ask(Show())
        assert isinstance(reply, Cells)
        return reply.cells

    def content(self, sequence: Sequence) -> list[int | None]:
        cells = self.cells
        content = [cell for block in sequence.block_ids for cell in cells[block]]
        return content[: sequence.num_computed_tokens]

    def _ask(self, command: Command) -> Reply:
        pending = self.send(command)
        self.read_replies(wait_for=pending)
        assert pending.reply is not None and not isinstance(pending.reply, Failed), pending.reply
        return pending.reply


class HeldPending(PipePending):
    """A step whose end is seen when the test wants it."""

    def __init__(self, device: PipeDevice, inner: PipePending) -> None:
        self._device, self._inner = device, inner

    def is_done(self) -> bool:
        return self._device.has_run and self._inner.is_done()

    def wait(self) -> StepResult:
        return self._inner.wait()


@contextmanager
def executor_process(**settings: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Start the other process, with a model if there are settings of one."""
    command = [sys.executable, "-P", "-m", "pagewire.tests.support.executor_child"]
    process = subprocess.Popen(
        [*command, json.dumps(settings)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    )
    try:
        yield process
    finally:
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()
        try:
            process.wait(10.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10.0)
