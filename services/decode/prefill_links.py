"""The prefill workers that a decode worker has a control connection and a KV link to."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pagewire.shared.cluster.registry import WorkerRecord
from pagewire.shared.control.channel import ClusterKeys, ControlClient, make_client_id
from pagewire.shared.control.protocol import ControlMessage, KvHello, KvRefusal
from pagewire.shared.engine.core import EngineCore
from pagewire.shared.errors import ChannelError, PagewireError
from pagewire.shared.kv.endpoint.receiver import KvReceiver
from pagewire.shared.kv.endpoint.receiver_link import ReceiverLink
from pagewire.shared.logs import Complaints
from pagewire.shared.worker.engine_handle import EngineHandle
from pagewire.shared.worker.identity import WorkerIdentity
from pagewire.shared.worker.tasks import TaskSet

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class PrefillLink:
    """A connection to one run of a prefill worker, or the attempt to open one.

    Attributes:
        tested: set once the KV link has passed its test, so that jobs may use it.
        kv: the KV link; None until it has been offered.
        opening: the task that opens the connection and the KV link.
    """

    record: WorkerRecord
    client: ControlClient
    tested: asyncio.Event = field(default_factory=asyncio.Event)
    kv: ReceiverLink | None = None
    opening: asyncio.Task[None] = field(init=False)


@dataclass(slots=True)
class PrefillLinks:
    """Keeps one link to every live prefill worker in the directory.

    Each link is opened in its own task, so that a worker that does not answer delays no other. A
    carrier whose test fails is not offered to that run of the prefill worker again, unless all
    carriers have failed: then all are offered again.

    Attributes:
        identity: this worker's name and epoch.
        engine: its thread uses the links.
        receiver: this worker's half of the KV endpoint.
        workers: returns the records of the prefill workers that are alive.
        keys: the cluster's keys.
        tasks: runs the tasks that open links.
        heartbeat_s: interval of looking for missing links, and of pings to control servers.
        lease_s: silence after which a control server counts as lost.
        timeout_s: for each step of opening a link.
    """

    identity: WorkerIdentity
    engine: EngineHandle
    receiver: KvReceiver
    workers: Callable[[], Sequence[WorkerRecord]]
    keys: ClusterKeys
    tasks: TaskSet
    heartbeat_s: float
    lease_s: float
    timeout_s: float
    _links: dict[str, PrefillLink] = field(default_factory=dict)
    _keeping: asyncio.Task[None] | None = None
    _unfit: dict[tuple[str, int], set[str]] = field(
        default_factory=dict
    )  # carriers, by worker and epoch
    _complaints: Complaints = field(default_factory=lambda: Complaints(logger))

    def __post_init__(self) -> None:
        self.receiver.on_link_tested = self.engine.in_loop(self._on_tested)
        self.receiver.on_link_lost = self.engine.in_loop(self._on_kv_lost)

    @property
    def open_epochs(self) -> dict[str, int]:
        """The prefill workers whose links jobs may use, with their epochs."""
        links = self._links.values()
        return {link.record.worker_id: link.record.epoch for link in links if link.tested.is_set()}

    def start(self) -> None:
        """Open links as workers appear."""
        self._keeping = self.tasks.spawn(self._keep_open(), "keeping links to prefill workers")

    async def _keep_open(self) -> None:
        while True:
            for record in self.workers():
                self._follow(record)
            await asyncio.sleep(self.heartbeat_s)

    def _follow(self, record: WorkerRecord) -> None:
        """Open a link to a worker's current run, unless there is one or it is being opened."""
        link = self._links.get(record.worker_id)
        if link is not None and link.record.epoch != record.epoch:
            self._lose(link, "it was restarted")
        if record.worker_id not in self._links and record.state == "ready":
            link = self._links[record.worker_id] = self._new_link(record)
            link.opening = self.tasks.spawn(self._try_open(link), f"link to {record.worker_id}")

    async def _try_open(self, link: PrefillLink) -> None:
        try:
            await self._open(link)
        except (PagewireError, TimeoutError) as exc:
            self._lose(link, str(exc) or "no answer")

    async def _open(self, link: PrefillLink) -> None:
        """Connect, offer a KV link, wait until it has passed its test.

        Raises:
            PagewireError, TimeoutError: one of these steps failed.
        """
        record, timeout_s = link.record, self.timeout_s
        pong = await link.client.connect(timeout_s)
        if (pong.worker_id, pong.epoch) != (record.worker_id, record.epoch):
            raise ChannelError(f"{record.endpoint} now belongs to another worker")
        kv = await self._offer(link)
        try:
            async with asyncio.timeout(timeout_s):
                await link.tested.wait()
        except TimeoutError:
            if not link.tested.is_set():  # else the loop has heard of both at once
                self._leave_out(link)
                raise
        self._complaints.forget(record.worker_id, record.epoch)
        logger.info("linked to %s by %s", record.worker_id, kv.carrier)

    async def _offer(self, link: PrefillLink) -> ReceiverLink:
        """Offer a KV link."""
        without = self._unfit.get((link.record.worker_id, link.record.epoch), ())

        def make_offer(_core: EngineCore) -> ReceiverLink:
            # Set in the engine's thread: `_end` closes the link there, even if this call timed out.
            link.kv = self.receiver.offer(link.record.worker_id, without)
            return link.kv

        kv = await self.engine.call(make_offer, self.timeout_s)
        link.client.post(
            KvHello(
                worker_id=self.identity.worker_id,
                epoch=self.identity.epoch,
                layout=self.engine.layout,
                link=kv.number,
                token=kv.token,
                endpoint=self.receiver.socket.endpoint,
                carriers=kv.offers,
                slot_bytes=self.receiver.staging.slot_bytes,
            )
        )
        return kv

    def _new_link(self, record: WorkerRecord) -> PrefillLink:
        def on_message(message: ControlMessage) -> None:
            if not isinstance(message, KvRefusal):
                name = type(message).__name__
                logger.warning("unexpected %s message from %s", name, record.worker_id)
            elif link.kv is not None and message.link == link.kv.number:
                self._on_kv_lost(link.kv, message.error)

        client = ControlClient(
            record.endpoint,
            self.keys,
            make_client_id(self.identity.worker_id),
            on_message,
            lambda reason: self._lose(link, reason),
            heartbeat_s=self.heartbeat_s,
            lease_s=self.lease_s,
        )
        link = PrefillLink(record, client)
        return link

    def _on_tested(self, kv: ReceiverLink) -> None:
        link = self._links.get(kv.peer)
        if link is not None and link.kv is kv:
            link.tested.set()

    def _on_kv_lost(self, kv: ReceiverLink, reason: str) -> None:
        link = self._links.get(kv.peer)
        if link is not None and link.kv is kv:
            if not link.tested.is_set():
                self._leave_out(link)
            self._lose(link, reason)

    def _leave_out(self, link: PrefillLink) -> None:
        """Note that a link's carrier failed its test; if all have failed, offer all again."""
        known = {(worker.worker_id, worker.epoch) for worker in self.workers()}
        self._unfit = {run: unfit for run, unfit in self._unfit.items() if run in known}
        run = link.record.worker_id, link.record.epoch
        unfit = self._unfit.pop(run, set())
        if link.kv is not None and link.kv.carrier:
            unfit = unfit | {link.kv.carrier}
            if not unfit.issuperset(self.receiver.carriers):
                self._unfit[run] = unfit

    def _lose(self, link: PrefillLink, reason: str) -> None:
        """End a link, or the attempt to open it, if it has not ended yet."""
        if self._links.get(link.record.worker_id) is not link:
            return
        del self._links[link.record.worker_id]
        self._end(link)
        if link.tested.is_set():
            logger.warning("lost %s: %s", link.record.worker_id, reason)
        else:
            text = f"no link to {link.record.worker_id} at {link.record.endpoint}: {reason}"
            self._complaints.say(link.record.worker_id, link.record.epoch, text)

    def _end(self, link: PrefillLink) -> None:
        link.opening.cancel()  # it has ended, if the link is open
        link.client.close()

        def close(_core: EngineCore) -> None:
            if link.kv is not None:
                self.receiver.close(link.kv)

        self.engine.submit(close, admitted=True)

    def close(self) -> None:
        """Close all connections and stop opening others."""
        if self._keeping is not None:
            self._keeping.cancel()
        for link in self._links.values():
            self._end(link)
        self._links.clear()
