"""What a worker says in its log and to its peers when its engine hangs or has ended."""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass, field
from types import TracebackType

import torch

from pagewire.shared.control.protocol import MAX_STRIKES
from pagewire.shared.engine.scheduling.sequence import Sequence
from pagewire.shared.engine.step_clock import RunningStep


@dataclass(frozen=True, slots=True)
class EngineLoss:
    """Why an engine is lost, and which of its sequences are suspected.

    Attributes:
        text: what happened, for the log and for the suspects' clients.
        suspects: the sequences that may be to blame.
        strikes: how strongly each is suspected.
    """

    text: str
    suspects: list[Sequence] = field(default_factory=list)
    strikes: int = 0

    @property
    def log_ids(self) -> str:
        """The suspects' names in logs."""
        return ", ".join(sequence.log_name for sequence in self.suspects) or "none"


def hanging(step: RunningStep | None, silence_s: float) -> EngineLoss:
    """Describe an engine whose thread lives but does not go on.

    A single suspect is to blame. Several are suspected once, and each runs alone from then on.

    Args:
        step: the step under way, if there is one.
        silence_s: how long the engine has not gone on.
    """
    if step is None:
        return EngineLoss(f"the engine has not gone on for {silence_s:.1f} s, outside a step")
    text = f"a step of {step.work.text} has run for {silence_s:.1f} s and counts as hanging"
    suspects = step.suspects
    return EngineLoss(text, suspects, MAX_STRIKES if len(suspects) == 1 else 1)


def ended(step: RunningStep | None, error: Exception | None) -> EngineLoss:
    """Describe an engine whose thread has ended.

    A request that is in the step is suspected once; nobody is, if memory ran out: it may have been
    taken elsewhere.

    Args:
        step: the step that was under way, if there was one.
        error: what ended the thread.
    """
    cause = "the engine ended" if error is None else f"the engine ended: {type(error).__name__}"
    if step is None or isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return EngineLoss(cause)
    return EngineLoss(f"{cause} in a step of {step.work.text}", step.suspects, 1)


def stack_of(thread: threading.Thread) -> TimeoutError:
    """Return an error whose traceback is where a thread is, for a log line."""
    found = None
    frame = None if thread.ident is None else sys._current_frames().get(thread.ident)
    while frame is not None:
        found = TracebackType(found, frame, frame.f_lasti, frame.f_lineno)
        frame = frame.f_back
    return TimeoutError(f"the {thread.name} thread is here").with_traceback(found)
