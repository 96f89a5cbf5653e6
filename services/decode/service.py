"""The decode service: answer requests, with prompts computed by prefill workers.

    Generate --> engine: queue, reserve blocks --> Prefill to a prefill worker
                                                      |
    pieces --> staging --> scatterer --> PieceAck     |
                              all there --+-----------+-- PrefillDone: first token
                                          v
                                     batch --> TokenBatch a step

A request owns its sequence in the engine and at most one prefill job. A job that fails or shows
no life is replaced by another worker's, and when there is none, by a local prefill.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections import defaultdict

from pagewire.services.decode.prefill_links import PrefillLink, PrefillLinks
from pagewire.services.decode.requests import DecodeRequest, RemotePrefill
from pagewire.services.decode.scatterer import PieceFate, PieceScatterer
from pagewire.shared.engine.build import new_sequence
from pagewire.shared.engine.core import EngineCore, StepOutput
from pagewire.shared.engine.sequence import Sequence
from pagewire.shared.errors import InvalidRequestError, OverloadedError
from pagewire.shared.protocol import (
    Cancel,
    CancelPrefill,
    ControlMessage,
    Generate,
    PieceAck,
    PieceHeader,
    PieceNack,
    PrefillDone,
    PrefillFailed,
    ProbeDone,
    Refused,
    TokenBatch,
    TokenOutput,
)
from pagewire.shared.request import RequestStatus
from pagewire.shared.transfer.base import KvTransport, ReceivedPiece
from pagewire.shared.worker.runtime import WorkerRuntime

logger = logging.getLogger(__name__)


class DecodeService:
    """Requests of all routers that are connected."""

    def __init__(self, runtime: WorkerRuntime) -> None:
        self._runtime = runtime
        self._ids = itertools.count(1)
        self._requests: dict[str, DecodeRequest] = {}
        self._by_router: dict[tuple[str, str], DecodeRequest] = {}
        self._by_job: dict[str, DecodeRequest] = {}
        self._scatterer = PieceScatterer(runtime.built.runner, runtime.in_loop(self._on_scattered))
        core = runtime.built.core
        core.hooks.append(self._scatterer)
        core.scheduler.on_reserved = self._announce_reservation
        self.links = PrefillLinks(
            runtime, runtime.directory, self._on_prefill_message, self._on_link_lost
        )

    @property
    def num_active(self) -> int:
        """Requests that are not finished."""
        return len(self._requests)

    def start(self) -> None:
        """Keep links to prefill workers, take pieces."""
        self._runtime.tasks.spawn(self.links.keep_open(), "keeping links to prefill workers")
        for transport in self._runtime.transports.values():
            self._runtime.tasks.spawn(self._receive(transport), f"receiving over {transport.name}")

    async def close(self) -> None:
        """Close the links."""
        for request in self._requests.values():
            if request.remote is not None:
                request.remote.stop_deadline()
        self.links.close()

    # Routers

    def on_message(self, peer_id: str, message: ControlMessage) -> None:
        """Take a router's message."""
        match message:
            case Generate():
                self._on_generate(peer_id, message)
            case Cancel():
                request = self._by_router.get((peer_id, message.request_id))
                if request is not None:
                    self._cancel(request)
            case _:
                logger.warning("%s sent a %s here", peer_id, type(message).__name__)

    def on_peer_lost(self, peer_id: str) -> None:
        """Cancel all requests of a router that is gone."""
        for request in [r for r in self._requests.values() if r.peer_id == peer_id]:
            self._cancel(request)

    def _on_generate(self, peer_id: str, message: Generate) -> None:
        try:
            self._check(peer_id, message)
        except InvalidRequestError as exc:
            self._refuse(peer_id, message.request_id, exc)
            return
        if self._runtime.is_draining:
            refusal = Refused(
                request_id=message.request_id, reason="draining", message="shutting down"
            )
            self._runtime.server.post(peer_id, refusal)
            return
        request = DecodeRequest(peer_id, message, engine_id=f"r{next(self._ids)}")
        self._requests[request.engine_id] = request
        self._by_router[peer_id, message.request_id] = request
        self._runtime.engine.submit(lambda core: self._add(core, request))

    def _check(self, peer_id: str, message: Generate) -> None:
        message.sampling.validate()
        vocab_size = self._runtime.built.config.vocab_size
        if not message.prompt_token_ids:
            raise InvalidRequestError("the prompt is empty", "prompt")
        if any(t >= vocab_size for t in (*message.prompt_token_ids, *message.output_token_ids)):
            raise InvalidRequestError(f"token ids must be below {vocab_size}", "prompt")
        if len(message.output_token_ids) >= message.sampling.max_tokens:
            raise InvalidRequestError("nothing is left to generate", "max_tokens")
        if (peer_id, message.request_id) in self._by_router:
            raise InvalidRequestError("there is a request of this id already", "request_id")

    def _refuse(
        self, peer_id: str, request_id: str, error: InvalidRequestError | OverloadedError
    ) -> None:
        overloaded = isinstance(error, OverloadedError)
        self._runtime.server.post(
            peer_id,
            Refused(
                request_id=request_id,
                reason="overloaded" if overloaded else "invalid",
                message=str(error)[:2048],
                param=error.param if isinstance(error, InvalidRequestError) else None,
            ),
        )

    def _add(self, core: EngineCore, request: DecodeRequest) -> None:
        """Queue a request's sequence. Runs in the engine's thread."""
        message = request.message
        sequence = new_sequence(
            request.engine_id,
            message.prompt_token_ids,
            message.sampling,
            self._runtime.built.config.eos_token_ids,
            message.output_token_ids,
        )
        sequence.remote_prefill = bool(message.prefill_workers)
        try:
            core.add(sequence)
        except (InvalidRequestError, OverloadedError) as exc:
            self._runtime.in_loop(self._on_not_added)(request, exc)

    def _on_not_added(
        self, request: DecodeRequest, error: InvalidRequestError | OverloadedError
    ) -> None:
        if self._forget(request):
            self._refuse(request.peer_id, request.message.request_id, error)

    def _cancel(self, request: DecodeRequest) -> None:
        if self._forget(request):
            self._drop_job(request)
            self._runtime.engine.submit(lambda core: core.abort(request.engine_id))

    def _forget(self, request: DecodeRequest) -> bool:
        known = self._requests.pop(request.engine_id, None) is not None
        self._by_router.pop((request.peer_id, request.message.request_id), None)
        return known

    # Prompts that others compute

    def _announce_reservation(self, sequence: Sequence) -> None:
        """Tell the event loop which blocks are reserved. Runs in the engine's thread."""
        block_size = self._runtime.built.layout.block_size
        self._runtime.in_loop(self._on_reserved)(
            sequence.request_id,
            sequence.num_computed_tokens // block_size,
            len(sequence.block_ids),
        )

    def _on_reserved(self, engine_id: str, first_block: int, num_blocks: int) -> None:
        request = self._requests.get(engine_id)
        if request is not None:
            request.first_block, request.num_blocks = first_block, num_blocks
            self._send_away(request)

    def _send_away(self, request: DecodeRequest) -> None:
        """Ask the next prefill worker; none left means that this one does it."""
        while (link := self._next_link(request)) is not None:
            request.tried.add(link.worker_id)
            job_id = secrets.token_hex(16)
            ticket = request.ticket(job_id, self._runtime.worker_id, self._runtime.epoch, link)
            if link.post(ticket):
                missing = set(range(request.first_block, request.num_blocks))
                request.remote = RemotePrefill(job_id, link, missing)
                self._by_job[job_id] = request
                self._watch(request, request.remote)
                return
        self._prefill_here(request, "no_worker")

    def _next_link(self, request: DecodeRequest) -> PrefillLink | None:
        """The first of the router's choices that is alive and untried, else any such worker."""
        chosen = [self.links.get(worker) for worker in request.message.prefill_workers]
        candidates = [link for link in chosen if link is not None] + self.links.usable()
        return next((link for link in candidates if link.worker_id not in request.tried), None)

    def _watch(self, request: DecodeRequest, remote: RemotePrefill) -> None:
        """(Re)start the wait for a sign of the job's life."""
        remote.stop_deadline()
        timeout = self._runtime.settings.prefill_timeout_s
        remote.deadline = asyncio.get_running_loop().call_later(
            timeout, self._on_job_failed, request, remote, f"showed no life for {timeout:g} s"
        )

    def _on_prefill_message(self, link: PrefillLink, message: ControlMessage) -> None:
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
        remote.first_token = done.first_token
        remote.done_s = time.monotonic()
        request.queue_s, request.prefill_s = done.queue_s, done.prefill_s
        self._watch(request, remote)
        if request.first_token is None:
            request.first_token = done.first_token
            prompt = len(request.message.prompt_token_ids)
            self._post_outputs(
                request.peer_id,
                [
                    TokenOutput(
                        request_id=request.message.request_id,
                        token_ids=[done.first_token],
                        cached_tokens=min(done.cached_tokens, prompt),
                        prefill_worker=remote.link.worker_id,
                    )
                ],
            )
        self._activate_if_complete(request, remote)

    def _on_job_failed(self, request: DecodeRequest, remote: RemotePrefill, reason: str) -> None:
        if request.remote is not remote:
            return
        logger.warning(
            "prefill of %s by %s failed: %s", request.engine_id, remote.link.worker_id, reason
        )
        self._drop_job(request)
        self._send_away(request)

    def _on_link_lost(self, link: PrefillLink) -> None:
        for request in [r for r in self._requests.values() if r.remote and r.remote.link is link]:
            if request.remote is not None:
                self._on_job_failed(request, request.remote, "the worker is gone")

    def _drop_job(self, request: DecodeRequest) -> None:
        """Void a request's job on both sides."""
        remote, request.remote = request.remote, None
        if remote is not None:
            remote.stop_deadline()
            self._by_job.pop(remote.job_id, None)
            remote.link.post(CancelPrefill(job_id=remote.job_id))

    def _prefill_here(self, request: DecodeRequest, reason: str) -> None:
        self._runtime.transfer_metrics.local_prefills.labels(reason).inc()
        first_token = request.first_token

        def fall_back(core: EngineCore) -> None:
            sequence = core.get(request.engine_id)
            if sequence is not None and sequence.status is RequestStatus.RESERVED:
                core.fall_back(sequence, first_token)

        self._runtime.engine.submit(fall_back)

    # Blocks that arrive

    async def _receive(self, transport: KvTransport) -> None:
        while True:
            received = await transport.recv()
            try:
                self._on_piece(received, transport.name)
            except OverloadedError:
                received.slot.release()
                logger.warning("a piece was dropped: the engine does not keep up")

    def _on_piece(self, received: ReceivedPiece, transport: str) -> None:
        header, slot = received.header, received.slot
        if header.kind == "probe":
            slot.release()
            link = self.links.get(received.peer_id)
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
        self._runtime.engine.submit(
            lambda core: self._scatterer.scatter(engine_id, core.get(engine_id), header, slot)
        )

    def _is_covered(self, request: DecodeRequest, received: ReceivedPiece) -> bool:
        """Whether the job's ticket covers a piece: worker, epochs, positions, size."""
        header, remote = received.header, request.remote
        return (
            remote is not None
            and received.peer_id == remote.link.worker_id
            and header.prefill_epoch == remote.link.epoch
            and header.decode_epoch == self._runtime.epoch
            and len(header.positions) == len(header.checksums)
            and header.nbytes == len(header.positions) * self._runtime.built.layout.block_bytes
            and all(request.first_block <= p < request.num_blocks for p in header.positions)
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
            remote.missing.difference_update(header.positions)
            self._activate_if_complete(request, remote)
        elif fate is PieceFate.DAMAGED:
            logger.error("a KV piece from %s arrived damaged", remote.link.worker_id)
            remote.link.post(PieceNack(job_id=header.job_id, piece=header.piece))

    def _activate_if_complete(self, request: DecodeRequest, remote: RemotePrefill) -> None:
        first_token = request.first_token
        if not remote.is_complete or first_token is None:
            return
        remote.stop_deadline()
        self._by_job.pop(remote.job_id, None)
        request.remote = None
        request.transfer_s = time.monotonic() - remote.done_s

        def activate(core: EngineCore) -> None:
            sequence = core.get(request.engine_id)
            if sequence is not None and sequence.status is RequestStatus.RESERVED:
                core.activate(sequence, first_token)

        self._runtime.engine.submit(activate)

    # Tokens

    def on_outputs(self, outputs: list[StepOutput]) -> None:
        """Take a step's outputs and post them, one message a router."""
        by_peer: defaultdict[str, list[TokenOutput]] = defaultdict(list)
        for output in outputs:
            request = self._requests.get(output.request_id)
            if request is not None:
                by_peer[request.peer_id].append(self._token_output(request, output))
                if output.finish_reason is not None:
                    self._forget(request)
        for peer_id, batch in by_peer.items():
            self._post_outputs(peer_id, batch)

    def _token_output(self, request: DecodeRequest, output: StepOutput) -> TokenOutput:
        cached_tokens = output.cached_tokens
        if cached_tokens is not None and request.first_token is None:
            request.queue_s, request.prefill_s = output.queue_s, output.prefill_s
        elif request.first_token is not None:
            cached_tokens = None
        return TokenOutput(
            request_id=request.message.request_id,
            token_ids=output.token_ids,
            finish_reason=output.finish_reason,
            cached_tokens=cached_tokens,
            error=output.error,
            timings=request.timings() if output.finish_reason is not None else None,
        )

    def _post_outputs(self, peer_id: str, outputs: list[TokenOutput]) -> None:
        self._runtime.server.post(peer_id, TokenBatch(outputs=outputs))
