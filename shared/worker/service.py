"""A worker's service: what its peers may ask of it, whatever the worker prefers to do.

    router --Generate--> router_requests.py --reserved--> remote_jobs.py: another worker computes
                                                          the prompt, over prefill_links.py
    router --Embed-----> embedding_jobs.py
    worker --Prefill---> prefill_jobs.py: computes a prompt for that worker, over decode_links.py

Messages about prefill jobs pass over the KV links, in the engine's thread. All others come over the
control channel, in the event loop, which also opens the links.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from pagewire.shared.control.protocol import (
    Cancel,
    ControlMessage,
    Embed,
    Generate,
    KvHello,
    PrefillSoon,
)
from pagewire.shared.engine.step_output import StepOutputs
from pagewire.shared.transfer.endpoint.events import (
    JobActivated,
    JobFailed,
    JobReported,
    JobRequested,
    JobReserved,
    JobSilent,
    JobWithdrawn,
    KvEvent,
    LinkClosed,
    LinkLost,
    LinkTested,
)
from pagewire.shared.transfer.endpoint.receiver_link import ReceiverLink
from pagewire.shared.transfer.endpoint.sender_link import SenderLink
from pagewire.shared.worker.decode_links import DecodeLinks
from pagewire.shared.worker.embedding_jobs import EmbeddingJobs
from pagewire.shared.worker.engine_handle import EngineHandle
from pagewire.shared.worker.prefill_jobs import PrefillJobs
from pagewire.shared.worker.prefill_links import PrefillLinks
from pagewire.shared.worker.remote_jobs import RemoteJobs
from pagewire.shared.worker.router_requests import RouterRequests

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class WorkerService:
    """Passes messages and outputs on to their parts. Calls come from the event loop unless noted.

    Args:
        engine: this worker's engine.
        requests: requests of routers.
        embeddings: embeddings for routers.
        prefill_links: the links to workers that compute prompts for this one.
        decode_links: the links to workers for which this one computes prompts.
        jobs: the prompts of these workers.
        remote_jobs: the jobs that other workers do for this one.
    """

    engine: EngineHandle
    requests: RouterRequests
    embeddings: EmbeddingJobs
    prefill_links: PrefillLinks
    decode_links: DecodeLinks
    jobs: PrefillJobs
    remote_jobs: RemoteJobs
    _report_soon: Callable[[StepOutputs], None] = field(init=False)
    _on_link_event_soon: Callable[[KvEvent], None] = field(init=False)

    def __post_init__(self) -> None:
        self._report_soon = self.engine.in_loop(self._report)
        self._on_link_event_soon = self.engine.in_loop(self._on_link_event)

    @property
    def num_active(self) -> int:
        """Number of requests and jobs that draining waits for."""
        return len(self.requests) + len(self.embeddings) + len(self.jobs)

    def start(self) -> None:
        """Begin to open links to other workers."""
        self.prefill_links.start()

    def close(self) -> None:
        """Close the links that this worker has opened, and open no others."""
        self.prefill_links.close()

    def end_jobs(self) -> None:
        """End the spans of jobs that have not ended; the engine and the KV endpoint have."""
        self.jobs.end_all("the worker has stopped")

    def on_message(self, peer_id: str, message: ControlMessage) -> None:
        """Handle a message of a router or of another worker."""
        match message:
            case Generate():
                self.requests.start(peer_id, message)
            case Embed():
                self.embeddings.start(peer_id, message)
            case Cancel():
                if not self.requests.cancel(peer_id, message.request_id):
                    self.embeddings.cancel(peer_id, message.request_id)
            case KvHello():
                self.decode_links.open(peer_id, message)
            case PrefillSoon():
                self.engine.thread.expect_work()
            case _:
                logger.warning(
                    "ignoring an unexpected %s message from %s", type(message).__name__, peer_id
                )

    def on_peer_lost(self, peer_id: str) -> None:
        """Free what a peer owned: a router's requests, or another worker's link and its jobs."""
        self.requests.on_peer_lost(peer_id)
        self.embeddings.on_peer_lost(peer_id)
        self.decode_links.close(peer_id)

    def on_kv_event(self, event: KvEvent) -> None:
        """Handle what has happened at the KV endpoint. Runs in the engine's thread."""
        match event:
            case JobReserved(job):
                self.remote_jobs.begin(job)
            case JobWithdrawn(job):
                self.remote_jobs.withdraw(job)
            case JobReported(_, job, report):
                self.remote_jobs.on_report(job, report)
            case JobSilent(job, reason):
                self.remote_jobs.give_up(job, reason)
            case JobActivated(job):
                self.remote_jobs.record_transfer(job)
            case JobRequested(link, request):
                self.jobs.on_request(link, request)
            case JobFailed(name, link, reason):
                self.jobs.on_failed(name, link, reason)
            case LinkClosed(closed):
                if self.remote_jobs.await_link(closed):
                    self._on_link_event_soon(event)
            case _:
                self._on_link_event_soon(event)

    def _on_link_event(self, event: KvEvent) -> None:
        match event:
            case LinkTested(link):
                self.prefill_links.on_tested(link)
            case LinkLost(ReceiverLink() as link, reason):
                self.prefill_links.on_lost(link, reason)
            case LinkLost(SenderLink() as sender_link, reason):
                self.decode_links.on_lost(sender_link, reason)
            case LinkClosed(link):
                self.prefill_links.look_up_crash(link, partial(self.remote_jobs.move, link))

    def owners_of(self, engine_id: str) -> list[tuple[str, str]]:
        """Return who has a sequence of the engine computed. May be called in any thread.

        Returns:
            Connections, and what each calls its request or job; several if a sequence's prompt is
            computed for several requests.
        """
        if (link := self.jobs.link_of(engine_id)) is not None:
            peer_id = self.decode_links.connection_of(link)
            return [] if peer_id is None else [(peer_id, engine_id)]
        return self.requests.owners_of(engine_id) or self.embeddings.owners_of(engine_id)

    def on_outputs(self, outputs: StepOutputs) -> None:
        """Report the outputs of jobs, and pass on the others. Runs in the engine's thread."""
        others = [output for output in outputs.individual if not self.jobs.report(output)]
        if others or outputs.request_ids:
            self._report_soon(StepOutputs(outputs.request_ids, outputs.token_ids, others))

    def _report(self, outputs: StepOutputs) -> None:
        for output in self.requests.report(outputs):
            self.embeddings.report(output)
