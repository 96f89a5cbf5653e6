"""The prefill service: compute prompts, send their blocks, sample the first token.

    Prefill --> engine (chunks) --> KvSender --> Segments --> Ack: blocks become cached ones
                     |
                     +--> first token --> PrefillDone

Jobs come and go over the KV links, in the engine's thread; the event loop opens the links. A job is
known here until its first token has left; its blocks are the sender's until all are acknowledged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from pagewire.services.prefill.decode_links import DecodeLinks
from pagewire.shared.control.protocol import ControlMessage, KvHello, LoadReport, clip_text
from pagewire.shared.engine.sequence import new_sequence
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
from pagewire.shared.worker.engine_handle import EngineHandle

logger = logging.getLogger(__name__)


class PrefillService:
    """Jobs of all decode workers that are linked.

    Args:
        epoch: of this run of the worker.
        engine: that computes them.
        sender: that sends their blocks.
        links: to the decode workers.
        is_draining: whether new jobs are refused.
    """

    def __init__(
        self,
        epoch: int,
        engine: EngineHandle,
        sender: KvSender,
        links: DecodeLinks,
        is_draining: Callable[[], bool],
    ) -> None:
        self._epoch, self._engine, self._sender = epoch, engine, sender
        self._links, self._is_draining = links, is_draining
        self._jobs: dict[str, SenderLink] = {}  # without a first token; the engine thread's
        sender.on_job_request, sender.on_failed = self._on_job_request, self._on_failed

    @property
    def num_active(self) -> int:
        """Jobs that are not finished; from any thread."""
        return max(len(self._jobs), self._sender.num_jobs)

    def start(self) -> None:
        """Nothing runs by itself: decode workers come here."""

    async def close(self) -> None:
        """Nothing waits."""

    def on_message(self, peer_id: str, message: ControlMessage) -> None:
        """Take a decode worker's message."""
        if isinstance(message, KvHello):
            self._links.open(peer_id, message)
        else:
            logger.warning("%s sent a %s here", peer_id, type(message).__name__)

    def on_peer_lost(self, peer_id: str) -> None:
        """End the link to a decode worker that is gone, and its jobs."""
        self._links.close(peer_id)

    # In the engine's thread

    def _on_job_request(self, link: SenderLink, message: JobRequest) -> None:
        if isinstance(message, CancelPrefill):
            if self._jobs.get(message.job_id) is link:
                del self._jobs[message.job_id]
            self._sender.cancel(message.job_id, link)
            return
        try:
            self._start(message, link)
        except (InvalidRequestError, OverloadedError, TransferError) as exc:
            self._report_failure(message.job_id, link, str(exc))

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
        self._jobs[ticket.job_id] = link

    def on_outputs(self, outputs: StepOutputs) -> None:
        """Take prompts' log probabilities, first tokens, or the news that there will be none."""
        for output in outputs:
            link = self._jobs.get(output.request_id)
            if link is not None:
                self._report(output, link)

    def _report(self, output: StepOutput, link: SenderLink) -> None:
        job_id = output.request_id
        if output.prompt_logprobs is not None:
            scored = PromptScored(job_id=job_id, prompt_logprobs=output.prompt_logprobs)
            self._sender.post(link, scored)
        elif output.finish_reason == "error":
            self._sender.cancel(job_id, link)
            self._on_failed(job_id, link, output.error or "the engine failed")
        else:
            del self._jobs[job_id]
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
                logprobs=output.logprobs,
            )
            self._sender.post(link, done)

    def _on_failed(self, job_id: str, link: SenderLink, reason: str) -> None:
        """Drop a job that is void, whether its first token has left or not."""
        self._jobs.pop(job_id, None)
        self._report_failure(job_id, link, reason)

    def _report_failure(self, job_id: str, link: SenderLink, reason: str) -> None:
        if self._sender.post(link, PrefillFailed(job_id=job_id, reason=clip_text(reason))):
            logger.warning("job %s failed: %s", job_id, reason)
