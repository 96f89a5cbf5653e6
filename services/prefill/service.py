"""The prefill service: compute prompts, push their blocks, sample the first token.

    Prefill --> engine (chunks) --> packer --> transport --> PieceAck
                     |                                          |
                     +--> first token --> PrefillDone           +--> blocks become cached ones

The engine's thread computes and packs; everything else happens in the event loop. A job owns its
sequence's blocks until all are acknowledged, the job fails, or its decode worker is lost.
"""

from __future__ import annotations

import asyncio
import logging

from pagewire.services.prefill.announced import Announced
from pagewire.services.prefill.jobs import PrefillJob
from pagewire.services.prefill.packer import PiecePacker, StagedPiece
from pagewire.services.prefill.peers import DecodePeers
from pagewire.shared.engine.build import new_sequence
from pagewire.shared.engine.core import EngineCore
from pagewire.shared.engine.step_output import StepOutput, StepOutputs
from pagewire.shared.errors import InvalidRequestError, OverloadedError, TransferError
from pagewire.shared.protocol import (
    CancelPrefill,
    ControlMessage,
    KvHello,
    KvReady,
    PieceAck,
    PieceHeader,
    PieceNack,
    Prefill,
    PrefillDone,
    PrefillFailed,
    ProbeDone,
    clip_text,
)
from pagewire.shared.worker.engine_handle import EngineHandle
from pagewire.shared.worker.metrics import SentFate
from pagewire.shared.worker.runtime import WorkerRuntime

logger = logging.getLogger(__name__)


class PrefillService:
    """Jobs of all decode workers that are connected.

    Args:
        runtime: of this worker.
        engine: that computes them.
    """

    def __init__(self, runtime: WorkerRuntime, engine: EngineHandle) -> None:
        self._runtime, self._engine = runtime, engine
        self._tasks = runtime.tasks
        self._jobs: dict[str, PrefillJob] = {}
        self._next: Announced | None = None  # the piece that is packed next
        self._peers = DecodePeers(runtime)
        self._parts = engine.parts
        self._packer = PiecePacker(
            moves=engine.moves,
            staging=runtime.send_staging,
            block_size=engine.layout.block_size,
            parts=self._parts,
            on_packed=engine.in_loop(self._on_packed),
            on_packing=engine.in_loop(self._on_packing),
            on_dropped=engine.in_loop(self._on_dropped),
            on_failed=engine.in_loop(self._on_failed),
        )
        engine.add_hook(self._packer)
        self._vigil = runtime.vigil(lambda: bool(self._jobs))
        self._post = runtime.server.post
        runtime.transfer_metrics.show_sent()

    @property
    def num_active(self) -> int:
        """Jobs that are not finished."""
        return len(self._jobs)

    def start(self) -> None:
        """Nothing runs by itself: decode workers come here."""

    async def close(self) -> None:
        """Stop waiting for acknowledgements."""
        for job in self._jobs.values():
            job.stop_timers()

    def on_message(self, peer_id: str, message: ControlMessage) -> None:
        """Take a decode worker's message."""
        match message:
            case Prefill():
                self._on_prefill(peer_id, message)
            case CancelPrefill():
                job = self._jobs.get(message.job_id)
                if job is not None and job.peer_id == peer_id:
                    self._end(job)
            case PieceAck():
                self._on_ack(peer_id, message)
            case PieceNack():
                self._on_nack(peer_id, message)
            case KvHello():
                self._tasks.spawn(self._peers.open(peer_id, message), "opening a KV way")
            case KvReady():
                self._tasks.spawn(self._peers.probe(peer_id), "measuring a KV way")
            case ProbeDone():
                self._peers.on_probe_done(peer_id, message)
            case _:
                logger.warning("%s sent a %s here", peer_id, type(message).__name__)

    def on_peer_lost(self, peer_id: str) -> None:
        """End all jobs of a decode worker that is gone."""
        for job in [job for job in self._jobs.values() if job.peer_id == peer_id]:
            self._end(job)
        self._tasks.spawn(self._peers.forget(peer_id), "closing a KV way")

    # A job begins

    def _on_prefill(self, peer_id: str, ticket: Prefill) -> None:
        refusal = self._refusal_of(peer_id, ticket)
        if refusal is not None:
            self._post(peer_id, PrefillFailed(job_id=ticket.job_id, reason=refusal))
            return
        block_size = self._engine.layout.block_size
        num_blocks = -(-len(ticket.token_ids) // block_size)
        job = PrefillJob(peer_id, ticket, num_blocks, self._parts.count)
        slot_bytes = self._peers.slot_bytes(peer_id)
        try:
            self._engine.submit(lambda core: self._start(core, job, slot_bytes))
        except OverloadedError as exc:
            self._post(peer_id, PrefillFailed(job_id=job.job_id, reason=str(exc)))
            return
        self._jobs[job.job_id] = job  # the engine's answers come through the loop: not before this
        self._vigil.begin()

    def _refusal_of(self, peer_id: str, ticket: Prefill) -> str | None:
        """Say why a ticket is void, if it is."""
        if self._runtime.is_draining:
            return "this prefill worker is shutting down"
        if ticket.prefill_epoch != self._runtime.epoch:
            return "the ticket was made for an earlier life of this worker"
        if not self._peers.is_open(peer_id, ticket.decode_id, ticket.decode_epoch):
            return "no KV way is open to this decode worker"
        if ticket.job_id in self._jobs:
            return "there is a job of this id already"
        vocab_size = self._engine.vocab_size
        if any(token >= vocab_size for token in ticket.token_ids):
            return f"token ids must be below {vocab_size}"
        return None

    def _start(self, core: EngineCore, job: PrefillJob, slot_bytes: int) -> None:
        """Queue a job's sequence. Runs in the engine's thread."""
        ticket = job.ticket
        sequence = new_sequence(job.job_id, ticket.token_ids, ticket.sampling, ())
        sequence.prefill_only = True
        try:
            core.add(sequence)
        except (InvalidRequestError, OverloadedError) as exc:
            self._engine.in_loop(self._fail)(job, str(exc))
            return
        self._packer.start(job.job_id, ticket.first_block, slot_bytes)

    # Its blocks leave

    def _on_packing(self, piece: StagedPiece) -> None:
        """Offer a piece that is still being packed; it will be handed over, or dropped."""
        job = self._jobs.get(piece.job_id)
        if job is not None:
            self._next = announced = Announced(piece)
            sending = self._send(job, piece, announced)
            announced.sender = self._tasks.spawn(sending, "sending a KV piece")

    def _on_packed(self, piece: StagedPiece) -> None:
        job, announced = self._jobs.get(piece.job_id), self._take_announced(piece)
        if job is None:
            piece.slot.release()
            if announced is not None:
                announced.resolve(packed=False)
            return
        job.note_packed(piece.piece, piece.span)
        if announced is None or announced.is_left:
            self._tasks.spawn(self._send(job, piece, None), "sending a KV piece")
        else:
            announced.resolve(packed=True)

    def _on_dropped(self, piece: StagedPiece) -> None:
        if (announced := self._take_announced(piece)) is not None:
            announced.resolve(packed=False)

    def _on_failed(self, job_id: str) -> None:
        job = self._jobs.get(job_id)
        if job is not None:
            self._fail(job, "its blocks could not be packed")

    def _take_announced(self, piece: StagedPiece) -> Announced | None:
        announced = self._next
        if announced is None or announced.piece is not piece:
            return None
        self._next = None
        return announced

    async def _send(self, job: PrefillJob, piece: StagedPiece, announced: Announced | None) -> None:
        """Send a piece, once it is packed, and start the wait for its acknowledgement."""
        timeout = self._runtime.settings.transfer_timeout_s
        ticket = job.ticket
        header = PieceHeader(
            job_id=job.job_id,
            decode_epoch=ticket.decode_epoch,
            prefill_epoch=ticket.prefill_epoch,
            piece=piece.piece,
            positions=list(piece.span.positions),
            first_part=piece.span.parts.start,
            num_parts=len(piece.span.parts),
            seed=piece.seed,
            nbytes=piece.nbytes,
        )
        until_packed = None if announced is None else announced.until_packed
        try:
            payload = piece.slot.buffer[: piece.nbytes]
            await self._peers.send(job.peer_id, header, payload, timeout, until_packed)
        except TransferError as exc:
            if announced is None or announced.is_packed:
                self._count_sent("failed")
                self._fail(job, f"piece {piece.piece} was not sent: {exc}")
            return
        finally:
            # Until it is packed, the device writes into the slot, and whoever hands it over has it.
            if announced is None or announced.is_packed:
                piece.slot.release()
        if self._is_live(job) and piece.piece not in job.acked:
            job.stop_timer(piece.piece)  # of a copy that was sent meanwhile
            job.timers[piece.piece] = asyncio.get_running_loop().call_later(
                timeout, self._on_ack_timeout, job, piece.piece
            )

    def _on_ack_timeout(self, job: PrefillJob, piece: int) -> None:
        self._count_sent("unacknowledged")
        self._send_again(job, piece, "was not acknowledged in time")

    def _count_sent(self, fate: SentFate) -> None:
        self._runtime.transfer_metrics.pieces.labels("sent", fate).inc()

    def _on_ack(self, peer_id: str, ack: PieceAck) -> None:
        job = self._jobs.get(ack.job_id)
        if job is None or job.peer_id != peer_id or ack.piece not in job.spans:
            return
        if ack.piece not in job.acked:
            self._count_sent("acknowledged")
        job.note_acked(ack.piece)
        self._end_if_complete(job)

    def _on_nack(self, peer_id: str, nack: PieceNack) -> None:
        job = self._jobs.get(nack.job_id)
        if job is not None and job.peer_id == peer_id and nack.piece in job.spans:
            self._count_sent("damaged")
            self._send_again(job, nack.piece, "arrived damaged")

    def _send_again(self, job: PrefillJob, piece: int, reason: str) -> None:
        if not self._is_live(job) or piece in job.acked:
            return
        job.stop_timer(piece)
        if not job.count_again(piece):
            self._fail(job, f"piece {piece} {reason}, {job.sends[piece]} times")
            return
        logger.warning("job %s: piece %d %s; sending it again", job.job_id, piece, reason)
        self._runtime.transfer_metrics.resends.inc()
        span = job.spans[piece]
        self._engine.submit(
            lambda _core: self._packer.send_again(job.job_id, piece, span), admitted=True
        )

    # Its end

    def on_outputs(self, outputs: StepOutputs) -> None:
        """Take first tokens, or the news that there will be none."""
        for output in outputs:
            self._on_output(output)

    def _on_output(self, output: StepOutput) -> None:
        job = self._jobs.get(output.request_id)
        if job is None:
            return
        if output.finish_reason == "error":
            self._fail(job, output.error or "the engine failed")
            return
        job.has_first_token = True
        self._post(
            job.peer_id,
            PrefillDone(
                job_id=job.job_id,
                first_token=output.token_ids[0],
                cached_tokens=output.cached_tokens or 0,
                queue_s=output.queue_s,
                prefill_s=output.prefill_s,
            ),
        )
        self._end_if_complete(job)

    def _is_live(self, job: PrefillJob) -> bool:
        return self._jobs.get(job.job_id) is job

    def _end_if_complete(self, job: PrefillJob) -> None:
        if job.is_complete:
            self._end(job)

    def _fail(self, job: PrefillJob, reason: str) -> None:
        if self._is_live(job):
            logger.warning("job %s failed: %s", job.job_id, reason)
            self._post(job.peer_id, PrefillFailed(job_id=job.job_id, reason=clip_text(reason)))
            self._end(job)

    def _end(self, job: PrefillJob) -> None:
        """Forget a job and free its blocks, those of known content into the prefix cache."""
        if self._is_live(job):
            del self._jobs[job.job_id]
            job.stop_timers()
            self._engine.submit(lambda core: self._free(core, job.job_id), admitted=True)

    def _free(self, core: EngineCore, job_id: str) -> None:
        self._packer.drop(job_id)
        core.abort(job_id)
