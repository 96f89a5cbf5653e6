"""Prompts of a decode worker that prefill workers compute: their jobs and their failures.

reserved --> Prefill --> segments (the KV receiver's) --------+-- all there: the receiver activates
                |                                            |
                +------> PrefillDone: first token -----------+
                |
                +------> failed, silent, lost: next worker; when none is left, a local prefill
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from prometheus_client import Counter

from pagewire.services.decode.requests import DecodeRequest, RemotePrefill
from pagewire.services.decode.worker_links import PrefillLink, PrefillLinks
from pagewire.shared.control.protocol import (
    CancelPrefill,
    ControlMessage,
    PrefillDone,
    PrefillFailed,
    PromptScored,
)
from pagewire.shared.engine.core import EngineCore
from pagewire.shared.engine.status import RequestStatus
from pagewire.shared.kv.endpoint.expectations import Completion
from pagewire.shared.kv.endpoint.receiver import KvReceiver
from pagewire.shared.logprobs import PromptLogprobs
from pagewire.shared.worker.engine_handle import EngineHandle
from pagewire.shared.worker.identity import WorkerIdentity
from pagewire.shared.worker.metrics import LocalPrefill

logger = logging.getLogger(__name__)


class RemoteJobs:
    """The prefill jobs of a decode worker's requests, at most one a request.

    Args:
        identity: of this worker.
        engine: that goes on with what they compute.
        receiver: of their blocks.
        links: to the prefill workers.
        local_prefills: counts by reason what is computed here instead.
        timeout_s: without a sign of a job's life, after which the next worker is asked.

    Attributes:
        find: returns a live request by its name in the engine.
        on_first_token: called once a request, with the message and the worker that sent it.
        on_prompt_scored: called with log probabilities of the request's prompt, before that; again
            from the start if another worker computes it again.
    """

    def __init__(
        self,
        identity: WorkerIdentity,
        engine: EngineHandle,
        receiver: KvReceiver,
        links: PrefillLinks,
        local_prefills: Counter,
        timeout_s: float,
    ) -> None:
        self._identity, self._engine, self._receiver = identity, engine, receiver
        self._links, self._local_prefills, self._timeout_s = links, local_prefills, timeout_s
        self.find: Callable[[str], DecodeRequest | None] = lambda _engine_id: None
        self.on_first_token: Callable[[DecodeRequest, PrefillDone, str], None] = (
            lambda _request, _done, _worker_id: None
        )
        self.on_prompt_scored: Callable[[DecodeRequest, PromptLogprobs], None] = (
            lambda _request, _scored: None
        )
        self._by_job: dict[str, DecodeRequest] = {}
        receiver.expected.on_reserved = engine.in_loop(self._on_reserved)
        links.on_message, links.on_lost = self._on_message, self._on_link_lost

    def start(self) -> None:
        """Keep links to prefill workers."""
        self._links.start()

    def close(self) -> None:
        """Stop waiting, close the links."""
        for request in self._by_job.values():
            if request.remote is not None:
                request.remote.stop_deadline()
        self._links.close()

    # A job and its worker

    def _on_reserved(self, engine_id: str, job: str, first_block: int, num_blocks: int) -> None:
        request = self.find(engine_id)
        if request is not None:
            request.first_block, request.num_blocks = first_block, num_blocks
            self._begin(request, job)

    def _begin(self, request: DecodeRequest, job: str) -> None:
        """Ask the next prefill worker; none left means that this one does it."""
        while (link := self._next_link(request)) is not None:
            request.tried.add(link.worker_id)
            ticket = request.ticket(job, self._identity.worker_id, self._identity.epoch, link.epoch)
            if link.post(ticket):
                request.remote = RemotePrefill(job, link)
                self._by_job[job] = request
                self._watch(request, request.remote, self._timeout_s)
                return
        self._prefill_here(request, "failed" if request.tried else "no_link")

    def _next_link(self, request: DecodeRequest) -> PrefillLink | None:
        """The first of the router's choices that is alive and untried, else any such worker."""
        chosen = [self._links.get(worker) for worker in request.message.prefill_workers]
        candidates = [link for link in chosen if link is not None] + self._links.usable()
        return next((link for link in candidates if link.worker_id not in request.tried), None)

    def _watch(self, request: DecodeRequest, remote: RemotePrefill, delay_s: float) -> None:
        """(Re)start the wait for a sign of the job's life."""
        remote.stop_deadline()
        remote.deadline = asyncio.get_running_loop().call_later(
            delay_s, self._on_deadline, request, remote
        )

    def _on_deadline(self, request: DecodeRequest, remote: RemotePrefill) -> None:
        timeout_s = self._timeout_s
        silent_s = time.monotonic() - self._receiver.expected.heard_s(request.engine_id)
        if silent_s < timeout_s:
            self._watch(request, remote, timeout_s - silent_s)
        else:
            self._on_job_failed(request, remote, f"showed no life for {timeout_s:g} s")

    def _on_message(self, link: PrefillLink, message: ControlMessage) -> None:
        if not isinstance(message, PrefillDone | PromptScored | PrefillFailed):
            logger.warning("%s sent a %s here", link.worker_id, type(message).__name__)
            return
        request = self._by_job.get(message.job_id)
        if request is None or request.remote is None or request.remote.link is not link:
            return
        if isinstance(message, PrefillFailed):
            self._on_job_failed(request, request.remote, message.reason)
        elif isinstance(message, PromptScored):
            self.on_prompt_scored(request, message.prompt_logprobs)
        else:
            self._on_first_token(request, request.remote, message)

    def _on_first_token(
        self, request: DecodeRequest, remote: RemotePrefill, done: PrefillDone
    ) -> None:
        remote.done_s = time.monotonic()
        request.queue_s, request.prefill_s = done.queue_s, done.prefill_s
        first_token = request.first_token
        if first_token is None:
            first_token = request.first_token = done.first_token
            self.on_first_token(request, done, remote.link.worker_id)
        completion = Completion(remote.job_id, first_token, remote.note_activated)
        self._engine.submit(
            lambda _core: self._receiver.expected.complete(request.engine_id, completion),
            admitted=True,
        )

    def on_running(self, request: DecodeRequest) -> None:
        """Note that a request's sequence runs on, be it with the blocks of a job given up since."""
        remote = request.remote
        if remote is not None and not remote.activated_s:
            self.cancel(request)
        elif remote is not None:
            request.transfer_s = remote.activated_s - remote.done_s
            remote.stop_deadline()
            self._by_job.pop(remote.job_id, None)
            request.remote = None

    def _on_job_failed(self, request: DecodeRequest, remote: RemotePrefill, reason: str) -> None:
        if request.remote is not remote:
            return
        logger.warning(
            "prefill of %s by %s failed: %s", request.engine_id, remote.link.worker_id, reason
        )
        self.cancel(request)
        job = self._receiver.expected.new_job(request.engine_id, len(request.tried) + 1)
        self._engine.submit(
            lambda _core: self._receiver.expected.retry(request.engine_id, job), admitted=True
        )
        self._begin(request, job)

    def _on_link_lost(self, link: PrefillLink) -> None:
        for request in list(self._by_job.values()):
            if request.remote is not None and request.remote.link is link:
                self._on_job_failed(request, request.remote, "the worker is gone")

    def cancel(self, request: DecodeRequest) -> None:
        """Void a request's job on both sides."""
        remote, request.remote = request.remote, None
        if remote is not None:
            remote.stop_deadline()
            self._by_job.pop(remote.job_id, None)
            remote.link.post(CancelPrefill(job_id=remote.job_id))

    def _prefill_here(self, request: DecodeRequest, reason: LocalPrefill) -> None:
        counter = self._local_prefills.labels(reason)
        first_token = request.first_token

        def recompute_locally(core: EngineCore) -> None:
            sequence = core.get(request.engine_id)
            if sequence is not None and sequence.status is RequestStatus.RESERVED:
                core.recompute_locally(sequence, first_token)
                counter.inc()

        self._engine.submit(recompute_locally, admitted=True)
