"""The prefill service: compute prompts, send their blocks, sample the first token.

    Prefill --> engine (chunks) --> KvSender --> Segments --> Ack: blocks become cached ones
                     |
                     +--> first token --> PrefillDone

The engine's thread computes, packs and sends; the event loop has the control messages. A job is
known here until its first token has left; its blocks are the sender's until all are acknowledged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from pagewire.services.prefill.decode_links import DecodeLinks
from pagewire.shared.control.protocol import (
    CancelPrefill,
    ControlMessage,
    KvHello,
    Prefill,
    PrefillDone,
    PrefillFailed,
    PromptScored,
    clip_text,
)
from pagewire.shared.engine.build import new_sequence
from pagewire.shared.engine.core import EngineCore
from pagewire.shared.engine.step_output import StepOutputs
from pagewire.shared.errors import InvalidRequestError, OverloadedError, TransferError
from pagewire.shared.kv.endpoint.sender import KvSender
from pagewire.shared.kv.endpoint.sender_link import SenderLink
from pagewire.shared.worker.engine_handle import EngineHandle
from pagewire.shared.worker.identity import WorkerIdentity

logger = logging.getLogger(__name__)


class PrefillService:
    """Jobs of all decode workers that are connected.

    Args:
        identity: of this worker.
        engine: that computes them.
        sender: that sends their blocks.
        links: to the decode workers.
        post: sends a control message to a connection.
        is_draining: whether new jobs are refused.
    """

    def __init__(
        self,
        identity: WorkerIdentity,
        engine: EngineHandle,
        sender: KvSender,
        links: DecodeLinks,
        post: Callable[[str, ControlMessage], object],
        is_draining: Callable[[], bool],
    ) -> None:
        self._identity, self._engine, self._sender = identity, engine, sender
        self._links, self._post, self._is_draining = links, post, is_draining
        self._jobs: dict[str, str] = {}  # job without a first token -> its connection
        sender.on_failed = engine.in_loop(self._on_failed)

    @property
    def num_active(self) -> int:
        """Jobs that are not finished."""
        return max(len(self._jobs), self._sender.num_jobs)

    def start(self) -> None:
        """Nothing runs by itself: decode workers come here."""

    async def close(self) -> None:
        """Nothing waits."""

    def on_message(self, peer_id: str, message: ControlMessage) -> None:
        """Take a decode worker's message."""
        match message:
            case Prefill():
                self._on_prefill(peer_id, message)
            case CancelPrefill():
                self._cancel(message.job_id, self._links.get(peer_id))
            case KvHello():
                self._links.open(peer_id, message)
            case _:
                logger.warning("%s sent a %s here", peer_id, type(message).__name__)

    def on_peer_lost(self, peer_id: str) -> None:
        """End all jobs of a decode worker that is gone."""
        self._jobs = {job: peer for job, peer in self._jobs.items() if peer != peer_id}
        self._links.close(peer_id)

    def _on_prefill(self, peer_id: str, ticket: Prefill) -> None:
        link = self._links.get(peer_id)
        refusal = self._refusal_of(ticket, link)
        if refusal is None and link is not None:
            try:
                self._engine.submit(lambda core: self._start(core, ticket, link))
            except OverloadedError as exc:
                refusal = str(exc)
        if refusal is None:
            # The engine's answers come through the loop: not before this.
            self._jobs[ticket.job_id] = peer_id
        else:
            self._post(peer_id, PrefillFailed(job_id=ticket.job_id, reason=refusal))

    def _refusal_of(self, ticket: Prefill, link: SenderLink | None) -> str | None:
        """Say why a ticket is void, if it is."""
        if self._is_draining():
            return "this prefill worker is shutting down"
        if ticket.prefill_epoch != self._identity.epoch:
            return "the ticket was made for an earlier life of this worker"
        if link is None or link.peer != ticket.decode_id:
            return "no KV link is open to this decode worker"
        if ticket.job_id in self._jobs:
            return "there is a job of this id already"
        if any(token >= self._engine.vocab_size for token in ticket.token_ids):
            return f"token ids must be below {self._engine.vocab_size}"
        return None

    def _start(self, core: EngineCore, ticket: Prefill, link: SenderLink) -> None:
        """Queue a job's sequence. Runs in the engine's thread."""
        sequence = new_sequence(ticket.job_id, ticket.token_ids, ticket.spec, ())
        sequence.prefill_only = True
        num_blocks = -(-len(ticket.token_ids) // self._engine.layout.block_size)
        try:
            core.add(sequence)
            self._sender.export(ticket.job_id, link, ticket.first_block, num_blocks)
        except (InvalidRequestError, OverloadedError, TransferError) as exc:
            if core.get(ticket.job_id) is sequence:
                core.abort(ticket.job_id)
            self._engine.in_loop(self._on_failed)(ticket.job_id, link, str(exc))

    def _cancel(self, job_id: str, link: SenderLink | None) -> None:
        self._jobs.pop(job_id, None)
        if link is not None:
            self._engine.submit(lambda _core: self._sender.cancel(job_id, link), admitted=True)

    def on_outputs(self, outputs: StepOutputs) -> None:
        """Take prompts' log probabilities, first tokens, or the news that there will be none."""
        for output in outputs:
            peer_id = self._jobs.get(output.request_id)
            if peer_id is None:
                continue
            if output.prompt_logprobs is not None:
                scored = PromptScored(
                    job_id=output.request_id, prompt_logprobs=output.prompt_logprobs
                )
                self._post(peer_id, scored)
                continue
            if output.finish_reason == "error":
                link = self._links.get(peer_id)
                self._on_failed(output.request_id, link, output.error or "the engine failed")
                self._cancel(output.request_id, link)
                continue
            del self._jobs[output.request_id]
            self._post(
                peer_id,
                PrefillDone(
                    job_id=output.request_id,
                    first_token=output.token_ids[0],
                    cached_tokens=output.cached_tokens or 0,
                    queue_s=output.queue_s,
                    prefill_s=output.prefill_s,
                    logprobs=output.logprobs,
                ),
            )

    def _on_failed(self, job_id: str, link: SenderLink | None, reason: str) -> None:
        """Report a job that is void, whether its first token has left or not."""
        self._jobs.pop(job_id, None)
        peer_id = None if link is None else self._links.peer_of(link)
        if peer_id is not None:
            logger.warning("job %s failed: %s", job_id, reason)
            self._post(peer_id, PrefillFailed(job_id=job_id, reason=clip_text(reason)))
