"""The decode workers that a prefill worker has a KV way to."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

import torch

from pagewire.shared.errors import LayoutMismatchError, TransferError, TransferTimeoutError
from pagewire.shared.kv.layout import check_layout
from pagewire.shared.kv_cache.parts import BlockParts
from pagewire.shared.logs import Complaints
from pagewire.shared.protocol import KvHello, KvWelcome, PieceHeader, ProbeDone, clip_text
from pagewire.shared.registry import LinkInfo
from pagewire.shared.transfer.base import KvTransport, UntilPacked
from pagewire.shared.worker.runtime import WorkerRuntime

logger = logging.getLogger(__name__)

FIRST_PROBE_BYTES = 1 << 20  # whether anything crosses is soon told on a slow network, too
PROBE_PIECES = 8
PROBE_IN_FLIGHT = 4
PROBE_TIMEOUT_S = 10.0


@dataclass(slots=True)
class _Peer:
    worker_id: str
    epoch: int
    transport: KvTransport
    slot_bytes: int
    probe_acks: dict[int, asyncio.Event] = field(default_factory=dict)
    probe_id: str = ""
    probes_begun: int = 0
    probes_landed: int = 0


class DecodePeers:
    """Opens, measures and closes the KV ways; keyed by control connection.

    A worker that comes back has two connections for a moment, and one way: its openings and
    closings take turns.
    """

    def __init__(self, runtime: WorkerRuntime) -> None:
        self._runtime = runtime
        self._peers: dict[str, _Peer] = {}
        self._worker_of: dict[str, str] = {}  # connection -> who said hello over it
        self._complaints = Complaints(logger)
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def is_open(self, peer_id: str, worker_id: str, epoch: int) -> bool:
        """Whether blocks may be sent to this life of this worker over this connection."""
        peer = self._peers.get(peer_id)
        return peer is not None and (peer.worker_id, peer.epoch) == (worker_id, epoch)

    def slot_bytes(self, peer_id: str) -> int:
        """What fits a staging slot on both sides of a way, in bytes; 0 if none is open."""
        peer = self._peers.get(peer_id)
        return 0 if peer is None else peer.slot_bytes

    async def open(self, peer_id: str, hello: KvHello) -> None:
        """Agree on layout and transport with a decode worker, and answer it."""
        self._worker_of[peer_id] = hello.worker_id
        async with self._turn(hello.worker_id):
            if peer_id in self._worker_of:  # it may have left while it waited for its turn
                await self._open(peer_id, hello)

    def _turn(self, worker_id: str) -> asyncio.Lock:
        return self._turns.setdefault(worker_id, asyncio.Lock())

    async def _open(self, peer_id: str, hello: KvHello) -> None:
        runtime = self._runtime
        try:
            check_layout(runtime.built.layout, hello.layout, hello.worker_id)
            transport, address = await self._connect(hello)
        except TransferError as exc:
            text = f"no KV way to {hello.worker_id}: {exc}"
            self._complaints.say(hello.worker_id, hello.epoch, text)
            answer = KvWelcome(
                worker_id=runtime.worker_id, epoch=runtime.epoch, error=clip_text(str(exc))
            )
            runtime.server.post(peer_id, answer)
            return
        self._complaints.forget(hello.worker_id, hello.epoch)
        slot_bytes = min(runtime.send_staging.slot_bytes, hello.slot_bytes)
        self._peers[peer_id] = _Peer(hello.worker_id, hello.epoch, transport, slot_bytes)
        welcome = KvWelcome(
            worker_id=runtime.worker_id,
            epoch=runtime.epoch,
            transport=transport.name,
            address=address,
        )
        runtime.server.post(peer_id, welcome)

    async def _connect(self, hello: KvHello) -> tuple[KvTransport, bytes]:
        """Connect on the first transport of the peer's that this side has, too, and that works.

        Raises:
            TransferError: there is none.
            LayoutMismatchError: its staging slots hold no block of ours.
        """
        runtime = self._runtime
        smallest = BlockParts.of_layout(runtime.built.layout).packed_bytes(1)
        if hello.slot_bytes < smallest:
            raise LayoutMismatchError(
                f"a staging slot of {hello.worker_id} has {hello.slot_bytes} bytes, and a block "
                f"takes {smallest}"
            )
        problems = []
        # All of them together must not take longer than the decode worker waits.
        timeout = runtime.settings.transfer_timeout_s / (1 + len(hello.addresses))
        for name, address in hello.addresses.items():
            if name not in runtime.transports:
                continue
            transport = runtime.transports[name]
            try:
                await transport.connect(hello.worker_id, address, timeout)
            except TransferError as exc:
                logger.warning("no %s to %s: %s", name, hello.worker_id, exc)
                problems.append(f"{name}: {exc}")
                continue
            return transport, runtime.addresses[name]
        raise TransferError(
            f"{hello.worker_id} offers {', '.join(hello.addresses) or 'no transport'}, "
            f"this worker has {', '.join(runtime.transports)}"
            + "".join(f"; {problem}" for problem in problems)
        )

    async def forget(self, peer_id: str) -> None:
        """Close the way of a connection that is gone."""
        worker_id = self._worker_of.pop(peer_id, None)
        if worker_id is not None:
            async with self._turn(worker_id):
                await self._close(peer_id)

    async def _close(self, peer_id: str) -> None:
        peer = self._peers.pop(peer_id, None)
        if peer is None:
            return
        others = [other for other in self._peers.values() if other.worker_id == peer.worker_id]
        if not others:
            self._runtime.links.pop(peer.worker_id, None)
        if all(other.transport is not peer.transport for other in others):
            await peer.transport.disconnect(peer.worker_id)

    async def send(
        self,
        peer_id: str,
        header: PieceHeader,
        payload: torch.Tensor,
        timeout: float,
        until_packed: UntilPacked | None,
    ) -> None:
        """Send a piece to the worker of a connection; `until_packed` as in `KvTransport.send`.

        Raises:
            TransferError: the way is closed or broke.
        """
        peer = self._peers.get(peer_id)
        if peer is None:
            raise TransferError("the decode worker is gone")
        await peer.transport.send(peer.worker_id, header, payload, timeout, until_packed)
        metrics = self._runtime.transfer_metrics
        metrics.bytes.labels("sent", peer.transport.name, peer.worker_id).inc(header.nbytes)

    def on_probe_done(self, peer_id: str, done: ProbeDone) -> None:
        """Note that a probe piece has landed."""
        peer = self._peers.get(peer_id)
        if peer is not None and done.probe_id == peer.probe_id and done.piece in peer.probe_acks:
            peer.probe_acks[done.piece].set()

    async def probe(self, peer_id: str) -> None:
        """Try a way, measure its bandwidth with staging slots full of nothing, and announce it.

        Where nothing crosses the way is given up; one that is only slow or busy is not.
        """
        peer = self._peers.get(peer_id)
        if peer is None:
            return
        peer.probe_id = secrets.token_hex(8)
        gbps = 0.0
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                await self._probe_once(peer, range(1), FIRST_PROBE_BYTES)
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                gbps = await self._measure(peer)
        except (TransferError, TimeoutError) as exc:
            logger.warning("the KV way to %s could not be measured: %r", peer.worker_id, exc)
            is_late = isinstance(exc, TimeoutError | TransferTimeoutError)
            if not is_late or (peer.probes_begun and not peer.probes_landed):
                self._give_up(peer_id, f"nothing crosses by {peer.transport.name}")
                return
        lane = peer.transport.lane(peer.worker_id)
        if self._peers.get(peer_id) is peer:
            self._runtime.links[peer.worker_id] = LinkInfo(
                peer=peer.worker_id, transport=peer.transport.name, lane=lane, gbps=gbps
            )
        logger.info("KV way to %s: %s, %.2f GB/s", peer.worker_id, lane, gbps)

    async def _measure(self, peer: _Peer) -> float:
        """Return the GB/s of whole slots."""
        first = 1 + PROBE_IN_FLIGHT
        await self._probe_once(peer, range(1, first), peer.slot_bytes)  # connects, maps memory
        start = time.perf_counter()
        await self._probe_once(peer, range(first, first + PROBE_PIECES), peer.slot_bytes)
        return PROBE_PIECES * peer.slot_bytes / (time.perf_counter() - start) / 1e9

    def _give_up(self, peer_id: str, reason: str) -> None:
        """Let the decode worker come back by another transport."""
        runtime = self._runtime
        runtime.server.post(
            peer_id, KvWelcome(worker_id=runtime.worker_id, epoch=runtime.epoch, error=reason)
        )

    async def _probe_once(self, peer: _Peer, pieces: range, nbytes: int) -> None:
        limit = asyncio.Semaphore(PROBE_IN_FLIGHT)

        async def one(piece: int) -> None:
            async with limit:
                landed = peer.probe_acks[piece] = asyncio.Event()
                try:
                    await self._send_probe(peer, piece, nbytes)
                    await landed.wait()
                    peer.probes_landed += 1
                finally:
                    peer.probe_acks.pop(piece, None)

        sends = [asyncio.create_task(one(piece)) for piece in pieces]
        try:
            await asyncio.gather(*sends)
        finally:  # one that failed says enough of the others
            for send in sends:
                send.cancel()
            await asyncio.wait(sends)

    async def _send_probe(self, peer: _Peer, piece: int, nbytes: int) -> None:
        staging = self._runtime.send_staging
        nbytes = min(nbytes, peer.slot_bytes)
        header = PieceHeader(
            kind="probe",
            job_id=peer.probe_id,
            decode_epoch=peer.epoch,
            prefill_epoch=self._runtime.epoch,
            piece=piece,
            positions=[],
            first_part=0,
            num_parts=0,
            seed=0,
            nbytes=nbytes,
        )
        slot = await staging.acquire(PROBE_TIMEOUT_S)
        peer.probes_begun += 1
        try:
            payload = slot.buffer[:nbytes]
            await peer.transport.send(peer.worker_id, header, payload, PROBE_TIMEOUT_S)
        finally:
            slot.release()
