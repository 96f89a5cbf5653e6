"""The workers that compute prompts for this one: control connections and KV links to them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pagewire.shared.base.errors import PagewireError, TransferError
from pagewire.shared.base.logs import Complaints
from pagewire.shared.cluster.crash_reports import CrashReport, FindCrash
from pagewire.shared.cluster.registry import WorkerRecord
from pagewire.shared.control.channel import ClusterKeys, ControlClient, make_client_id
from pagewire.shared.control.protocol import (
    Blamed,
    ControlMessage,
    EngineLost,
    KvHello,
    KvRefusal,
    Role,
)
from pagewire.shared.transfer.endpoint.receiver import KvReceiver
from pagewire.shared.transfer.endpoint.receiver_link import ReceiverLink
from pagewire.shared.worker.engine_handle import EngineHandle, EngineResource
from pagewire.shared.worker.identity import WorkerIdentity
from pagewire.shared.worker.tasks import TaskSet

logger = logging.getLogger(__name__)


def offers_link(own: Role, other: Role) -> bool:
    """Whether a worker offers a link to another one, which then computes prompts for it.

    Any two workers can be linked. But two that compute prompts for each other may both be full of
    sequences that wait for the other's blocks, so that neither has room for the other's prompts
    until the time of a job is up. And a worker that prefers prefill gains nothing by a link: it
    computes a prompt as soon as another could, and need not receive the blocks.

    Args:
        own: what the worker prefers to do.
        other: what the other one prefers to do.
    """
    return own == "decode" and other == "prefill"


@dataclass(slots=True, eq=False)
class PrefillLink:
    """A connection to one run of a prefill worker, or the attempt to open one.

    Attributes:
        kv: the KV link, from its offer to the prefill worker on.
        tested: done once the KV link has passed its test, so that jobs may use it.
        opening: the task that opens the connection and the KV link.
    """

    record: WorkerRecord
    client: ControlClient
    kv: EngineResource[ReceiverLink]
    tested: asyncio.Future[None] = field(default_factory=asyncio.Future)
    opening: asyncio.Task[None] = field(init=False)

    def end(self) -> None:
        """Close the connection and the KV link, or end the attempt to open them."""
        self.opening.cancel()
        self.client.close()
        self.kv.close()


@dataclass(slots=True)
class PrefillLinks:
    """Keeps one link to every worker that computes prompts for this one.

    Each link is opened in its own task, so that a worker that does not answer delays no other. A
    transport whose test fails is not offered to that run of the prefill worker again, until an
    attempt without it fails before a transport is chosen: then all are offered again.

    Attributes:
        identity: this worker's name and epoch.
        engine: its thread uses the links.
        receiver: receives the blocks.
        workers: returns the records of the workers that are alive and to be linked.
        keys: the cluster's keys.
        tasks: runs the tasks that open links.
        heartbeat_s: interval of checking for missing links, and of pings to control servers.
        lease_s: silence after which a control server counts as lost.
        timeout_s: for each step of opening a link.
        find_crash: returns the crash report of a worker's run; None if it did not crash.
        suspect: called in the engine's thread if jobs may be why their worker ends.
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
    find_crash: FindCrash
    suspect: Callable[[Blamed], None]
    _links: dict[str, PrefillLink] = field(default_factory=dict)
    _keeping: asyncio.Task[None] | None = None
    _is_closed: bool = False
    # Transports that failed their tests, and why, by worker and epoch.
    _unfit: dict[tuple[str, int], dict[str, str]] = field(default_factory=dict)
    _complaints: Complaints = field(default_factory=lambda: Complaints(logger))

    @property
    def open_epochs(self) -> dict[str, int]:
        """The prefill workers whose links jobs may use, with their epochs."""
        links = self._links.values()
        return {link.record.worker_id: link.record.epoch for link in links if link.tested.done()}

    def start(self) -> None:
        """Open links to workers as their records appear."""
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
            self._begin(record)

    def _begin(self, record: WorkerRecord) -> None:
        """Begin to open a link to the run of a worker."""
        client = ControlClient(
            record.endpoint,
            self.keys,
            make_client_id(self.identity.worker_id),
            lambda message: self._on_message(link, message),
            lambda reason: self._lose(link, reason),
            heartbeat_s=self.heartbeat_s,
            lease_s=self.lease_s,
        )
        link = PrefillLink(record, client, EngineResource(self.engine, self.receiver.close))
        self._links[record.worker_id] = link
        link.opening = self.tasks.spawn(self._open(link), f"link to {record.worker_id}")

    async def _open(self, link: PrefillLink) -> None:
        """Connect, offer a KV link, wait until it has passed its test; end it if a step fails."""
        record = link.record
        try:
            await link.client.connect_to(record.worker_id, record.epoch, self.timeout_s)
            kv = await self._offer(link)
        except PagewireError as exc:
            self._lose(link, str(exc))
            return
        await asyncio.wait([link.tested], timeout=self.timeout_s)  # no TimeoutError
        if link.tested.done():
            self._complaints.forget(record.worker_id, record.epoch)
            logger.info("linked to %s by %s", record.worker_id, kv.transport)
        elif kv.is_granted or not kv.transport:
            self.on_lost(kv, "no answer")
        else:  # not the transport's fault
            self._lose(link, "all staging slots are in use")

    async def _offer(self, link: PrefillLink) -> ReceiverLink:
        """Offer a KV link, by the transports that have not failed.

        Raises:
            PagewireError: too many links are open, no transport works, the engine is busy, or the
                connection is lost.
        """
        run = link.record.worker_id, link.record.epoch
        without = self._unfit.get(run, {})
        try:
            kv = await link.kv.open(lambda: self.receiver.offer(*run, without), self.timeout_s)
        except TransferError:
            self._unfit.pop(run, None)  # no other can be offered, perhaps
            raise
        hello = KvHello(
            worker_id=self.identity.worker_id,
            epoch=self.identity.epoch,
            model_identity=self.engine.model_identity,
            layout=self.engine.layout,
            link=kv.number,
            token=kv.token,
            endpoint=self.receiver.socket.endpoint,
            transports=kv.offers,
            slot_bytes=self.receiver.staging.slot_bytes,
        )
        link.client.post(hello)
        return kv

    def _on_message(self, link: PrefillLink, message: ControlMessage) -> None:
        kv = link.kv.value
        match message:
            case KvRefusal():
                if kv is not None and message.link == kv.number:
                    self.on_lost(kv, message.error)
            case Blamed():
                # In the engine's thread before the link is closed there.
                self.engine.submit(lambda _core: self.suspect(message), admitted=True)
            case EngineLost():
                self._lose(link, message.error)
            case _:
                name = type(message).__name__
                logger.warning(
                    "ignoring an unexpected %s message from %s", name, link.record.worker_id
                )

    def on_tested(self, kv: ReceiverLink) -> None:
        """Let jobs use a link that has passed its test."""
        link = self._links.get(kv.peer)
        if link is not None and link.kv.value is kv:
            link.tested.set_result(None)

    def on_lost(self, kv: ReceiverLink, reason: str) -> None:
        """End the connection of a KV link that has ended; another one is opened later."""
        link = self._links.get(kv.peer)
        if link is not None and link.kv.value is kv:
            if not link.tested.done():
                self._leave_out(link.record, kv.transport, reason)
            self._lose(link, reason)

    def _leave_out(self, record: WorkerRecord, transport: str, reason: str) -> None:
        """Record that a transport failed its test; if none is left, all are offered again."""
        known = {(worker.worker_id, worker.epoch) for worker in self.workers()}
        self._unfit = {run: unfit for run, unfit in self._unfit.items() if run in known}
        run = record.worker_id, record.epoch
        unfit = self._unfit.pop(run, {}) | {transport: f"its test failed: {reason}"}
        if transport and not unfit.keys() >= self.receiver.transports.keys():
            self._unfit[run] = unfit
            logger.warning("transport %s failed: %s gets others first", transport, record.worker_id)

    def _lose(self, link: PrefillLink, reason: str) -> None:
        """End a link, or the attempt to open it, if it has not ended yet."""
        record = link.record
        if self._links.get(record.worker_id) is not link:
            return
        del self._links[record.worker_id]
        link.end()
        if link.tested.done():
            logger.warning("lost %s: %s", record.worker_id, reason)
        else:
            text = f"no link to {record.worker_id} at {record.endpoint}: {reason}"
            self._complaints.say(record.worker_id, record.epoch, text)

    def look_up_crash(self, kv: ReceiverLink, then: Callable[[CrashReport | None], None]) -> None:
        """Find out whether the worker of an ended KV link crashed.

        Args:
            kv: the link.
            then: called with the report in the engine's thread, within about a second; not called
                if this worker ends: then routers move the requests.
        """
        if not self._is_closed:
            self.tasks.spawn(self._look_up_crash(kv, then), f"finding out about {kv.peer}")

    async def _look_up_crash(
        self, kv: ReceiverLink, then: Callable[[CrashReport | None], None]
    ) -> None:
        crash = await self.find_crash(kv.peer, kv.epoch)
        self.engine.submit(lambda _core: then(crash), admitted=True)

    def close(self) -> None:
        """Close all connections and stop opening others."""
        self._is_closed = True
        if self._keeping is not None:
            self._keeping.cancel()
        for link in self._links.values():
            link.end()
        self._links.clear()
