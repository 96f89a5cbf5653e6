"""The workers for which this one computes prompts: their KV links, by control connection."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from pagewire.shared.base.addresses import numeric_endpoint
from pagewire.shared.base.errors import LayoutMismatchError, PagewireError, TransferError
from pagewire.shared.base.logs import Complaints
from pagewire.shared.control.protocol import ControlMessage, KvHello, KvRefusal, clip_text
from pagewire.shared.kv.kv_layout import KvLayout
from pagewire.shared.kv.model_identity import first_difference
from pagewire.shared.transfer.endpoint.sender import KvSender
from pagewire.shared.transfer.endpoint.sender_link import SenderLink
from pagewire.shared.worker.engine_handle import EngineHandle, EngineResource
from pagewire.shared.worker.tasks import TaskSet

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Peer:
    """A worker that has offered a link."""

    hello: KvHello
    link: EngineResource[SenderLink]


@dataclass(slots=True)
class DecodeLinks:
    """Opens the links that other workers offer, and closes them when their connections end.

    Attributes:
        engine: its thread uses the links.
        sender: sends the blocks.
        post: sends a control message to a connection.
        tasks: runs the tasks that open links.
        timeout_s: for each step of opening a link.
    """

    engine: EngineHandle
    sender: KvSender
    post: Callable[[str, ControlMessage], object]
    tasks: TaskSet
    timeout_s: float
    _peers: dict[str, _Peer] = field(default_factory=dict)  # by connection
    _complaints: Complaints = field(default_factory=lambda: Complaints(logger))

    def open(self, peer_id: str, hello: KvHello) -> None:
        """Open the link that a worker offers, or refuse it, in a background task."""
        self.close(peer_id)  # an earlier link or attempt of this connection
        peer = self._peers[peer_id] = _Peer(hello, EngineResource(self.engine, self.sender.close))
        self.tasks.spawn(self._open(peer_id, peer), f"KV link to {hello.worker_id}")

    async def _open(self, peer_id: str, peer: _Peer) -> None:
        hello = peer.hello
        try:
            link = await self._connect(peer_id, peer)
        except PagewireError as exc:
            text = f"no KV link to {hello.worker_id}: {exc}"
            self._complaints.say(hello.worker_id, hello.epoch, text)
            if self._peers.get(peer_id) is peer:
                self.close(peer_id)
            self.post(peer_id, KvRefusal(link=hello.link, error=clip_text(str(exc))))
        else:
            self._complaints.forget(hello.worker_id, hello.epoch)
            logger.info("KV link to %s: %s", hello.worker_id, link.transport)

    async def _connect(self, peer_id: str, peer: _Peer) -> SenderLink:
        hello = peer.hello
        ours, names = self.engine, (hello.worker_id, "the prefill worker")
        difference = first_difference(hello.model_identity, ours.model_identity, *names)
        difference = difference or _rank_difference(hello.layout, ours.layout, *names)
        layouts = hello.layout.on_one_rank, ours.layout.on_one_rank
        difference = difference or first_difference(*layouts, *names)
        if difference is not None:
            raise LayoutMismatchError(difference)
        try:
            async with asyncio.timeout(self.timeout_s):
                endpoint = await numeric_endpoint(hello.endpoint)
        except OSError as exc:
            raise TransferError(f"cannot resolve {hello.endpoint!r}: {exc}") from exc
        resolved = msgspec.structs.replace(hello, endpoint=endpoint)
        if self._peers.get(peer_id) is not peer:  # it disconnected, or sent another offer
            raise TransferError("its control connection has ended")
        return await peer.link.open(lambda: self.sender.connect(resolved), self.timeout_s)

    def close(self, peer_id: str) -> None:
        """End the link of a connection, if it has one."""
        peer = self._peers.pop(peer_id, None)
        if peer is not None:
            peer.link.close()

    def connection_of(self, link: SenderLink) -> str | None:
        """Return the control connection that offered a link; None if that has ended.

        May be called in any thread.
        """
        peers = list(self._peers.items())
        found = (name for name, peer in peers if peer.link.value is link)
        return next(found, None)

    def on_lost(self, link: SenderLink, reason: str) -> None:
        """Notify the worker, which then offers another link, perhaps by another transport."""
        logger.warning("the KV link to %s has ended: %s", link.peer, reason)
        if (peer_id := self.connection_of(link)) is not None:
            number = self._peers.pop(peer_id).hello.link
            self.post(peer_id, KvRefusal(link=number, error=clip_text(reason)))


def _rank_difference(its: KvLayout, other: KvLayout, its_name: str, other_name: str) -> str | None:
    """Return how layouts divide the heads, if the parts of one do not make those of the other."""
    if its.shares_heads_like(other):
        return None
    return (
        f"{its_name} has {its.token.heads} KV heads on each of {its.ranks} ranks, {other_name} "
        f"{other.token.heads} on each of {other.ranks}: choose the same --tensor-parallel-size"
    )
