"""Prefill jobs of a decode worker: takes the router's choice, retries others, computes locally.

    reserved --> Prefill --> segments (the KV receiver's) --------+-- all there: it runs on
                    |                                             |
                    +------> PrefillDone: first token ------------+
                    |
                    +------> failed, silent, lost: next worker; when none is left, a local prefill

All of it runs in the engine's thread. A request has at most one job.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client import Counter

from pagewire.services.decode.requests import DecodeRequest
from pagewire.shared.engine.core import EngineCore
from pagewire.shared.engine.scheduling.status import RequestStatus
from pagewire.shared.kv.endpoint.expectations import Expected
from pagewire.shared.kv.endpoint.job_callbacks import JobCallbacks
from pagewire.shared.kv.endpoint.receiver import KvReceiver
from pagewire.shared.kv.endpoint.receiver_link import ReceiverLink
from pagewire.shared.kv.job_messages import (
    CancelPrefill,
    JobReport,
    PrefillDone,
    PrefillFailed,
    PromptScored,
)
from pagewire.shared.logprobs import PromptLogprobs
from pagewire.shared.worker.engine_handle import EngineHandle
from pagewire.shared.worker.metrics import LocalPrefill

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Job:
    request: DecodeRequest
    expected: Expected
    link: ReceiverLink
    done_s: float = 0.0


class RemoteJobs(JobCallbacks):
    """The prefill jobs of a decode worker's requests.

    Args:
        engine: that goes on with what they compute.
        receiver: of their blocks.
        local_prefills: counts by reason what is computed here instead.
        timeout_s: without a sign of a job's life, after which the next worker is asked.

    Attributes, which the service sets:
        find: returns a live request by its name in the engine.
        on_first_token: called once a request, with the message and the worker that sent it.
        on_prompt_scored: called with log probabilities of the request's prompt, before that; again
            from the start if another worker computes it again.
        on_arrived: called when all of a request's KV is there; its timings are then known.
    """

    find: Callable[[str], DecodeRequest | None]
    on_first_token: Callable[[DecodeRequest, PrefillDone, str], None]
    on_prompt_scored: Callable[[DecodeRequest, PromptLogprobs], None]
    on_arrived: Callable[[DecodeRequest], None]

    def __init__(
        self, engine: EngineHandle, receiver: KvReceiver, local_prefills: Counter, timeout_s: float
    ) -> None:
        self._engine, self._receiver = engine, receiver
        self._local_prefills, self._timeout_s = local_prefills, timeout_s
        self._jobs: dict[str, _Job] = {}  # by the request's name in the engine
        receiver.jobs = self

    def on_reserved(self, expected: Expected) -> None:
        """Ask a prefill worker for a request's prompt; one that was cancelled needs none."""
        request = self.find(expected.request_id)
        if request is not None:
            request.is_remote = True
            sequence = self._engine.core.get(request.engine_id)
            request.time(
                wait_s=self._receiver.clock() - request.arrived_s,
                held_tokens=0 if sequence is None else sequence.num_cached_tokens or 0,
            )
            self._begin(request, expected)

    def _begin(self, request: DecodeRequest, expected: Expected) -> None:
        """Ask the next prefill worker; none left means that this one does it."""
        while (link := self._next_link(request)) is not None:
            request.tried.add(link.peer)
            if self._receiver.post(link, request.ticket(expected)):
                self._jobs[request.engine_id] = _Job(request, expected, link)
                logger.debug(
                    "%s: prefill by %s, job %s",
                    request.engine_id,
                    link.peer,
                    expected.job,
                    extra=request.log,
                )
                return
        self._prefill_here(request, "failed" if request.tried else "no_link")

    def _next_link(self, request: DecodeRequest) -> ReceiverLink | None:
        """The first of the router's choices that is alive and untried, else any such worker."""
        links = {link.peer: link for link in self._receiver.tested_links}
        names = (*request.message.prefill_workers, *links)
        return next((links[n] for n in names if n in links and n not in request.tried), None)

    def on_message(self, link: ReceiverLink, message: JobReport) -> None:
        """Take what a prefill worker reports of a job; of one that was given up, nothing."""
        expected = self._receiver.expected.hear_of(message.job_id)
        job = None if expected is None else self._jobs.get(expected.request_id)
        if job is None or job.link is not link:
            return
        if isinstance(message, PrefillFailed):
            self._on_failed(job, message.reason)
        elif isinstance(message, PromptScored):
            self.on_prompt_scored(job.request, message.prompt_logprobs)
        else:
            self._on_done(job, message)

    def _on_done(self, job: _Job, done: PrefillDone) -> None:
        request, job.done_s = job.request, self._receiver.clock()
        # The prefill worker does not know how long a job waits to be read, between its steps, nor
        # that others have failed before.
        asked_s = request.arrived_s + request.timings.wait_s
        request.time(
            queue_s=max(done.queue_s, job.done_s - asked_s - done.prefill_s),
            prefill_s=done.prefill_s,
            chunks=done.chunks,
            prefill_worker=job.link.peer,
            cached_tokens=done.cached_tokens,
        )
        if request.first_token is None:
            request.first_token = done.first_token
            self.on_first_token(request, done, job.link.peer)
        self._receiver.complete(job.expected, request.first_token)

    def on_activated(self, expected: Expected) -> None:
        """Note how the blocks came, and how long they took after the first token."""
        job, now = self._jobs.pop(expected.request_id), self._receiver.clock()
        first = expected.first_segment_s
        job.request.time(
            transfer_s=now - job.done_s,
            arriving_s=0.0 if first is None else now - first,
            kv_bytes=expected.num_bytes,
            segments=expected.num_segments,
            carrier=job.link.carrier or None,
        )
        job.request.note_transfer()
        self.on_arrived(job.request)

    def on_withdrawn(self, request_id: str) -> None:
        """Void a request's job at the prefill worker."""
        job = self._jobs.pop(request_id, None)
        if job is not None:
            self._receiver.post(job.link, CancelPrefill(job_id=job.expected.job))

    def on_link_closed(self, link: ReceiverLink) -> None:
        """Give a link's jobs to others."""
        for job in [job for job in self._jobs.values() if job.link is link]:
            self._on_failed(job, "the worker is gone")

    def check_deadlines(self) -> None:
        """Give jobs to others that show no sign of life."""
        latest = self._receiver.clock() - self._timeout_s
        for job in [job for job in self._jobs.values() if job.expected.heard_s < latest]:
            self._on_failed(job, f"showed no life for {self._timeout_s:g} s")

    def _on_failed(self, job: _Job, reason: str) -> None:
        request = job.request
        if self._jobs.get(request.engine_id) is not job:
            return
        logger.warning(
            "prefill of %s by %s failed: %s",
            request.engine_id,
            job.link.peer,
            reason,
            extra=request.log,
        )
        self.on_withdrawn(request.engine_id)
        self._begin(request, self._receiver.expected.retry(job.expected))

    def _prefill_here(self, request: DecodeRequest, reason: LocalPrefill) -> None:
        counter = self._local_prefills.labels(reason)
        logger.debug("%s: prefill here, %s", request.engine_id, reason, extra=request.log)

        def recompute_locally(core: EngineCore) -> None:
            sequence = core.get(request.engine_id)
            if sequence is not None and sequence.status is RequestStatus.RESERVED:
                core.recompute_locally(sequence, request.first_token)
                counter.inc()

        # Not at once: the plan that reserves the blocks may be on its way to the device.
        self._engine.submit(recompute_locally, admitted=True)
