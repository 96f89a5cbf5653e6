"""Computes the embeddings that routers ask for.

An `Embed` message gives the engine a sequence whose prompt is computed in chunks and pooled,
without the prefix cache. One `TokenBatch` per message answers with the embedding.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass

from pagewire.shared.base.errors import InvalidRequestError, OverloadedError
from pagewire.shared.base.logs import about
from pagewire.shared.control.protocol import (
    ControlMessage,
    Embed,
    FinishReason,
    TokenBatch,
    TokenOutput,
    clip_text,
)
from pagewire.shared.engine.core import EngineCore
from pagewire.shared.engine.embedding_sequence import finished_embedding, pooled_sequence
from pagewire.shared.engine.step_output import StepOutput
from pagewire.shared.worker.engine_handle import EngineHandle
from pagewire.shared.worker.refusal import Refusal

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Job:
    """An embedding that is being computed.

    Attributes:
        peer_id: the router's connection.
        message: the router's request.
        engine_id: the job's name in the engine, unique among all routers.
    """

    peer_id: str
    message: Embed
    engine_id: str


class EmbeddingJobs:
    """Jobs of all routers that are connected. The event loop owns them.

    Args:
        engine: computes them.
        post: sends a control message to a connection.
        is_draining: whether new jobs are refused.
    """

    def __init__(
        self,
        engine: EngineHandle,
        post: Callable[[str, ControlMessage], object],
        is_draining: Callable[[], bool],
    ) -> None:
        self._engine, self._post, self._is_draining = engine, post, is_draining
        self._ids = itertools.count(1)
        self._jobs: dict[str, _Job] = {}
        self._by_router: dict[tuple[str, str], _Job] = {}

    def __len__(self) -> int:
        """Number of jobs that are not finished."""
        return len(self._jobs)

    def start(self, peer_id: str, message: Embed) -> None:
        """Begin a job, or refuse it."""
        job = _Job(peer_id, message, f"embedding-{next(self._ids)}")
        try:
            self._check(peer_id, message)
        except InvalidRequestError as exc:
            self._refuse(job, Refusal("invalid", str(exc), exc.param))
            return
        if self._is_draining():
            self._refuse(job, Refusal("draining", "shutting down"))
            return
        self._jobs[job.engine_id] = self._by_router[peer_id, message.request_id] = job
        try:
            self._engine.submit(lambda core: self._add(core, job))
        except OverloadedError as exc:
            self._on_not_added(job, Refusal("overloaded", str(exc)))

    def cancel(self, peer_id: str, request_id: str) -> None:
        """End a job of a router. Does nothing if it has already ended."""
        if (job := self._by_router.get((peer_id, request_id))) is not None:
            self._forget(job)
            self._engine.submit(lambda core: core.sequences.abort(job.engine_id), admitted=True)

    def on_peer_lost(self, peer_id: str) -> None:
        """End all jobs of a router that is gone."""
        for peer, request_id in [key for key in self._by_router if key[0] == peer_id]:
            self.cancel(peer, request_id)

    def owners_of(self, engine_id: str) -> list[tuple[str, str]]:
        """Return the router's connection and its request's id, if this is a job."""
        job = self._jobs.get(engine_id)
        return [] if job is None else [(job.peer_id, job.message.request_id)]

    def report(self, output: StepOutput) -> None:
        """Report the engine's output of a sequence, if it is a job's."""
        job = self._jobs.get(output.request_id)
        if job is None:
            return
        name, asked = job.message.request_id, job.message
        if output.embedding is not None:
            vector = finished_embedding(output.embedding, asked.normalize, asked.dimensions)
            embedding = vector.astype("<f4").tobytes()
            found = TokenOutput(request_id=name, finish_reason="stop", embedding=embedding)
        else:  # it has ended without an embedding
            error = output.error or "the engine gave no embedding"
            logger.warning("%s failed: %s", job.engine_id, error, extra=about(asked.log_id))
            ended: FinishReason = "abort" if output.finish_reason == "abort" else "error"
            found = TokenOutput(request_id=name, finish_reason=ended, error=clip_text(error))
        self._forget(job)
        self._post(job.peer_id, TokenBatch(outputs=[found]))

    def _check(self, peer_id: str, message: Embed) -> None:
        if not message.token_ids:
            raise InvalidRequestError("the input is empty", "input")
        if max(message.token_ids) >= self._engine.vocab_size:
            problem = f"token ids must be below {self._engine.vocab_size}"
            raise InvalidRequestError(problem, "input")
        if (peer_id, message.request_id) in self._by_router:
            raise InvalidRequestError("another request has this id", "request_id")

    def _add(self, core: EngineCore, job: _Job) -> None:
        """Queue a job's sequence. Runs in the engine's thread."""
        asked = job.message
        try:
            sequence = pooled_sequence(job.engine_id, asked.token_ids, asked.pooling, asked.owner)
            sequence.strikes = asked.strikes
            core.sequences.add(sequence)
        except InvalidRequestError as exc:
            refusal = Refusal("invalid", str(exc), "input")
            self._engine.in_loop(self._on_not_added)(job, refusal)
        except OverloadedError as exc:
            self._engine.in_loop(self._on_not_added)(job, Refusal("overloaded", str(exc)))

    def _on_not_added(self, job: _Job, refusal: Refusal) -> None:
        if self._forget(job):
            self._refuse(job, refusal)

    def _refuse(self, job: _Job, refusal: Refusal) -> None:
        reason, text, _ = refusal
        log = about(job.message.log_id)
        logger.info("%s is refused, %s: %s", job.engine_id, reason, text, extra=log)
        self._post(job.peer_id, refusal.message(job.message.request_id))

    def _forget(self, job: _Job) -> bool:
        """Remove a job that has ended; return whether it was known."""
        self._by_router.pop((job.peer_id, job.message.request_id), None)
        return self._jobs.pop(job.engine_id, None) is not None
