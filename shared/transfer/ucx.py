"""KV pieces over UCX: GPU memory by cuda_ipc within a host, the rest by TCP.

Peers exchange UCX worker addresses. The 64 bits of a tag are

    63: payload | 62..32: channel | 31..0: sequence number

and 0 for session messages, whose channel is inside.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, ClassVar

import torch

from pagewire.shared.errors import TransferError
from pagewire.shared.transfer.peer import Landing, Peer
from pagewire.shared.transfer.session import SessionTransport
from pagewire.shared.transfer.staging import StagingPool
from pagewire.shared.transfer.ucx_lane import name_lane
from pagewire.shared.transfer.ucx_port import UcxPort
from pagewire.shared.transfer.ucx_settings import listens_on, ucx_settings
from pagewire.shared.transfer.wire import (
    MAX_MESSAGE_BYTES,
    SEQ_BITS,
    Bye,
    SessionMessage,
    encode_message,
)

logger = logging.getLogger(__name__)

_MESSAGE_TAG = 0
_PAYLOAD_FLAG = 1 << 63
_FLUSH_S, _FLUSH_PERIOD_S = 0.05, 0.001


class UcxTransport(SessionTransport):
    """Pieces over UCX; one worker for all peers.

    A payload that was granted cannot be recalled. If it stalls, the endpoint is closed by force,
    which ends it here; should the peer be alive after all and read on, it reads what the slot has
    become by then, and notices by the checksums.

    Args:
        host: this machine's own address, not a wildcard: UCX opens ports on its device alone.
    """

    name: ClassVar[str] = "ucx"

    def __init__(self, worker_id: str, staging: StagingPool, *, host: str = "127.0.0.1") -> None:
        super().__init__(worker_id, staging)
        self._host = host
        self._port: UcxPort | None = None
        self._endpoints: dict[Peer, Any] = {}

    def lane(self, peer_id: str) -> str:
        """Name the way that UCX has chosen to a peer; "ucx" where it can't be told."""
        peer = self._peers.get(peer_id)
        endpoint = None if peer is None else self._endpoints.get(peer)
        if endpoint is None:
            return self.name
        return name_lane(endpoint.handle, cuda=self.staging.device.type == "cuda") or self.name

    async def _open(self) -> bytes:
        cuda = self.staging.device.type == "cuda"
        if cuda:  # UCX works in the thread's current CUDA context
            torch.cuda.set_device(self.staging.device)
            torch.cuda.synchronize(self.staging.device)
        settings = await asyncio.to_thread(ucx_settings, self._host, cuda=cuda)  # looks a name up
        awaits_more = self._awaits_more if cuda else None
        self._port = UcxPort(self._on_arrival, settings, awaits_more=awaits_more)
        logger.warning(
            "UCX listens %s: anyone who reaches its TCP port there can end this worker, and KV "
            "blocks cross unencrypted; KV transport 'zmq' has neither risk",
            listens_on(settings),
        )
        return self._port.address

    async def _link(self, peer: Peer) -> None:
        self._endpoints[peer] = self._opened.open_endpoint(
            peer.address.endpoint, lambda: self._break(peer, "UCX found the peer dead")
        )

    async def _unlink(self, peer: Peer) -> None:
        endpoint = self._endpoints.pop(peer, None)
        if endpoint is not None:
            try:
                await self._flush(peer)
            finally:
                self._opened.close_endpoint(endpoint, peer)

    async def _flush(self, peer: Peer) -> None:
        """Give a last message a moment: closing an endpoint by force drops it."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _FLUSH_S
        while self._opened.busy(peer) and loop.time() < deadline:  # noqa: ASYNC110 - UCX is polled
            await asyncio.sleep(_FLUSH_PERIOD_S)

    def _post(self, peer: Peer, message: SessionMessage) -> None:
        endpoint = self._endpoints.get(peer)
        if endpoint is None:
            return

        def done(error: TransferError | None) -> None:
            if error is not None and not isinstance(message, Bye):
                self._break(peer, str(error))

        self._opened.send(endpoint, peer, encode_message(message), _MESSAGE_TAG, done)

    def _push(self, peer: Peer, seq: int, payload: torch.Tensor) -> asyncio.Future[None]:
        endpoint = self._endpoints.get(peer)
        if endpoint is None:
            raise TransferError(f"there is no way to {peer.peer_id!r}")
        sent: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def done(error: TransferError | None) -> None:
            if error is None:
                sent.set_result(None)
            else:
                sent.set_exception(error)

        tag = _PAYLOAD_FLAG | peer.out << SEQ_BITS | seq
        self._opened.send(endpoint, peer, payload, tag, done)
        return sent

    async def _close_carrier(self) -> None:
        if self._port is not None:
            self._port.close()
            self._port = None

    def _awaits_more(self) -> bool:
        """Whether a grant or a payload is on its way."""
        return any(peer.grants or peer.landings for peer in self._peers.values())

    @property
    def _opened(self) -> UcxPort:
        if self._port is None:
            raise TransferError("the UCX transport is not open")
        return self._port

    def _on_arrival(self, tag: int, nbytes: int) -> None:
        if tag & _PAYLOAD_FLAG:
            self._on_payload(tag, nbytes)
        elif tag == _MESSAGE_TAG and 0 < nbytes <= MAX_MESSAGE_BYTES:
            self._take_message(tag, nbytes)
        else:
            self.stats.note_malformed(f"a message of {nbytes} bytes with tag {tag:#x}")
            self._opened.discard(tag)

    def _take_message(self, tag: int, nbytes: int) -> None:
        data = bytearray(nbytes)

        def done(error: TransferError | None) -> None:
            if error is None:
                self._on_message(data)

        self._opened.receive(None, data, nbytes, tag, done)

    def _on_payload(self, tag: int, nbytes: int) -> None:
        channel = (tag & ~_PAYLOAD_FLAG) >> SEQ_BITS
        claimed = self._claim(channel, tag & (1 << SEQ_BITS) - 1, nbytes)
        if claimed is None:
            self._opened.discard(tag)
            return
        peer, landing = claimed
        self._receive(peer, landing, tag, nbytes)

    def _receive(self, peer: Peer, landing: Landing, tag: int, nbytes: int) -> None:
        received = self._arrivals.begin(peer, landing)
        self._opened.receive(peer, landing.slot.buffer, nbytes, tag, received)
        self._arrivals.hold(peer)
