"""Workers with traps: a step with a certain token in a prompt hangs, fails or crashes.

`python -P -m pagewire.tests.support.trapped_workers` is `pagewire` with such workers. The prompts
of `POISONS` say by their second token what the trap does.

    hang     the step never ends
    fail     the step raises an error each time
    crash    the step ends the process by a segmentation fault
    later    likewise, not with the prompt, but with the answer's token `LATER`
"""

from __future__ import annotations

import ctypes
import sys
import threading
from typing import Any

from pagewire.services.cli.main import app
from pagewire.shared.engine.execution.model_runner import ModelRunner
from pagewire.shared.engine.scheduling.step import StepPlan
from pagewire.tests.support.own_workers import use_program

PROGRAM = "pagewire.tests.support.trapped_workers"
TRAP_TOKEN = 2043  # which no other prompt of the tests has
TRAPS = ("hang", "fail", "crash", "later")
POISON_TOKENS = 201
POISONS = {
    trap: [TRAP_TOKEN, 10 + index, *[9] * (POISON_TOKENS - 2)] for index, trap in enumerate(TRAPS)
}
LATER = 120
RESTART_DELAY_S = 0.25


def spring(trap: str) -> None:
    """Do what a trap does."""
    if trap == "hang":
        threading.Event().wait()
    if trap == "fail":
        raise RuntimeError("the trap")
    if trap in ("crash", "later"):
        ctypes.string_at(0)


def trap_in(tokens: list[int]) -> str:
    """Return the trap of a prompt that begins with these tokens; empty if it has none."""
    return next((trap for trap, poison in POISONS.items() if tokens[:2] == poison[:2]), "")


def set_traps() -> None:
    """Make the worker in this process run into traps."""
    execute = ModelRunner.execute
    positions: dict[int, int] = {}  # by device slot, of a trapped answer's tokens

    def trapped(runner: ModelRunner, plan: StepPlan) -> Any:
        for new in plan.new_slots:
            positions.pop(new.slot, None)
        for slot in positions.keys() & set(plan.decodes):
            positions[slot] += 1
        for chunk in plan.chunks:
            trap = trap_in(chunk.token_ids)
            if trap == "later":
                positions[chunk.slot] = chunk.end - POISON_TOKENS
            else:
                spring(trap)
        if max(positions.values(), default=0) >= LATER:
            spring("later")
        return execute(runner, plan)

    ModelRunner.execute = trapped


def main() -> None:
    if sys.argv[1] == "up":
        use_program(PROGRAM, RESTART_DELAY_S)
    elif sys.argv[1] in ("prefill", "decode"):
        set_traps()
    app()


if __name__ == "__main__":
    main()
