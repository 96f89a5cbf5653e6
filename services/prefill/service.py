"""The prefill service: compute prompts, send their blocks, sample the first token.

    Prefill --> engine (chunks) --> KvSender --> Segments --> Ack: blocks become cached ones
                     |
                     +--> first token --> PrefillDone

Jobs come and go over the KV links, in the engine's thread; the event loop opens the links. A job is
known here until its first token has left; its blocks are the sender's until all are acknowledged.
Routers want embeddings over the control channel (shared/worker/embedding_jobs.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from pagewire.services.prefill.decode_links import DecodeLinks
from pagewire.shared.control.protocol import (
    Cancel,
    ControlMessage,
    Embed,
    KvHello,
    LoadReport,
    clip_text,
)
from pagewire.shared.engine.scheduling.sequence import new_sequence
from pagewire.shared.engine.step_output import StepOutput, StepOutputs
from pagewire.shared.errors import InvalidRequestError, OverloadedError, TransferError
from pagewire.shared.kv.endpoint.sender import KvSender
from pagewire.shared.kv.endpoint.sender_link import SenderLink
from pagewire.shared.kv.job_messages import (
    CancelPrefill,
    JobRequest,
    Prefill,
    PrefillDone,
    PrefillFailed,
    PromptScored,
)
from pagewire.shared.logs import about
from pagewire.shared.tracing import Attributes, TracedSpan, Tracing
from pagewire.shared.worker.embedding_jobs import EmbeddingJobs
from pagewire.shared.worker.engine_handle import EngineHandle

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Job:
    """A job without a first token.

    Attributes:
        log_id: of its request.
        span: of the job, if its request is traced.
    """

    link: SenderLink
    log_id: str | None
    span: TracedSpan | None = None

    def end_span(self, cached_tokens: int = 0, chunks: int = 0, error: str | None = None) -> None:
        """End its span, if it is traced."""
        if self.span is not None:
            found: Attributes = {
                "pagewire.cached_tokens": cached_tokens,
                "pagewire.chunks": chunks,
            }
            self.span.end(found, error)


class PrefillService:
    """Jobs of all decode workers that are linked, and embeddings for routers.

    Args:
        epoch: of this run of the worker.
        engine: that computes them.
        sender: that sends their blocks.
        links: to the decode workers.
        embeddings: that routers want.
        is_draining: whether new jobs are refused.
        tracing: the spans of requests; None: there are none.
    """

    def __init__(
        self,
        epoch: int,
        engine: EngineHandle,
        sender: KvSender,
        links: DecodeLinks,
        embeddings: EmbeddingJobs,
        is_draining: Callable[[], bool],
        tracing: Tracing | None = None,
    ) -> None:
        self._tracing = tracing
        self._epoch, self._engine, self._sender = epoch, engine, sender
        self._links, self._embeddings, self._is_draining = links, embeddings, is_draining
        self._jobs: dict[str, _Job] = {}  # without a first token; the engine thread's
        sender.on_job_request, sender.on_failed = self._on_job_request, self._on_failed

    @property
    def num_active(self) -> int:
        """Jobs that are not finished; from any thread."""
        return max(len(self._jobs), self._sender.num_jobs) + len(self._embeddings)

    def start(self) -> None:
        """Nothing runs by itself: decode workers come here."""

    async def close(self) -> None:
        """Nothing waits."""

    def on_message(self, peer_id: str, message: ControlMessage) -> None:
        """Take a message of a decode worker, or of a router."""
        match message:
            case KvHello():
                self._links.open(peer_id, message)
            case Embed():
                self._embeddings.start(peer_id, message)
            case Cancel():
                self._embeddings.cancel(peer_id, message.request_id)
            case _:
                logger.warning("%s sent a %s here", peer_id, type(message).__name__)

    def on_peer_lost(self, peer_id: str) -> None:
        """End the link to a decode worker that is gone, and its jobs, or a router's."""
        self._links.close(peer_id)
        self._embeddings.on_peer_lost(peer_id)

    # In the engine's thread

    def _on_job_request(self, link: SenderLink, message: JobRequest) -> None:
        if isinstance(message, CancelPrefill):
            job = self._jobs.get(message.job_id)
            if job is not None and job.link is link:
                del self._jobs[message.job_id]
                job.end_span()
                logger.debug("job %s is cancelled", message.job_id, extra=about(job.log_id))
            self._sender.cancel(message.job_id, link)
            return
        try:
            self._start(message, link)
        except (InvalidRequestError, OverloadedError, TransferError) as exc:
            self._report_failure(message.job_id, link, str(exc), message.spec.log_id)

    def _start(self, ticket: Prefill, link: SenderLink) -> None:
        """Queue a job's sequence.

        Raises:
            InvalidRequestError: the ticket makes no sense.
            OverloadedError: no jobs are taken now.
            TransferError: the link has ended.
        """
        if self._is_draining():
            raise OverloadedError("this prefill worker is shutting down")
        if max(ticket.token_ids, default=0) >= self._engine.vocab_size:
            raise InvalidRequestError(f"token ids must be below {self._engine.vocab_size}")
        ticket.spec.check_vocabulary(self._engine.vocab_size)
        eos = self._engine.eos_token_ids  # which a first token may not be, if the spec says so
        sequence = new_sequence(ticket.job_id, ticket.token_ids, ticket.spec, eos)
        sequence.output_start = min(ticket.num_prompt_tokens, len(ticket.token_ids))
        sequence.prefill_only = True
        core = self._engine.core
        core.add(sequence)
        num_blocks = core.scheduler.pool.groups.num_job_blocks(len(ticket.token_ids))
        try:
            self._sender.export(ticket.job_id, link, ticket.first_block, num_blocks)
        except TransferError:
            core.abort(ticket.job_id)
            raise
        span = None
        if self._tracing is not None and ticket.trace is not None:
            span = self._tracing.start("prefill", ticket.trace)
        self._jobs[ticket.job_id] = _Job(link, ticket.spec.log_id, span)
        logger.debug("job %s of %s", ticket.job_id, link.peer, extra=about(ticket.spec.log_id))

    def on_outputs(self, outputs: StepOutputs) -> None:
        """Take prompts' log probabilities, first tokens, or the news that there will be none."""
        for output in outputs:
            job = self._jobs.get(output.request_id)
            if job is not None:
                self._report(output, job)
            else:
                self._embeddings.take_soon(output)

    def _report(self, output: StepOutput, job: _Job) -> None:
        job_id, link = output.request_id, job.link
        if output.prompt_logprobs is not None:
            scored = PromptScored(job_id=job_id, prompt_logprobs=output.prompt_logprobs)
            self._sender.post(link, scored)
        elif output.finish_reason == "error":
            self._sender.cancel(job_id, link)
            self._on_failed(job_id, link, output.error or "the engine failed")
        else:
            del self._jobs[job_id]
            job.end_span(output.cached_tokens or 0, output.chunks)
            done = PrefillDone(
                job_id=job_id,
                first_token=output.token_ids[0],
                cached_tokens=output.cached_tokens or 0,
                load=LoadReport(
                    self._epoch,
                    self._engine.thread.iterations,
                    self._engine.core.scheduler.num_queued_tokens,
                ),
                queue_s=output.queue_s,
                prefill_s=output.prefill_s,
                chunks=output.chunks,
                logprobs=output.logprobs,
            )
            self._sender.post(link, done)
            logger.debug("job %s has its first token", job_id, extra=about(job.log_id))

    def _on_failed(self, job_id: str, link: SenderLink, reason: str) -> None:
        """Drop a job that is void, whether its first token has left or not."""
        job = self._jobs.pop(job_id, None)
        if job is not None:
            job.end_span(error=reason)
        self._report_failure(job_id, link, reason, None if job is None else job.log_id)

    def _report_failure(
        self, job_id: str, link: SenderLink, reason: str, log_id: str | None
    ) -> None:
        if self._sender.post(link, PrefillFailed(job_id=job_id, reason=clip_text(reason))):
            logger.warning("job %s failed: %s", job_id, reason, extra=about(log_id))
