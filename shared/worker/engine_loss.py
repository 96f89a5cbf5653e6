"""What a worker says in its log and to its peers when its engine hangs or has ended.

A worker that crashes in native code cannot say anything: see `crash_reporter.py`.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType

import torch

from pagewire.shared.base.errors import BlamelessRankError, RankError
from pagewire.shared.control.channel import ControlServer
from pagewire.shared.control.protocol import MAX_STRIKES, Blamed, EngineLost, clip_text
from pagewire.shared.engine.scheduling.sequence import Sequence
from pagewire.shared.engine.step_clock import RunningStep
from pagewire.shared.engine.thread import EngineThread
from pagewire.shared.settings.config import WorkerSettings
from pagewire.shared.worker.engine_watch import EngineWatch

logger = logging.getLogger(__name__)

# What ends an engine through no fault of the requests in its step.
_OF_NOBODY = (MemoryError, torch.OutOfMemoryError, BlamelessRankError)


@dataclass(frozen=True, slots=True)
class EngineLoss:
    """Why an engine is lost, and which of its sequences are suspected.

    Attributes:
        text: what happened, for the log and for the suspects' clients.
        suspects: the sequences that may be to blame.
        strikes: how strongly each is suspected.
        in_step: whether a step was running; if not, any request may be to blame.
    """

    text: str
    suspects: list[Sequence] = field(default_factory=list)
    strikes: int = 0
    in_step: bool = True

    @property
    def log_ids(self) -> str:
        """The names by which logs know the suspected requests."""
        return ", ".join(sequence.log_name for sequence in self.suspects) or "none"


def hanging(step: RunningStep | None, silence_s: float) -> EngineLoss:
    """Describe an engine whose thread lives but does not go on.

    A single suspect is to blame. Several are suspected once, and each runs alone from then on.

    Args:
        step: the step under way, if there is one.
        silence_s: how long the engine has not gone on.
    """
    if step is None:
        return EngineLoss(
            f"the engine has not gone on for {silence_s:.1f} s, outside a step", in_step=False
        )
    text = f"a step of {step.work.text} has run for {silence_s:.1f} s and counts as hanging"
    suspects = step.suspects
    return EngineLoss(text, suspects, MAX_STRIKES if len(suspects) == 1 else 1)


def ended(step: RunningStep | None, error: Exception | None) -> EngineLoss:
    """Describe an engine whose thread has ended.

    A request that is in the step is suspected once; nobody is, if memory ran out, which may have
    been taken elsewhere, or if a rank of the model was killed.

    Args:
        step: the step that was under way, if there was one.
        error: what ended the thread.
    """
    cause = "the engine ended"
    if error is not None:
        why = str(error) if isinstance(error, RankError) else type(error).__name__
        cause = f"{cause}: {why}"
    if step is None or isinstance(error, _OF_NOBODY):
        return EngineLoss(cause, in_step=step is not None)
    return EngineLoss(f"{cause} in a step of {step.work.text}", step.suspects, 1)


def stack_of(thread: threading.Thread) -> TimeoutError:
    """Return an error whose traceback is where a thread is, for a log line."""
    found = None
    frame = None if thread.ident is None else sys._current_frames().get(thread.ident)
    while frame is not None:
        found = TracebackType(found, frame, frame.f_lasti, frame.f_lineno)
        frame = frame.f_back
    return TimeoutError(f"the {thread.name} thread is here").with_traceback(found)


def log_loss(engine: EngineThread, watch: EngineWatch, settings: WorkerSettings) -> EngineLoss:
    """Log why an engine is lost, and return the description.

    Args:
        engine: it hangs, or has ended.
        watch: has noticed that.
        settings: the worker's settings.
    """
    if watch.has_ended:
        loss = ended(engine.step, engine.error)
        logger.error("%s; suspected requests: %s", loss.text, loss.log_ids)
        return loss
    loss = hanging(watch.step, watch.silence_s)
    logger.error(
        "%s; the limit is %.1f s, by PAGEWIRE_STEP_TIMEOUT_S=%g and the time predicted for the "
        "step; suspected requests: %s. If it only computed, raise that setting or lower "
        "PAGEWIRE_MAX_NUM_BATCHED_TOKENS=%d",
        loss.text,
        watch.limit_s,
        settings.step_timeout_s,
        loss.log_ids,
        settings.max_num_batched_tokens,
        exc_info=stack_of(engine.thread),
    )
    return loss


def notify_peers(
    loss: EngineLoss,
    server: ControlServer,
    owners_of: Callable[[str], list[tuple[str, str]]],
) -> None:
    """Notify peers that this worker ends, and before that of their suspected requests.

    Args:
        loss: why it ends.
        server: has the peers' connections.
        owners_of: returns connections, and what each calls a sequence of the engine.
    """
    blamed: dict[str, list[str]] = {peer: [] for peer in server.peers}
    for sequence in loss.suspects:
        for peer, name in owners_of(sequence.request_id):
            blamed.setdefault(peer, []).append(name)
    error = clip_text(loss.text)
    for peer, names in blamed.items():
        if names:
            server.post(peer, Blamed(request_ids=names, strikes=loss.strikes, error=error))
        if loss.in_step:  # else a request may hang it outside steps, and nobody knows which
            server.post(peer, EngineLost(error=error))
