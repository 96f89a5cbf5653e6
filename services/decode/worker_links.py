"""The prefill workers that a decode worker has a control connection and a KV link to."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pagewire.shared.channel import ClusterKeys, ControlClient, make_client_id
from pagewire.shared.engine.core import EngineCore
from pagewire.shared.errors import ChannelError, PagewireError, TransferError
from pagewire.shared.kv.receiver import KvReceiver
from pagewire.shared.kv.receiver_link import ReceiverLink
from pagewire.shared.logs import Complaints
from pagewire.shared.protocol import ControlMessage, KvHello, KvWelcome
from pagewire.shared.registry import WorkerCard
from pagewire.shared.worker.engine_handle import EngineHandle
from pagewire.shared.worker.identity import WorkerIdentity
from pagewire.shared.worker.tasks import TaskSet

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class PrefillLink:
    """One life of one prefill worker, or an attempt to reach it.

    Attributes:
        welcome: its answer to our `KvHello`.
        kv: the link that its blocks come by, once it has been offered.
        tested: whether blocks come by it.
        failure: why it has ended, if it has.
    """

    worker_id: str
    epoch: int
    client: ControlClient
    welcome: asyncio.Future[KvWelcome]
    tested: asyncio.Future[None]
    kv: ReceiverLink | None = None
    failure: PagewireError | None = None

    def post(self, message: ControlMessage) -> bool:
        """Queue a message; False if the connection is gone."""
        try:
            self.client.post(message)
        except ChannelError as exc:
            logger.info("nothing can be posted to %s: %s", self.worker_id, exc)
            return False
        return True

    def fail(self, error: PagewireError) -> None:
        """Note the link's end, and end the wait for an answer."""
        self.failure = error
        for future in (self.welcome, self.tested):
            if not future.done():
                future.set_exception(error)
                future.exception()  # mark it as seen: nobody may be waiting


@dataclass(frozen=True, slots=True)
class LinkTimes:
    """Seconds.

    Attributes:
        heartbeat_s: how often missing links are looked for, and control servers are pinged.
        lease_s: silence after which a control server is gone.
        timeout_s: of each step of a link's opening.
    """

    heartbeat_s: float
    lease_s: float
    timeout_s: float


@dataclass(slots=True)
class _Unfit:
    """Carriers by which nothing came from one life of a worker."""

    epoch: int
    carriers: set[str] = field(default_factory=set)


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
        times: of these links.

    Attributes:
        on_message: called with the link and each message but `KvWelcome`.
        on_lost: called once for a link that was usable and is not any more.
    """

    def __init__(
        self,
        identity: WorkerIdentity,
        engine: EngineHandle,
        receiver: KvReceiver,
        workers: Callable[[], Sequence[WorkerCard]],
        keys: ClusterKeys,
        tasks: TaskSet,
        times: LinkTimes,
    ) -> None:
        self._identity, self._engine, self._receiver = identity, engine, receiver
        self._workers, self._keys, self._tasks, self._times = workers, keys, tasks, times
        self.on_message: Callable[[PrefillLink, ControlMessage], None] = lambda _link, _message: (
            None
        )
        self.on_lost: Callable[[PrefillLink], None] = lambda _link: None
        self._links: dict[str, PrefillLink] = {}
        self._attempts: dict[str, tuple[int, asyncio.Task[None]]] = {}  # with the life's epoch
        self._opening: set[PrefillLink] = set()
        self._unfit: dict[str, _Unfit] = {}
        self._complaints = Complaints(logger)
        receiver.on_link_tested = engine.in_loop(self._on_tested)
        receiver.on_link_lost = engine.in_loop(self._on_kv_lost)

    def get(self, worker_id: str) -> PrefillLink | None:
        """Return the usable link to a worker."""
        return self._links.get(worker_id)

    def usable(self) -> list[PrefillLink]:
        """All links over which prompts can be sent away."""
        return list(self._links.values())

    def start(self) -> None:
        """Open links as workers appear."""
        self._tasks.spawn(self._keep_open(), "keeping links to prefill workers")

    async def _keep_open(self) -> None:
        while True:
            for card in self._workers():
                self._follow(card)
            await asyncio.sleep(self._times.heartbeat_s)

    def _follow(self, card: WorkerCard) -> None:
        """See that there is a link to a worker's present life, or an attempt at one."""
        link = self._links.get(card.worker_id)
        if link is not None and link.epoch != card.epoch:
            self._lose(link, "it was restarted")
            link = None
        epoch, task = self._attempts.get(card.worker_id, (0, None))
        if task is not None and epoch != card.epoch:
            task.cancel()
        elif task is None and link is None and card.state == "ready":
            task = self._tasks.spawn(self._try_open(card), f"link to {card.worker_id}")
            self._attempts[card.worker_id] = card.epoch, task
            task.add_done_callback(lambda _task: self._attempts.pop(card.worker_id, None))

    async def _try_open(self, card: WorkerCard) -> None:
        link = self._new_link(card)
        self._opening.add(link)
        try:
            await self._open(card, link)
            if link.failure is not None:  # since it was tested
                raise link.failure
        except (PagewireError, TimeoutError) as exc:
            text = f"no link to {card.worker_id} at {card.endpoint}: {exc or 'no answer'}"
            self._complaints.say(card.worker_id, card.epoch, text)
        else:
            self._complaints.forget(card.worker_id, card.epoch)
            self._links[link.worker_id] = link
        finally:
            self._opening.discard(link)
            if self._links.get(card.worker_id) is not link:
                self._end(link)

    async def _open(self, card: WorkerCard, link: PrefillLink) -> None:
        """Connect, agree on layout and carrier, wait until blocks come.

        Raises:
            PagewireError, TimeoutError: that failed.
        """
        timeout_s = self._times.timeout_s
        pong = await link.client.connect(timeout_s)
        if (pong.worker_id, pong.epoch) != (card.worker_id, card.epoch):
            raise ChannelError(f"{card.endpoint} is another worker's by now")
        link.client.post(await self._hello(link, timeout_s))
        async with asyncio.timeout(timeout_s):
            welcome = await link.welcome
        if welcome.error is not None:
            self._unfit.pop(card.worker_id, None)  # it may be reached only by what was left out
            raise TransferError(welcome.error)
        kv = link.kv
        if kv is None:
            raise TransferError("the link was not offered")
        await self._engine.call(
            lambda _core: self._receiver.accept(kv, welcome.carrier, welcome.reply), timeout_s
        )
        try:
            async with asyncio.timeout(timeout_s):
                await link.tested
        except (TransferError, TimeoutError):
            self._leave_out(card, welcome.carrier)
            raise
        logger.info("linked to %s by %s", card.worker_id, welcome.carrier)

    async def _hello(self, link: PrefillLink, timeout_s: float) -> KvHello:
        unfit = self._unfit.get(link.worker_id)
        without = unfit.carriers if unfit is not None and unfit.epoch == link.epoch else ()

        def make_offer(_core: EngineCore) -> ReceiverLink:
            # Noted in the engine's thread: `_end` closes it there, even if nobody waits by then.
            link.kv = self._receiver.offer(link.worker_id, without)
            return link.kv

        kv = await self._engine.call(make_offer, timeout_s)
        return KvHello(
            worker_id=self._identity.worker_id,
            epoch=self._identity.epoch,
            layout=self._engine.layout,
            link=kv.number,
            token=kv.token,
            endpoint=self._receiver.socket.endpoint,
            carriers=kv.offers,
            slot_bytes=self._receiver.staging.slot_bytes,
        )

    def _new_link(self, card: WorkerCard) -> PrefillLink:
        loop = asyncio.get_running_loop()

        def on_message(message: ControlMessage) -> None:
            if isinstance(message, KvWelcome):
                self._on_welcome(link, message)
            else:
                self.on_message(link, message)

        def on_lost(reason: str) -> None:
            link.fail(ChannelError(reason))
            self._lose(link, reason)

        client = ControlClient(
            card.endpoint,
            self._keys,
            make_client_id(self._identity.worker_id),
            on_message,
            on_lost,
            heartbeat_s=self._times.heartbeat_s,
            lease_s=self._times.lease_s,
        )
        link = PrefillLink(
            card.worker_id, card.epoch, client, loop.create_future(), loop.create_future()
        )
        return link

    def _on_welcome(self, link: PrefillLink, message: KvWelcome) -> None:
        if link.kv is None or message.link != link.kv.number:
            return
        if not link.welcome.done():
            link.welcome.set_result(message)
        elif message.error is not None:
            link.fail(TransferError(message.error))
            self._lose(link, message.error)

    def _on_tested(self, kv: ReceiverLink) -> None:
        for link in self._opening:
            if link.kv is kv and not link.tested.done():
                link.tested.set_result(None)

    def _on_kv_lost(self, kv: ReceiverLink, reason: str) -> None:
        for link in [*self._opening, *self._links.values()]:
            if link.kv is kv:
                link.fail(TransferError(reason))
                self._lose(link, reason)

    def _leave_out(self, card: WorkerCard, carrier: str) -> None:
        """Note that nothing comes by a carrier."""
        known = {worker.worker_id for worker in self._workers()}
        self._unfit = {name: unfit for name, unfit in self._unfit.items() if name in known}
        unfit = self._unfit.get(card.worker_id)
        if unfit is None or unfit.epoch != card.epoch:
            unfit = self._unfit[card.worker_id] = _Unfit(card.epoch)
        unfit.carriers.add(carrier)
        if unfit.carriers.issuperset(self._receiver.carriers):  # the others may work again by now
            unfit.carriers = {carrier} if len(self._receiver.carriers) > 1 else set()

    def _lose(self, link: PrefillLink, reason: str) -> None:
        if self._links.get(link.worker_id) is link:
            logger.warning("lost %s: %s", link.worker_id, reason)
            del self._links[link.worker_id]
            self._end(link)
            self.on_lost(link)

    def _end(self, link: PrefillLink) -> None:
        link.client.close()

        def close(_core: EngineCore) -> None:
            if link.kv is not None:
                self._receiver.close(link.kv)

        self._engine.submit(close, admitted=True)

    def close(self) -> None:
        """Close all connections, give up attempts at more."""
        for _epoch, task in self._attempts.values():
            task.cancel()
        for link in self._links.values():
            self._end(link)
        self._links.clear()
