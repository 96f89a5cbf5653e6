"""One side of a KV link, played by the test, which sends each message itself."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import zmq

from pagewire.shared.cluster.registry import WorkerRecord
from pagewire.shared.control.channel import ControlClient, ControlServer, make_client_id
from pagewire.shared.control.protocol import (
    ControlMessage,
    KvHello,
    KvRefusal,
    LoadReport,
)
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
from pagewire.tests.support.kv_workers import HOST, IDENTITY, KEYS, LAYOUT, PrefillWorker
from pagewire.tests.support.worker_records import record

WAIT_MS = 5000


class PrefillByHand:
    """A prefill worker's control server.

    Attributes:
        hellos: the `KvHello`s, each with the id of its connection.
        received: all messages.
        lost: ids of lost connections.
    """

    def __init__(self, worker_id: str, epoch: int) -> None:
        self.worker_id, self.epoch = worker_id, epoch
        self.hellos: list[tuple[str, KvHello]] = []
        self.received: list[ControlMessage] = []
        self.lost: list[str] = []
        self.endpoint = ""
        self.server: ControlServer

    def on_message(self, peer_id: str, message: ControlMessage) -> None:
        """Keep a message."""
        self.received.append(message)
        if isinstance(message, KvHello):
            self.hellos.append((peer_id, message))

    def record(self, **changes: Any) -> WorkerRecord:
        """Return this worker's record."""
        fields = {"role": "prefill", "endpoint": self.endpoint}
        return record(self.worker_id, self.epoch, **(fields | changes))

    def post(self, message: ControlMessage) -> None:
        """Send a message to the connection of the newest hello."""
        self.server.post(self.hellos[-1][0], message)

    def refuse(self, error: str) -> None:
        """Refuse the newest hello's link, or end it."""
        self.post(KvRefusal(link=self.hellos[-1][1].link, error=error))


@asynccontextmanager
async def prefill_by_hand(
    worker_id: str = "prefill-0", epoch: int = 1, lease_s: float = 10.0
) -> AsyncIterator[PrefillByHand]:
    """Run the control server; by itself it answers only pings."""
    worker = PrefillByHand(worker_id, epoch)
    worker.server = ControlServer(
        HOST,
        0,
        KEYS,
        worker_id,
        epoch,
        worker.on_message,
        worker.lost.append,
        heartbeat_s=0.05,
        lease_s=lease_s,
    )
    worker.endpoint = await worker.server.start()
    try:
        yield worker
    finally:
        await worker.server.close()


class KvLinkByHand:
    """A sender's end of a link; all calls except `granted` block the event loop."""

    def __init__(self, socket: zmq.Socket[bytes], carrier: str) -> None:
        self._socket, self._carrier = socket, carrier
        self._credit = 0
        self._in_use: int | None = None  # a credit
        self._uses = 0
        self._tickets: list[Prefill] = []
        self.send(Open(self._carrier, b""))

    def send(self, message: ToReceiver, *body: bytes) -> None:
        """Send a message."""
        self._socket.send_multipart([encode(message), *body])

    def receive(self) -> object:
        """Wait for a message."""
        assert self._socket.poll(WAIT_MS), "the receiver says nothing"
        return decode_for_sender(self._socket.recv())

    def break_rules(self) -> None:
        """Send a message after which the other side ends the link."""
        self.send(Open(self._carrier, b""))  # a second time

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
            first=0,
            count=count,
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
        load = LoadReport(1, 1, 0)
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
def kv_link_by_hand(hello: KvHello, carrier: str = "zmq") -> Iterator[KvLinkByHand]:
    """Open the link that a hello offers."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.routing_id = hello.token
        KEYS.secure_client(socket)
        socket.connect(hello.endpoint)
        yield KvLinkByHand(socket, carrier)


class DecodeByHand:
    """A decode worker's control connection to a prefill worker, and the messages that came."""

    def __init__(self, worker: PrefillWorker) -> None:
        self._worker = worker
        self.received: list[ControlMessage] = []
        self.lost: list[str] = []
        self.client: ControlClient

    def hello(self, **changes: Any) -> KvHello:
        """Return the hello of a worker at whose endpoint nobody listens."""
        fields: dict[str, Any] = {
            "worker_id": "decode-0",
            "epoch": 1,
            "model_identity": IDENTITY,
            "layout": LAYOUT,
            "link": 1,
            "token": bytes(16),
            "endpoint": "tcp://127.0.0.1:1",
            "carriers": {"zmq": b""},
            "slot_bytes": 1 << 16,
        }
        return KvHello(**(fields | changes))

    def refusals(self) -> list[KvRefusal]:
        """Return the refusals that came."""
        return [message for message in self.received if isinstance(message, KvRefusal)]

    async def say_hello(self, **changes: Any) -> str | None:
        """Post a hello and wait for the link or its refusal; returns the reason of a refusal."""
        hello = self.hello(**changes)
        links, refused = list(self._worker.sender.links), len(self.refusals())

        def is_open() -> bool:
            return any(link not in links for link in self._worker.sender.links)

        self.client.post(hello)
        await eventually(lambda: len(self.refusals()) > refused or is_open())
        if len(self.refusals()) == refused:
            return None
        assert self.refusals()[-1].link == hello.link
        return self.refusals()[-1].error


@asynccontextmanager
async def decode_by_hand(worker: PrefillWorker) -> AsyncIterator[DecodeByHand]:
    """Connect to a prefill worker's control server."""
    decode = DecodeByHand(worker)
    decode.client = ControlClient(
        worker.endpoint,
        KEYS,
        make_client_id("decode"),
        decode.received.append,
        decode.lost.append,
        heartbeat_s=0.05,
        lease_s=10,
    )
    await decode.client.connect(5)
    try:
        yield decode
    finally:
        decode.client.close()
