"""Prefill jobs: computes the prompts that other workers ask for, and samples their first tokens.

    Prefill --> engine (chunks) --> KvSender --> Segments --> Ack of each
                     |
                     +--> first token --> PrefillDone

A job is known here until its first token is sent. The sender keeps its blocks until all are
acknowledged. All of this runs in the engine's thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from pagewire.shared.base.errors import InvalidRequestError, OverloadedError, TransferError
from pagewire.shared.base.logs import about
from pagewire.shared.base.tracing import Attributes, TracedSpan, Tracing, start_span
from pagewire.shared.control.protocol import LoadReport, clip_text
from pagewire.shared.engine.scheduling.sequence import new_sequence
from pagewire.shared.engine.step_output import StepOutput
from pagewire.shared.transfer.endpoint.sender import KvSender
from pagewire.shared.transfer.endpoint.sender_link import SenderLink
from pagewire.shared.transfer.job_messages import (
    CancelPrefill,
    JobRequest,
    Prefill,
    PrefillDone,
    PrefillFailed,
    PromptScored,
)
from pagewire.shared.worker.engine_handle import EngineHandle

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Job:
    """A job whose first token has not been sampled yet.

    Attributes:
        log_id: the request's id in logs.
        span: the job's span, if its request is traced.
    """

    link: SenderLink
    log_id: str | None
    span: TracedSpan | None = None

    def end_span(self, cached_tokens: int = 0, chunks: int = 0, error: str | None = None) -> None:
        """End the job's span, if it is traced."""
        if self.span is not None:
            found: Attributes = {"pagewire.cached_tokens": cached_tokens, "pagewire.chunks": chunks}
            self.span.end(found, error)


@dataclass(slots=True)
class PrefillJobs:
    """The jobs of all workers that have linked themselves to this one.

    Attributes:
        engine: this worker's engine.
        sender: sends the jobs' blocks.
        is_draining: whether new jobs are refused.
        load: returns this worker's load without a job that has just ended, for routers.
        tracing: makes the spans of jobs; None if they are not traced.
    """

    engine: EngineHandle
    sender: KvSender
    is_draining: Callable[[], bool]
    load: Callable[[], LoadReport]
    tracing: Tracing | None = None
    _jobs: dict[str, _Job] = field(default_factory=dict)

    def __len__(self) -> int:
        """Jobs that have not ended, their blocks included; may be called in any thread."""
        return self.sender.num_jobs

    def link_of(self, job_id: str) -> SenderLink | None:
        """Return the link of a job without a first token; from any thread."""
        job = self._jobs.get(job_id)
        return None if job is None else job.link

    def on_request(self, link: SenderLink, message: JobRequest) -> None:
        """Begin a job for the worker at the other end of a link, or cancel one."""
        if isinstance(message, CancelPrefill):
            job = self._jobs.get(message.job_id)
            if job is not None and job.link is link:
                del self._jobs[message.job_id]
                job.end_span()
                logger.debug("job %s is cancelled", message.job_id, extra=about(job.log_id))
            self.sender.cancel(message.job_id, link)
            return
        try:
            self._start(message, link)
        except (InvalidRequestError, OverloadedError, TransferError) as exc:
            self._report_failure(message.job_id, link, str(exc), message.spec.log_id)

    def _start(self, message: Prefill, link: SenderLink) -> None:
        """Queue the sequence that computes a job's prompt.

        Raises:
            InvalidRequestError: the message is invalid.
            OverloadedError: the worker is draining, or the engine's queue is full.
            TransferError: the link has ended.
        """
        if self.is_draining():
            raise OverloadedError("this worker is shutting down")
        if max(message.token_ids, default=0) >= self.engine.vocab_size:
            raise InvalidRequestError(f"token ids must be below {self.engine.vocab_size}")
        message.spec.check_vocabulary(self.engine.vocab_size)
        eos = self.engine.eos_token_ids  # the spec may forbid them as first token
        sequence = new_sequence(message.job_id, message.token_ids, message.spec, eos)
        sequence.output_start = min(message.num_prompt_tokens, len(message.token_ids))
        sequence.prefill_only = True
        sequence.strikes = message.strikes
        core = self.engine.core
        core.sequences.add(sequence)
        num_blocks = core.scheduler.pool.layout.held_blocks(len(message.token_ids))
        try:
            self.sender.export(message.job_id, link, message.first_block, num_blocks)
        except TransferError:
            core.sequences.abort(message.job_id)
            raise
        span = start_span(self.tracing, "prefill", message.trace)
        self._jobs[message.job_id] = _Job(link, message.spec.log_id, span)
        logger.debug("job %s of %s", message.job_id, link.peer, extra=about(message.spec.log_id))

    def report(self, output: StepOutput) -> bool:
        """Report what the engine put out to the worker that asked; return whether it is a job."""
        job_id = output.request_id
        if (job := self._jobs.get(job_id)) is None:
            return False
        if output.prompt_logprobs is not None:
            scored = PromptScored(job_id=job_id, prompt_logprobs=output.prompt_logprobs)
            self.sender.post(job.link, scored)
        elif output.finish_reason == "error":
            self.sender.cancel(job_id, job.link)
            self.on_failed(job_id, job.link, output.error or "the engine failed")
        else:
            del self._jobs[job_id]
            job.end_span(output.cached_tokens or 0, output.chunks)
            done = PrefillDone(
                job_id=job_id,
                first_token=output.token_ids[0],
                cached_tokens=output.cached_tokens or 0,
                load=self.load(),
                queue_s=output.queue_s,
                prefill_s=output.prefill_s,
                chunks=output.chunks,
                logprobs=output.logprobs,
            )
            self.sender.post(job.link, done)
            logger.debug("job %s has its first token", job_id, extra=about(job.log_id))
        return True

    def on_failed(self, job_id: str, link: SenderLink, reason: str) -> None:
        """Remove a failed job and report it, whether its first token was sent or not."""
        job = self._jobs.pop(job_id, None)
        if job is not None:
            job.end_span(error=reason)
        self._report_failure(job_id, link, reason, None if job is None else job.log_id)

    def end_all(self, reason: str) -> None:
        """Forget all jobs; their spans end with this reason."""
        for job in self._jobs.values():
            job.end_span(error=reason)
        self._jobs.clear()

    def _report_failure(
        self, job_id: str, link: SenderLink, reason: str, log_id: str | None
    ) -> None:
        if self.sender.post(link, PrefillFailed(job_id=job_id, reason=clip_text(reason))):
            logger.warning("job %s failed: %s", job_id, reason, extra=about(log_id))
