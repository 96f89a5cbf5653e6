"""The decode workers that a prefill worker has a KV link to, by control connection."""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from pagewire.shared.addresses import numeric_endpoint
from pagewire.shared.errors import PagewireError, TransferError
from pagewire.shared.kv.layout import check_layout
from pagewire.shared.kv.sender import KvSender, SenderLink
from pagewire.shared.logs import Complaints
from pagewire.shared.protocol import ControlMessage, LinkHello, LinkWelcome, clip_text
from pagewire.shared.worker.engine_handle import EngineHandle
from pagewire.shared.worker.tasks import TaskSet

logger = logging.getLogger(__name__)


class DecodeLinks:
    """Opens links as decode workers ask for them, and ends them with their connections.

    Args:
        engine: its thread uses the links.
        sender: of this worker.
        post: sends a control message to a connection.
        tasks: in which links are opened.
        timeout_s: for a link to be opened.
    """

    def __init__(
        self,
        engine: EngineHandle,
        sender: KvSender,
        post: Callable[[str, ControlMessage], object],
        tasks: TaskSet,
        timeout_s: float,
    ) -> None:
        self._engine, self._sender, self._post = engine, sender, post
        self._tasks, self._timeout_s = tasks, timeout_s
        self._hellos: dict[str, LinkHello] = {}
        self._links: dict[str, SenderLink] = {}
        self._complaints = Complaints(logger)
        sender.on_link_lost = engine.in_loop(self._on_lost)

    def get(self, peer_id: str) -> SenderLink | None:
        """Return the link of a connection, if one is open."""
        return self._links.get(peer_id)

    def open(self, peer_id: str, hello: LinkHello) -> None:
        """Open the link that a decode worker asks for, and answer it, in the background."""
        self._tasks.spawn(self._open(peer_id, hello), f"KV link to {hello.worker_id}")

    async def _open(self, peer_id: str, hello: LinkHello) -> None:
        self.close(peer_id)  # of an earlier attempt over this connection
        self._hellos[peer_id] = hello
        try:
            link = await self._connect(hello)
        except PagewireError as exc:
            text = f"no KV link to {hello.worker_id}: {exc}"
            self._complaints.say(hello.worker_id, hello.epoch, text)
            self._post(peer_id, LinkWelcome(link=hello.link, error=clip_text(str(exc))))
            return
        if self._hellos.get(peer_id) is not hello:  # it has left meanwhile, or asked again
            self._end(link)
            return
        self._complaints.forget(hello.worker_id, hello.epoch)
        self._links[peer_id] = link
        self._post(
            peer_id, LinkWelcome(link=hello.link, carrier=link.carrier, reply=link.outbound.reply)
        )
        logger.info("KV link to %s: %s", hello.worker_id, link.carrier)

    async def _connect(self, hello: LinkHello) -> SenderLink:
        check_layout(self._engine.layout, hello.layout, hello.worker_id)
        smallest = self._engine.parts.packed_bytes(1)
        if hello.slot_bytes < smallest:
            raise TransferError(
                f"a staging slot of {hello.worker_id} has {hello.slot_bytes} bytes, and a block "
                f"takes {smallest}"
            )
        try:
            endpoint = await numeric_endpoint(hello.endpoint)
        except (ValueError, OSError) as exc:
            raise TransferError(f"there is nothing at {hello.endpoint!r}: {exc}") from exc
        there = msgspec.structs.replace(hello, endpoint=endpoint)
        return await self._engine.call(lambda _core: self._sender.connect(there), self._timeout_s)

    def close(self, peer_id: str) -> None:
        """End the link of a connection; one that has none is fine."""
        self._hellos.pop(peer_id, None)
        link = self._links.pop(peer_id, None)
        if link is not None:
            self._end(link)

    def _end(self, link: SenderLink) -> None:
        self._engine.submit(lambda _core: self._sender.close(link), admitted=True)

    def _on_lost(self, link: SenderLink, reason: str) -> None:
        """Let the decode worker open another link, by another carrier perhaps."""
        logger.warning("the KV link to %s has ended: %s", link.peer, reason)
        for peer_id in [peer for peer, known in self._links.items() if known is link]:
            del self._links[peer_id]
            number = self._hellos.pop(peer_id).link
            self._post(peer_id, LinkWelcome(link=number, error=clip_text(reason)))
