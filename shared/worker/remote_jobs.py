"""Prompts that other workers compute: takes the router's choice, retries others, computes here.

    reserved --> Prefill --> segments (received by KvReceiver) ---+-- both complete: it decodes
                    |                                             |
                    +------> PrefillDone: first token ------------+
                    |
                    +------> failed, silent, lost: next worker; if none is left, a local prefill

All of this runs in the engine's thread. A request has at most one job at a time.
"""

from __future__ import annotations

import logging
import time

import msgspec
from prometheus_client import Counter

from pagewire.shared.cluster.crash_reports import CrashReport
from pagewire.shared.control.protocol import MAX_STRIKES, Blamed
from pagewire.shared.engine.core import EngineCore
from pagewire.shared.engine.scheduling.status import RequestStatus
from pagewire.shared.transfer.endpoint.receiver import KvReceiver
from pagewire.shared.transfer.endpoint.receiver_jobs import ReceiverJob
from pagewire.shared.transfer.endpoint.receiver_link import ReceiverLink
from pagewire.shared.transfer.job_messages import (
    CancelPrefill,
    JobReport,
    PrefillDone,
    PrefillFailed,
    PromptScored,
)
from pagewire.shared.worker.decode_request import DecodeRequest
from pagewire.shared.worker.engine_handle import EngineHandle
from pagewire.shared.worker.metrics import LocalPrefill
from pagewire.shared.worker.router_requests import RouterRequests

logger = logging.getLogger(__name__)


def request_of(job_name: str) -> str:
    """Return a job's name without the number of its attempt: it may have been retried since."""
    return job_name.rpartition(".")[0]


class RemoteJobs:
    """The prefill jobs that other workers do for requests of this one.

    Args:
        engine: this worker's engine, which decodes after the prefill.
        receiver: receives the jobs' blocks.
        requests: the requests of routers. The event loop owns them, and is notified.
        local_prefills: counts the prompts that this worker computes instead, by reason.
    """

    def __init__(
        self,
        engine: EngineHandle,
        receiver: KvReceiver,
        requests: RouterRequests,
        local_prefills: Counter,
    ) -> None:
        self._engine, self._receiver = engine, receiver
        self._requests, self._local_prefills = requests, local_prefills
        self._on_first_token = engine.in_loop(requests.on_first_token)
        self._on_prompt_scored = engine.in_loop(requests.on_prompt_scored)
        self._on_arrived = engine.in_loop(requests.on_arrived)
        self._on_blamed = engine.in_loop(requests.on_blamed)

    def begin(self, job: ReceiverJob) -> None:
        """Have a prefill worker compute a request's prompt, unless the request was cancelled."""
        request = self._requests.find(job.request_id)
        if request is not None:
            request.is_remote = True
            sequence = self._engine.core.sequences.get(request.engine_id)
            request.time(
                wait_s=self._receiver.clock() - request.arrived_s,
                held_tokens=0 if sequence is None else sequence.num_cached_tokens or 0,
            )
            self._begin(request, job)

    def _begin(self, request: DecodeRequest, job: ReceiverJob) -> None:
        """Send the job to the next prefill worker; if none is left, compute the prompt locally."""
        if request.strikes == MAX_STRIKES:
            return  # no further worker gets it: the router cancels it
        while (link := self._next_link(request)) is not None:
            request.tried.add(link.peer)
            if self._receiver.post(link, request.prefill_message(job)):
                job.link = link
                text = "%s: prefill by %s, job %s"
                logger.debug(text, request.engine_id, link.peer, job.name, extra=request.log)
                return
        self._prefill_here(request, "failed" if request.tried else "no_link")

    def _next_link(self, request: DecodeRequest) -> ReceiverLink | None:
        """Return the link to the first untried worker: the router's choices first, then others."""
        links = {link.peer: link for link in self._receiver.links if link.is_tested}
        names = (*request.message.prefill_workers, *links)
        return next((links[n] for n in names if n in links and n not in request.tried), None)

    def on_report(self, job: ReceiverJob, message: JobReport) -> None:
        """Handle a prefill worker's report about a job; ignore it if the job was given up."""
        if (link := job.link) is None:
            return
        if isinstance(message, PrefillFailed):
            self.give_up(job, message.reason)
        elif (request := self._requests.find(job.request_id)) is None:
            return  # it was cancelled
        elif isinstance(message, PromptScored):
            self._on_prompt_scored(request, message.prompt_logprobs)
        else:
            self._on_done(request, job, link.peer, message)

    def _on_done(
        self, request: DecodeRequest, job: ReceiverJob, peer: str, done: PrefillDone
    ) -> None:
        job.done_s = self._receiver.clock()
        # Not `done.queue_s` alone: the prefill worker does not know how long the message waited
        # until it was read between two steps, or that another worker failed before.
        asked_s = request.arrived_s + request.timings.wait_s
        request.time(
            queue_s=max(done.queue_s, job.done_s - asked_s - done.prefill_s),
            prefill_s=done.prefill_s,
            chunks=done.chunks,
            prefill_worker=peer,
            cached_tokens=done.cached_tokens,
        )
        if request.first_token is None:
            request.first_token = done.first_token
            # It may have come as soon as the messages before it were read.
            unread_s = round(time.monotonic() - self._engine.thread.commands_s, 3)
            load = msgspec.structs.replace(done.load, age_s=done.load.age_s + unread_s)
            self._on_first_token(request, msgspec.structs.replace(done, load=load), peer)
        self._receiver.complete(job, request.first_token)

    def record_transfer(self, job: ReceiverJob) -> None:
        """Record the transfer in the request's timings."""
        request, now = self._requests.find(job.request_id), self._receiver.clock()
        if request is None or job.link is None:
            return  # it was cancelled
        first = job.first_segment_s
        request.time(
            transfer_s=now - job.done_s,
            arriving_s=0.0 if first is None else now - first,
            kv_bytes=job.num_bytes,
            segments=job.num_segments,
            transport=job.link.transport or None,
        )
        request.add_transfer_span()
        if request.message.timed:
            self._on_arrived(request)

    def withdraw(self, job: ReceiverJob) -> None:
        """Cancel a job at the prefill worker that has it."""
        link, job.link = job.link, None
        if link is not None:
            self._receiver.post(link, CancelPrefill(job_id=job.name))

    def suspect(self, suspected: Blamed) -> None:
        """Note that jobs may be why their worker ends. Those that are to blame begin no more."""
        names = {request_of(name) for name in suspected.request_ids}
        for job in [job for job in self._receiver.jobs if request_of(job.name) in names]:
            request = self._requests.find(job.request_id)
            if request is None:
                continue  # it was cancelled
            strikes = min(MAX_STRIKES, request.strikes + suspected.strikes)
            for each in request.group:  # another one would have the same prompt computed
                each.strikes = strikes
                if (sequence := self._engine.core.sequences.get(each.engine_id)) is not None:
                    sequence.strikes = strikes
            self._on_blamed(request, suspected)

    def await_link(self, link: ReceiverLink) -> bool:
        """Whether a job waits for the prefill worker at the other end of a link."""
        return any(job.link is link for job in self._receiver.jobs)

    def move(self, link: ReceiverLink, crash: CrashReport | None) -> None:
        """Give the jobs of an ended link to other workers.

        Args:
            link: the link.
            crash: says who may be why, if the worker at its other end crashed.
        """
        if crash is not None:
            self.suspect(crash.blamed())
        for job in self._receiver.jobs:
            if job.link is link:
                self.give_up(job, "the link is lost")

    def give_up(self, job: ReceiverJob, reason: str) -> None:
        """Give a job up, and have the next worker do it, unless the request was cancelled."""
        if (link := job.link) is None:
            return  # it was given up already, or this worker computes the prompt
        self.withdraw(job)
        request = self._requests.find(job.request_id)
        if request is not None:
            text = "prefill of %s by %s failed: %s"
            logger.warning(text, request.engine_id, link.peer, reason, extra=request.log)
            self._begin(request, self._receiver.jobs.retry(job))

    def _prefill_here(self, request: DecodeRequest, reason: LocalPrefill) -> None:
        logger.debug("%s: local prefill, %s", request.engine_id, reason, extra=request.log)

        def recompute_locally(core: EngineCore) -> None:
            sequence = core.sequences.get(request.engine_id)
            if sequence is not None and sequence.status is RequestStatus.RESERVED:
                core.sequences.recompute_locally(sequence, request.first_token)
                self._local_prefills.labels(reason).inc()

        # Not at once: the plan that reserves the blocks may be on its way to the device.
        self._engine.submit(recompute_locally, admitted=True)
