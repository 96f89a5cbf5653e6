"""The other side of `executor_pipe`: carries out the commands on its standard input."""

from __future__ import annotations

import logging
import os
import sys
from typing import IO, Any

import msgspec

from pagewire.shared.engine.execution.executor import Executor, PendingStep
from pagewire.shared.engine.scheduling.step import StepPlan, Supply
from pagewire.tests.support.executor_pipe import (
    Command,
    Done,
    Fail,
    Failed,
    Look,
    NewDevice,
    NewModel,
    Put,
    Reply,
    Sampled,
    Seen,
    read_frame,
    write_frame,
)
from pagewire.tests.support.fake_device import FakeDevice


class Child:
    """Answers each command."""

    def __init__(self, replies: IO[bytes]) -> None:
        self._replies = replies
        self._executor: Any = None
        self._awaiting: PendingStep | None = None

    def on_command(self, command: Command) -> None:
        try:
            reply = self._answer(command)
        except Exception as exc:  # any: the parent raises it
            logging.exception("a command failed")
            reply = Failed(f"{type(exc).__name__}: {exc}")
        if reply is not None:
            write_frame(self._replies, reply)

    def _answer(self, command: Command) -> Reply | None:
        match command:
            case StepPlan():
                pending = self._executor.execute(command)
                if command.awaits_supply:
                    self._awaiting = pending
                    return None
                return Sampled(pending.wait())
            case Supply():
                assert self._awaiting is not None
                self._executor.supply(command)
                return Sampled(self._awaiting.wait())
            case NewDevice():
                self._executor = FakeDevice(command.limits, command.num_blocks, command.layout)
            case NewModel():
                self._executor = _model(command.settings)
            case Put():
                self._executor.write(command.block_ids, command.first, command.token_ids)
            case Fail():
                self._executor.fail(command.where, command.message)
            case Look():
                return Seen(*(getattr(self._executor, name) for name in Seen.__struct_fields__))
        return Done()


def _model(settings: dict[str, Any]) -> Executor:
    import torch

    from pagewire import LLM

    torch.set_num_threads(1)
    return LLM("demo", **settings).engine.runner


def main() -> None:
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # so that printed text is not mistaken for a reply
    child = Child(replies)
    while data := read_frame(sys.stdin.buffer):
        child.on_command(msgspec.msgpack.decode(data, type=Command))


if __name__ == "__main__":
    main()
