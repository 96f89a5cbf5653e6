"""One side of a KV link between workers, played by the test, which sends each message itself."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import zmq

from pagewire.shared.cluster.registry import WorkerRecord
from pagewire.shared.control.protocol import KvHello, KvRefusal, LoadReport
from pagewire.shared.costs.load import NO_LOAD
from pagewire.shared.kv.packing import packed_bytes
from pagewire.shared.transfer.job_messages import Prefill, PrefillDone, PrefillFailed
from pagewire.shared.transfer.messages import (
    TEST_JOB,
    Ack,
    Grant,
    Open,
    Reclaim,
    Return,
    Segment,
    ToReceiver,
    decode_for_sender,
    encode,
)
from pagewire.tests.support.aio import eventually
from pagewire.tests.support.control import KEYS, Client, Server, connected, serving
from pagewire.tests.support.kv_router import Router, router_of
from pagewire.tests.support.kv_services import (
    Worker,
    decode_worker,
    prefill_record,
    prefill_worker,
)
from pagewire.tests.support.kv_sides import LAYOUT, hello

WAIT_MS = 5000


@dataclass
class PrefillByHand:
    """A prefill worker's control server.

    Attributes:
        server: has the messages and the lost connections.
    """

    worker_id: str
    epoch: int
    server: Server

    @property
    def hellos(self) -> list[tuple[str, KvHello]]:
        """The `KvHello`s that came, each with the id of its connection."""
        return [each for each in self.server.received if isinstance(each[1], KvHello)]

    def record(self, **changes: Any) -> WorkerRecord:
        """Return this worker's record."""
        fields = {"worker_id": self.worker_id, "epoch": self.epoch}
        return prefill_record(**(fields | {"endpoint": self.server.endpoint} | changes))

    def refuse(self, error: str) -> None:
        """Refuse the newest hello's link, or end it."""
        peer, newest = self.hellos[-1]
        self.server.control.post(peer, KvRefusal(link=newest.link, error=error))


@asynccontextmanager
async def prefill_by_hand(
    worker_id: str = "prefill-0", epoch: int = 1, lease_s: float = 10.0
) -> AsyncIterator[PrefillByHand]:
    """Run the control server; by itself it answers only pings."""
    async with serving(0, epoch, lease_s, 0.05, worker_id) as server:
        yield PrefillByHand(worker_id, epoch, server)


class KvLinkByHand:
    """A sender's end of a link; all calls except `granted` block the event loop."""

    def __init__(self, socket: zmq.Socket[bytes], transport: str) -> None:
        self._socket, self._transport = socket, transport
        self._credit = 0
        self._in_use: int | None = None  # a credit
        self._uses = 0
        self._tickets: list[Prefill] = []
        self.send(Open(self._transport, b""))

    def send(self, message: ToReceiver, *body: bytes) -> None:
        """Send a message."""
        self._socket.send_multipart([encode(message), *body])

    def receive(self) -> object:
        """Wait for a message."""
        assert self._socket.poll(WAIT_MS), "the receiver says nothing"
        return decode_for_sender(self._socket.recv())

    def break_rules(self) -> None:
        """Send a message after which the other side ends the link."""
        self.send(Open(self._transport, b""))  # a second time

    async def granted(self) -> None:
        """Wait for credits."""
        await eventually(lambda: self._socket.poll(0))

    def pass_test(self) -> None:
        """Send the link's test, and wait for its acknowledgement."""
        grant = self.receive()
        assert isinstance(grant, Grant)
        self._credit = grant.credits[0]
        self.send_blocks(TEST_JOB, 1)

    def send_blocks(self, job: str, count: int) -> None:
        """Send the first blocks of a job, all zeros, and wait for their acknowledgement."""
        self._in_use = self._credit
        payload = bytes(packed_bytes(LAYOUT, count))  # intact for seed 0: checksums are zero, too
        self._uses += 1
        segment = Segment(
            credit=self._in_use,
            use=self._uses,
            job=job,
            first_block=0,
            num_blocks=count,
            first_group=0,
            num_groups=len(LAYOUT.layer_groups),
            seed=0,
            nbytes=len(payload),
        )
        self.send(segment, payload)
        while not isinstance(ack := self.receive(), Ack):
            self._answer(ack)
        self._in_use = None
        assert ack.outcome == "ok"

    def gives_credits_back(self) -> bool:
        """Answer all messages: another link needs the credits that this one has. Always true."""
        while self._socket.poll(0):
            self._answer(self.receive())
        return True

    def tickets(self) -> list[Prefill]:
        """Return the jobs that were requested so far."""
        while self._socket.poll(0):
            self._answer(self.receive())
        return self._tickets

    def fail(self, job_id: str, reason: str = "scripted") -> None:
        """Report that a job failed."""
        self.send(PrefillFailed(job_id=job_id, reason=reason))

    def done(self, job_id: str, first_token: int) -> None:
        """Report a job's first token."""
        load = LoadReport(1, 1, NO_LOAD)
        done = PrefillDone(job_id=job_id, first_token=first_token, cached_tokens=0, load=load)
        self.send(done)

    def _answer(self, message: object) -> None:
        """Keep a requested job; return a reclaimed credit that is idle.

        A credit in use is returned by its `Ack`.
        """
        if isinstance(message, Prefill):
            self._tickets.append(message)
        if isinstance(message, Reclaim) and message.credit != self._in_use:
            self.send(Return(message.credit))


@contextmanager
def kv_link_by_hand(offered: KvHello, transport: str = "zmq") -> Iterator[KvLinkByHand]:
    """Open the link that a hello offers."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.routing_id = offered.token
        KEYS.secure_client(socket)
        socket.connect(offered.endpoint)
        yield KvLinkByHand(socket, transport)


@dataclass
class DecodeByHand:
    """A decode worker's control connection to a prefill worker."""

    worker: Worker
    connection: Client

    def refusals(self) -> list[KvRefusal]:
        """Return the refusals that came."""
        return [each for each in self.connection.received if isinstance(each, KvRefusal)]

    async def say_hello(self, **changes: Any) -> str | None:
        """Post a hello and wait for the link or its refusal; returns the reason of a refusal."""
        said = hello(**changes)
        links, refused = list(self.worker.sender.links), len(self.refusals())

        def is_open() -> bool:
            return any(link not in links for link in self.worker.sender.links)

        self.connection.control.post(said)
        await eventually(lambda: len(self.refusals()) > refused or is_open())
        if len(self.refusals()) == refused:
            return None
        assert self.refusals()[-1].link == said.link
        return self.refusals()[-1].error


@asynccontextmanager
async def decode_by_hand(worker: Worker) -> AsyncIterator[DecodeByHand]:
    """Connect to a prefill worker's control server."""
    async with connected(worker.endpoint, "decode", 10, 0.05) as connection:
        yield DecodeByHand(worker, connection)


@dataclass(frozen=True)
class FailingJob:
    """The job and its surroundings.

    Attributes:
        link: the link by which the job was requested, played by the test.
        other: the other prefill worker.
        decode: the decode worker.
        router: the router that asked for the answer.
        job: the job's name.
    """

    link: KvLinkByHand
    other: Worker
    decode: Worker
    router: Router
    job: str


@asynccontextmanager
async def failing_job(then: str, **asked: Any) -> AsyncIterator[FailingJob]:
    """Ask for an answer; the job goes to the worker that the test plays.

    Args:
        then: "next": the decode worker knows the other prefill worker, too; "local": it does not.
        asked: see `Router.generate`.
    """
    async with (
        prefill_by_hand("prefill-0") as failing,
        prefill_worker("prefill-1") as other,
        decode_worker() as d,
        router_of(d) as router,
    ):
        is_next = then == "next"
        d.records = [failing.record(), *([other.record()] if is_next else [])]
        await eventually(lambda: failing.hellos)
        with kv_link_by_hand(failing.hellos[0][1]) as link:
            await link.granted()
            link.pass_test()
            await eventually(
                lambda: (
                    link.gives_credits_back()
                    and d.is_linked()
                    and d.is_linked("prefill-1") == is_next
                )
            )
            router.generate(**asked)
            await eventually(link.tickets)
            yield FailingJob(link, other, d, router, link.tickets()[0].job_id)
