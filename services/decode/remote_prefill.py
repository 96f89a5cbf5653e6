"""Prompts of a decode worker that prefill workers compute: jobs, their pieces, their failures.

reserved --> Prefill --> pieces --> scatterer --> PieceAck --+
                |                                            +-- all there: the scatterer activates
                +------> PrefillDone: first token -----------+
                |
                +------> failed, silent, lost: next worker, at last a local prefill
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable

from pagewire.services.decode.prefill_links import PrefillLink, PrefillLinks
from pagewire.services.decode.requests import DecodeRequest, RemotePrefill
from pagewire.services.decode.scatterer import Completion, PieceFate, PieceScatterer
from pagewire.shared.engine.core import EngineCore
from pagewire.shared.protocol import (
    CancelPrefill,
    ControlMessage,
    PieceAck,
    PieceHeader,
    PieceNack,
    PrefillDone,
    PrefillFailed,
    ProbeDone,
)
from pagewire.shared.request import RequestStatus
from pagewire.shared.transfer.base import KvTransport, ReceivedPiece
from pagewire.shared.worker.engine_handle import EngineHandle
from pagewire.shared.worker.metrics import LocalPrefill
from pagewire.shared.worker.runtime import WorkerRuntime

logger = logging.getLogger(__name__)


class RemotePrefills:
    """The prefill jobs of a decode worker's requests, at most one a request.

    Args:
        runtime: of this worker.
        engine: that goes on with what they compute.
        on_reserved: called with a request's name in the engine, the position of the first block
            that is missing, and the number of all its blocks.
        on_first_token: called once a request, with the message and the worker that sent it.
    """

    def __init__(
        self,
        runtime: WorkerRuntime,
        engine: EngineHandle,
        on_reserved: Callable[[str, int, int], None],
        on_first_token: Callable[[DecodeRequest, PrefillDone, str], None],
    ) -> None:
        self._runtime, self._engine = runtime, engine
        self._tell_first_token = on_first_token
        self._by_job: dict[str, DecodeRequest] = {}
        self._parts = engine.parts
        self._scatterer = PieceScatterer(
            engine.core,
            engine.moves,
            engine.in_loop(self._on_scattered),
            engine.in_loop(on_reserved),
        )
        self._tell_activated = engine.in_loop(self._on_activated)
        engine.add_hook(self._scatterer)
        self._vigil = runtime.vigil(lambda: bool(self._by_job))
        self._links = PrefillLinks(runtime, runtime.directory, self._on_message, self._on_link_lost)

    def start(self) -> None:
        """Keep links to prefill workers, take pieces."""
        tasks = self._runtime.tasks
        tasks.spawn(self._links.keep_open(), "keeping links to prefill workers")
        for transport in self._runtime.transports.values():
            tasks.spawn(self._receive(transport), f"receiving over {transport.name}")

    def close(self) -> None:
        """Stop waiting, close the links."""
        for request in self._by_job.values():
            if request.remote is not None:
                request.remote.stop_deadline()
        self._links.close()

    # A job and its worker

    def begin(self, request: DecodeRequest) -> None:
        """Ask the next prefill worker; none left means that this one does it."""
        while (link := self._next_link(request)) is not None:
            request.tried.add(link.worker_id)
            job_id = secrets.token_hex(16)
            ticket = request.ticket(
                job_id, self._runtime.worker_id, self._runtime.epoch, link.epoch
            )
            if link.post(ticket):
                request.remote = RemotePrefill(job_id, link)
                self._by_job[job_id] = request
                self._vigil.begin()
                self._watch(request, request.remote)
                return
        self._prefill_here(request, "failed" if request.tried else "no_link")

    def _next_link(self, request: DecodeRequest) -> PrefillLink | None:
        """The first of the router's choices that is alive and untried, else any such worker."""
        chosen = [self._links.get(worker) for worker in request.message.prefill_workers]
        candidates = [link for link in chosen if link is not None] + self._links.usable()
        return next((link for link in candidates if link.worker_id not in request.tried), None)

    def _watch(self, request: DecodeRequest, remote: RemotePrefill) -> None:
        """(Re)start the wait for a sign of the job's life."""
        remote.stop_deadline()
        timeout = self._runtime.settings.prefill_timeout_s
        remote.deadline = asyncio.get_running_loop().call_later(
            timeout, self._on_job_failed, request, remote, f"showed no life for {timeout:g} s"
        )

    def _on_message(self, link: PrefillLink, message: ControlMessage) -> None:
        if not isinstance(message, PrefillDone | PrefillFailed):
            logger.warning("%s sent a %s here", link.worker_id, type(message).__name__)
            return
        request = self._by_job.get(message.job_id)
        if request is None or request.remote is None or request.remote.link is not link:
            return
        if isinstance(message, PrefillFailed):
            self._on_job_failed(request, request.remote, message.reason)
        else:
            self._on_first_token(request, request.remote, message)

    def _on_first_token(
        self, request: DecodeRequest, remote: RemotePrefill, done: PrefillDone
    ) -> None:
        remote.done_s = time.monotonic()
        request.queue_s, request.prefill_s = done.queue_s, done.prefill_s
        self._watch(request, remote)
        first_token = request.first_token
        if first_token is None:
            first_token = request.first_token = done.first_token
            self._tell_first_token(request, done, remote.link.worker_id)
        completion = Completion(
            remote.job_id,
            range(request.first_block, request.num_blocks),
            self._parts.whole,
            first_token,
            lambda: self._tell_activated(request, remote, time.monotonic()),
        )
        self._engine.submit(
            lambda core: self._scatterer.complete(request.engine_id, completion), admitted=True
        )

    def _on_activated(self, request: DecodeRequest, remote: RemotePrefill, now: float) -> None:
        """A sequence runs on with the blocks of a job, which may have been given up meanwhile."""
        request.transfer_s = now - remote.done_s
        if request.remote is not remote:
            self.cancel(request)
            return
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
        self.begin(request)

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
        counter = self._runtime.transfer_metrics.local_prefills.labels(reason)
        first_token = request.first_token

        def fall_back(core: EngineCore) -> None:
            sequence = core.get(request.engine_id)
            if sequence is not None and sequence.status is RequestStatus.RESERVED:
                core.fall_back(sequence, first_token)
                counter.inc()

        self._engine.submit(fall_back, admitted=True)

    # Blocks that arrive

    async def _receive(self, transport: KvTransport) -> None:
        while True:
            self._on_piece(await transport.recv(), transport.name)

    def _on_piece(self, received: ReceivedPiece, transport: str) -> None:
        header, slot = received.header, received.slot
        if header.kind == "probe":
            slot.release()
            link = self._links.get(received.peer_id)
            if link is not None:
                link.post(ProbeDone(probe_id=header.job_id, piece=header.piece))
            return
        metrics = self._runtime.transfer_metrics
        metrics.bytes.labels("received", transport, received.peer_id).inc(header.nbytes)
        request = self._by_job.get(header.job_id)
        if request is None or not self._is_covered(request, received):
            slot.release()
            metrics.pieces.labels("received", "unwanted").inc()
            return
        engine_id = request.engine_id
        self._engine.submit(
            lambda core: self._scatterer.scatter(engine_id, header, slot), admitted=True
        )

    def _is_covered(self, request: DecodeRequest, received: ReceivedPiece) -> bool:
        """Whether the job's ticket covers a piece: worker, epochs, parts, positions, size."""
        header, remote = received.header, request.remote
        positions = set(header.positions)  # twice the same would be written by two at once
        nbytes = self._parts.packed_bytes(len(positions), header.num_parts)
        return (
            remote is not None
            and received.peer_id == remote.link.worker_id
            and header.prefill_epoch == remote.link.epoch
            and header.decode_epoch == self._runtime.epoch
            and 0 < header.num_parts <= self._parts.count - header.first_part
            and header.nbytes == nbytes
            and len(positions) == len(header.positions)
            and all(request.first_block <= p < request.num_blocks for p in positions)
        )

    def _on_scattered(self, engine_id: str, header: PieceHeader, fate: PieceFate) -> None:
        self._runtime.transfer_metrics.pieces.labels("received", fate.name.lower()).inc()
        request = self._by_job.get(header.job_id)
        if request is None or request.engine_id != engine_id or request.remote is None:
            return
        remote = request.remote
        self._watch(request, remote)
        if fate is PieceFate.SCATTERED:
            remote.link.post(PieceAck(job_id=header.job_id, piece=header.piece))
        elif fate is PieceFate.DAMAGED:
            logger.error("a KV piece from %s arrived damaged", remote.link.worker_id)
            remote.link.post(PieceNack(job_id=header.job_id, piece=header.piece))
