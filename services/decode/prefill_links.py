"""The prefill workers that a decode worker has a control connection and a KV link to."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pagewire.shared.cluster.registry import WorkerRecord
from pagewire.shared.control.channel import ClusterKeys, ControlClient, make_client_id
from pagewire.shared.control.protocol import ControlMessage, KvHello, KvWelcome
from pagewire.shared.engine.core import EngineCore
from pagewire.shared.errors import ChannelError, PagewireError, TransferError
from pagewire.shared.kv.endpoint.receiver import KvReceiver
from pagewire.shared.kv.endpoint.receiver_link import ReceiverLink
from pagewire.shared.logs import Complaints
from pagewire.shared.worker.engine_handle import EngineHandle
from pagewire.shared.worker.identity import WorkerIdentity
from pagewire.shared.worker.tasks import TaskSet

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class PrefillLink:
    """One life of one prefill worker, or an attempt to reach it.

    Attributes:
        welcome: its answer to our `KvHello`.
        tested: whether blocks come by it.
        kv: the link that its blocks come by, once it has been offered.
        opening: the attempt.
        is_open: jobs may use the link.
    """

    record: WorkerRecord
    client: ControlClient
    welcome: asyncio.Future[KvWelcome]
    tested: asyncio.Future[None]
    kv: ReceiverLink | None = None
    opening: asyncio.Task[None] | None = None
    is_open: bool = False

    @property
    def worker_id(self) -> str:
        """Of the prefill worker."""
        return self.record.worker_id

    @property
    def epoch(self) -> int:
        """Of the prefill worker's life."""
        return self.record.epoch


class PrefillLinks:
    """Keeps one link to every live prefill worker in the directory.

    Each is opened in a task of its own, so that a worker that does not answer delays no other. A
    carrier by which nothing comes is left out for that life of the prefill worker, until nothing
    comes by any other.

    Args:
        identity: of this worker.
        engine: its thread uses the links.
        receiver: of this worker.
        workers: returns the records of the prefill workers that are alive.
        keys: the cluster's.
        tasks: in which links are opened.
        heartbeat_s: how often missing links are looked for, and control servers are pinged.
        lease_s: silence after which a control server is gone.
        timeout_s: of each step of a link's opening.
    """

    def __init__(
        self,
        identity: WorkerIdentity,
        engine: EngineHandle,
        receiver: KvReceiver,
        workers: Callable[[], Sequence[WorkerRecord]],
        keys: ClusterKeys,
        tasks: TaskSet,
        *,
        heartbeat_s: float,
        lease_s: float,
        timeout_s: float,
    ) -> None:
        self._identity, self._engine, self._receiver = identity, engine, receiver
        self._workers, self._keys, self._tasks = workers, keys, tasks
        self._heartbeat_s, self._lease_s, self._timeout_s = heartbeat_s, lease_s, timeout_s
        self._links: dict[str, PrefillLink] = {}
        self._keeping: asyncio.Task[None] | None = None
        self._unfit: dict[tuple[str, int], set[str]] = {}  # carriers, by name and epoch
        self._complaints = Complaints(logger)
        receiver.on_link_tested = engine.in_loop(self._on_tested)
        receiver.on_link_lost = engine.in_loop(self._on_kv_lost)

    @property
    def open_epochs(self) -> dict[str, int]:
        """The prefill workers whose links jobs may use, and which life of each it is."""
        return {name: link.epoch for name, link in self._links.items() if link.is_open}

    def start(self) -> None:
        """Open links as workers appear."""
        self._keeping = self._tasks.spawn(self._keep_open(), "keeping links to prefill workers")

    async def _keep_open(self) -> None:
        while True:
            for record in self._workers():
                self._follow(record)
            await asyncio.sleep(self._heartbeat_s)

    def _follow(self, record: WorkerRecord) -> None:
        """See that there is a link to a worker's present life, or an attempt at one."""
        link = self._links.get(record.worker_id)
        if link is not None and link.epoch != record.epoch:
            self._lose(link, "it was restarted")
        if record.worker_id not in self._links and record.state == "ready":
            link = self._links[record.worker_id] = self._new_link(record)
            link.opening = self._tasks.spawn(self._try_open(link), f"link to {record.worker_id}")

    async def _try_open(self, link: PrefillLink) -> None:
        try:
            await self._open(link)
        except (PagewireError, TimeoutError) as exc:
            self._lose(link, str(exc) or "no answer")
        else:
            self._complaints.forget(link.worker_id, link.epoch)
            link.is_open = True

    async def _open(self, link: PrefillLink) -> None:
        """Connect, agree on layout and carrier, wait until blocks come.

        Raises:
            PagewireError, TimeoutError: that failed.
        """
        record, timeout_s = link.record, self._timeout_s
        pong = await link.client.connect(timeout_s)
        if (pong.worker_id, pong.epoch) != (record.worker_id, record.epoch):
            raise ChannelError(f"{record.endpoint} is another worker's by now")
        kv = await self._offer(link)
        async with asyncio.timeout(timeout_s):
            welcome = await link.welcome
        if welcome.error is not None:
            # It may be reached only by what was left out.
            self._unfit.pop((record.worker_id, record.epoch), None)
            raise TransferError(welcome.error)
        await self._engine.call(
            lambda _core: self._receiver.accept(kv, welcome.carrier, welcome.reply), timeout_s
        )
        try:
            async with asyncio.timeout(timeout_s):
                await link.tested
        except TimeoutError:
            self._leave_out(record, welcome.carrier)
            raise
        logger.info("linked to %s by %s", record.worker_id, welcome.carrier)

    async def _offer(self, link: PrefillLink) -> ReceiverLink:
        """Offer a link for blocks."""
        without = self._unfit.get((link.worker_id, link.epoch), ())

        def make_offer(_core: EngineCore) -> ReceiverLink:
            # Noted in the engine's thread: `_end` closes it there, even if nobody waits by then.
            link.kv = self._receiver.offer(link.worker_id, without)
            return link.kv

        kv = await self._engine.call(make_offer, self._timeout_s)
        link.client.post(
            KvHello(
                worker_id=self._identity.worker_id,
                epoch=self._identity.epoch,
                layout=self._engine.layout,
                link=kv.number,
                token=kv.token,
                endpoint=self._receiver.socket.endpoint,
                carriers=kv.offers,
                slot_bytes=self._receiver.staging.slot_bytes,
            )
        )
        return kv

    def _new_link(self, record: WorkerRecord) -> PrefillLink:
        loop = asyncio.get_running_loop()

        def on_message(message: ControlMessage) -> None:
            if isinstance(message, KvWelcome):
                self._on_welcome(link, message)
            else:
                logger.warning("%s sent a %s here", record.worker_id, type(message).__name__)

        client = ControlClient(
            record.endpoint,
            self._keys,
            make_client_id(self._identity.worker_id),
            on_message,
            lambda reason: self._lose(link, reason),
            heartbeat_s=self._heartbeat_s,
            lease_s=self._lease_s,
        )
        link = PrefillLink(record, client, loop.create_future(), loop.create_future())
        return link

    def _on_welcome(self, link: PrefillLink, message: KvWelcome) -> None:
        if link.kv is None or message.link != link.kv.number:
            return
        if not link.welcome.done():
            link.welcome.set_result(message)
        elif message.error is not None:
            self._on_kv_lost(link.kv, message.error)

    def _on_tested(self, kv: ReceiverLink) -> None:
        for link in self._links.values():
            if link.kv is kv and not link.tested.done():
                link.tested.set_result(None)

    def _on_kv_lost(self, kv: ReceiverLink, reason: str) -> None:
        for link in list(self._links.values()):
            if link.kv is kv:
                if kv.carrier and not link.tested.done():
                    self._leave_out(link.record, kv.carrier)
                self._lose(link, reason)

    def _leave_out(self, record: WorkerRecord, carrier: str) -> None:
        """Note that nothing comes by a carrier."""
        known = {(worker.worker_id, worker.epoch) for worker in self._workers()}
        self._unfit = {life: unfit for life, unfit in self._unfit.items() if life in known}
        unfit = self._unfit.setdefault((record.worker_id, record.epoch), set())
        unfit.add(carrier)
        if unfit.issuperset(self._receiver.carriers):  # the others may work again by now
            unfit.clear()
            unfit.update({carrier} if len(self._receiver.carriers) > 1 else ())

    def _lose(self, link: PrefillLink, reason: str) -> None:
        """End a link or an attempt; one that has ended is fine."""
        if self._links.get(link.worker_id) is not link:
            return
        del self._links[link.worker_id]
        self._end(link)
        if link.is_open:
            logger.warning("lost %s: %s", link.worker_id, reason)
        else:
            text = f"no link to {link.worker_id} at {link.record.endpoint}: {reason}"
            self._complaints.say(link.worker_id, link.epoch, text)

    def _end(self, link: PrefillLink) -> None:
        if link.opening is not None:
            link.opening.cancel()  # it has ended, if the link is open
        link.client.close()

        def close(_core: EngineCore) -> None:
            if link.kv is not None:
                self._receiver.close(link.kv)

        self._engine.submit(close, admitted=True)

    def close(self) -> None:
        """Close all connections, give up attempts at more."""
        if self._keeping is not None:
            self._keeping.cancel()
        for link in self._links.values():
            self._end(link)
        self._links.clear()
