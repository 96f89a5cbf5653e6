"""The prefill workers that a decode worker has a control connection and a KV way to."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from pagewire.shared.channel import ControlClient, make_client_id
from pagewire.shared.errors import ChannelError, PagewireError, ProtocolError, TransferError
from pagewire.shared.logs import Complaints
from pagewire.shared.protocol import ControlMessage, KvHello, KvReady, KvWelcome
from pagewire.shared.registry import WorkerCard, WorkerDirectory
from pagewire.shared.transfer.base import KvTransport
from pagewire.shared.worker.runtime import WorkerRuntime

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class PrefillLink:
    """A way to one life of one prefill worker, or an attempt at one.

    Attributes:
        transport: carries the blocks; None until both sides have agreed on it.
    """

    worker_id: str
    epoch: int
    client: ControlClient
    transport: KvTransport | None = None

    def post(self, message: ControlMessage) -> bool:
        """Queue a message; False if the connection is gone."""
        try:
            self.client.post(message)
        except ChannelError as exc:
            logger.info("nothing can be posted to %s: %s", self.worker_id, exc)
            return False
        return True


@dataclass(frozen=True, slots=True)
class _Attempt:
    """A link that is being opened."""

    epoch: int
    task: asyncio.Task[None]


class PrefillLinks:
    """Keeps one link to every live prefill worker in the directory.

    Each is opened in a task of its own, so that a worker that does not answer delays no other.

    A transport by which nothing crosses (say, UCX's once a network was taken away from this
    process) is left out for that life of the prefill worker, until nothing crosses by any other.

    Attributes:
        on_message: called with the link and each message but the handshake's.
        on_lost: called once for a link that was usable and is not any more.
    """

    def __init__(
        self,
        runtime: WorkerRuntime,
        directory: WorkerDirectory,
        on_message: Callable[[PrefillLink, ControlMessage], None],
        on_lost: Callable[[PrefillLink], None],
    ) -> None:
        self._runtime = runtime
        self._directory = directory
        self._on_message = on_message
        self._on_lost = on_lost
        self._links: dict[str, PrefillLink] = {}
        self._attempts: dict[str, _Attempt] = {}
        self._unfit: dict[tuple[str, int], set[str]] = {}
        self._complaints = Complaints(logger)

    def get(self, worker_id: str) -> PrefillLink | None:
        """Return the usable link to a worker."""
        return self._links.get(worker_id)

    def usable(self) -> list[PrefillLink]:
        """All links over which prompts can be sent away."""
        return list(self._links.values())

    async def keep_open(self) -> None:
        """Open links as workers appear; runs until it is cancelled."""
        while True:
            for card in self._directory.workers("prefill"):
                self._follow(card)
            await asyncio.sleep(self._runtime.settings.heartbeat_s)

    def _follow(self, card: WorkerCard) -> None:
        """See that there is a link to a worker's present life, or an attempt at one."""
        link = self._links.get(card.worker_id)
        if link is not None and link.epoch != card.epoch:
            self._lose(link, "it was restarted")
            link = None
        attempt = self._attempts.get(card.worker_id)
        if attempt is not None and attempt.epoch != card.epoch:
            attempt.task.cancel()
        elif attempt is None and link is None and card.state == "ready":
            task = self._runtime.tasks.spawn(self._try_open(card), f"link to {card.worker_id}")
            self._attempts[card.worker_id] = _Attempt(card.epoch, task)
            task.add_done_callback(lambda _task: self._attempts.pop(card.worker_id, None))

    async def _try_open(self, card: WorkerCard) -> None:
        try:
            await self._open(card)
        except (PagewireError, TimeoutError) as exc:
            text = f"no link to {card.worker_id} at {card.endpoint}: {exc}"
            self._complaints.say(card.worker_id, card.epoch, text)
        else:
            self._complaints.forget(card.worker_id, card.epoch)

    async def _open(self, card: WorkerCard) -> None:
        """Connect, agree on layout and transport, open the KV way."""
        timeout = self._runtime.settings.transfer_timeout_s
        link, welcome = self._new_link(card)
        try:
            pong = await link.client.connect(timeout)
            if (pong.worker_id, pong.epoch) != (card.worker_id, card.epoch):
                raise ChannelError(f"{card.endpoint} is another worker's by now")
            link.client.post(self._hello(link))
            async with asyncio.timeout(timeout):
                answer = _accepted(await welcome)
            link.transport = self._runtime.transports.get(answer.transport)
            if link.transport is None:
                raise ProtocolError(f"it chose {answer.transport!r}, which was not offered")
            await link.transport.connect(card.worker_id, answer.address, timeout)
            self._begin(link)
        except TransferError:
            self._leave_out(link)
            raise
        finally:
            if self._links.get(card.worker_id) is not link:
                link.client.close()
            if welcome.done() and not welcome.cancelled():
                welcome.exception()  # mark it as seen: we may have failed before
        logger.info("linked to %s over %s", card.worker_id, answer.transport)

    def _new_link(self, card: WorkerCard) -> tuple[PrefillLink, asyncio.Future[KvWelcome]]:
        """Return a link that is not connected, and what its welcome will be."""
        settings = self._runtime.settings
        welcome: asyncio.Future[KvWelcome] = asyncio.get_running_loop().create_future()

        def on_message(message: ControlMessage) -> None:
            if isinstance(message, KvWelcome):
                if not welcome.done():
                    welcome.set_result(message)
                elif message.error is not None:
                    self._leave_out(link)
                    self._lose(link, message.error)
            else:
                self._on_message(link, message)

        def on_lost(reason: str) -> None:
            self._lose(link, reason)
            if not welcome.done():
                welcome.set_exception(ChannelError(reason))

        client = ControlClient(
            card.endpoint,
            self._runtime.keys,
            make_client_id(self._runtime.worker_id),
            on_message,
            on_lost,
            heartbeat_s=settings.heartbeat_s,
            lease_s=settings.lease_s,
        )
        link = PrefillLink(card.worker_id, card.epoch, client)
        return link, welcome

    def _begin(self, link: PrefillLink) -> None:
        """Let the worker measure the open KV way, and use it from now on."""
        try:
            link.client.post(KvReady())
        except ChannelError:
            self._disconnect(link)
            raise
        self._links[link.worker_id] = link

    def _leave_out(self, link: PrefillLink) -> None:
        """Note that nothing crosses by the transport of a link."""
        if link.transport is None:
            return
        cards = {(card.worker_id, card.epoch) for card in self._directory.workers("prefill")}
        self._unfit = {life: names for life, names in self._unfit.items() if life in cards}
        names = self._unfit.setdefault((link.worker_id, link.epoch), set())
        names.add(link.transport.name)
        if names.issuperset(self._runtime.addresses):  # the others may work again by now
            names.intersection_update({link.transport.name})

    def _hello(self, link: PrefillLink) -> KvHello:
        runtime = self._runtime
        unfit = self._unfit.get((link.worker_id, link.epoch), set())
        fit = {name: at for name, at in runtime.addresses.items() if name not in unfit}
        return KvHello(
            worker_id=runtime.worker_id,
            epoch=runtime.epoch,
            layout=runtime.built.layout,
            addresses=fit or runtime.addresses,
            slot_bytes=runtime.receive_staging.slot_bytes,
        )

    def _lose(self, link: PrefillLink, reason: str) -> None:
        logger.warning("lost %s: %s", link.worker_id, reason)
        link.client.close()
        if self._links.get(link.worker_id) is link:
            del self._links[link.worker_id]
            self._disconnect(link)
            self._on_lost(link)

    def _disconnect(self, link: PrefillLink) -> None:
        if link.transport is not None:
            self._runtime.tasks.spawn(
                link.transport.disconnect(link.worker_id), f"closing the way to {link.worker_id}"
            )

    def close(self) -> None:
        """Close all connections, give up attempts at more."""
        for attempt in self._attempts.values():
            attempt.task.cancel()
        for link in self._links.values():
            link.client.close()
        self._links.clear()


def _accepted(answer: KvWelcome) -> KvWelcome:
    if answer.error is not None:
        raise TransferError(answer.error)
    return answer
