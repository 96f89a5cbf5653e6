"""The other side of `executor_pipe`: runs what comes over its standard input."""

from __future__ import annotations

import json
import logging
import os
import sys
from typing import IO, Any

import msgspec

from pagewire.shared.engine.executor import Executor, PendingStep
from pagewire.shared.engine.step import StepPlan, Supply
from pagewire.tests.support.executor_pipe import (
    Cells,
    Command,
    Failed,
    NewDevice,
    Put,
    Reply,
    Sampled,
    Show,
    read_frame,
    write_frame,
)


class Child:
    """Answers each command."""

    def __init__(self, replies: IO[bytes], model: dict[str, Any]) -> None:
        self._replies = replies
        self._executor: Any = _model(model) if model else None
        self._awaiting: PendingStep | None = None

    def on_command(self, command: Command) -> None:
        try:
            reply = self._answer(command)
        except Exception as exc:
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
                self._executor = _fake_device(command)
            case Put():
                self._executor.write(command.block_ids, command.first, command.token_ids)
            case Show():
                pass
        return Cells(self._executor.cells)


def _fake_device(new: NewDevice) -> Any:
    from pagewire.tests.support.fake_device import make_core

    size = msgspec.structs.asdict(new)
    return make_core(**size)[1]


def _model(settings: dict[str, Any]) -> Executor:
    import torch

    from pagewire import LLM

    torch.set_num_threads(1)
    return LLM("demo", **settings).engine.runner


def main() -> None:
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what anybody prints is no reply
    child = Child(replies, json.loads(sys.argv[1]))
    while (data := read_frame(sys.stdin.buffer)) is not None:
        child.on_command(msgspec.msgpack.decode(data, type=Command))


if __name__ == "__main__":
    main()
