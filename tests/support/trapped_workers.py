"""Workers with a trap: a step with a certain token in a prompt hangs, fails or crashes.

`python -P -m pagewire.tests.support.trapped_workers` is `pagewire` with such workers. The
environment variable `TRAP` says what the trap does.

    hang     the step never ends
    fail     the step raises an error each time
    crash    the step ends the process by a segmentation fault
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from typing import Any

from pagewire.services.cli.main import app
from pagewire.shared.engine.execution.model_runner import ModelRunner
from pagewire.shared.engine.scheduling.step import StepPlan
from pagewire.tests.support.own_workers import use_program

PROGRAM = "pagewire.tests.support.trapped_workers"
TRAP = "TRAP"
TRAP_TOKEN = 2043  # which no other prompt of the tests has
RESTART_DELAY_S = 0.25


def spring(trap: str) -> None:
    """Do what a trap does."""
    if trap == "hang":
        threading.Event().wait()
    if trap == "fail":
        raise RuntimeError("the trap")
    if trap == "crash":
        ctypes.string_at(0)


def set_trap(trap: str) -> None:
    """Make the worker in this process run into the trap."""
    execute = ModelRunner.execute

    def trapped(runner: ModelRunner, plan: StepPlan) -> Any:
        if any(TRAP_TOKEN in chunk.token_ids for chunk in plan.chunks):
            spring(trap)
        return execute(runner, plan)

    ModelRunner.execute = trapped


def main() -> None:
    if sys.argv[1] == "up":
        use_program(PROGRAM, RESTART_DELAY_S)
    elif sys.argv[1] in ("prefill", "decode"):
        set_trap(os.environ[TRAP])
    app()


if __name__ == "__main__":
    main()
