"""The far end of a link, played by a test that sends any messages."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec
import zmq

from pagewire.shared.kv.packing import packed_bytes
from pagewire.shared.transfer.endpoint.receiver_link import ReceiverLink
from pagewire.shared.transfer.endpoint.sender_link import SenderLink
from pagewire.shared.transfer.messages import (
    Ack,
    Grant,
    Open,
    Segment,
    ToReceiver,
    ToSender,
    decode_for_receiver,
    decode_for_sender,
    encode,
)
from pagewire.tests.support.fake_device import NUM_GROUPS
from pagewire.tests.support.kv_pair import KvPair, Request, kv_pair
from pagewire.tests.support.kv_sides import HOST, LAYOUT, Side, hello

OPEN = Open("zmq", b"")
_TOKEN = b"0123456789abcdef"
PROMPT = [1, 2, 3, 4, 5, 6, 0, 1, 2, 3]  # 2 full blocks and 2 tokens
SEGMENT = Segment(
    credit=0,
    use=1,
    job="job",
    first_block=0,
    num_blocks=1,
    first_group=0,
    num_groups=2,
    seed=0,
    nbytes=32,
)


@dataclass
class RawSender:
    """A sender's socket, and the credits that it was granted."""

    pair: KvPair
    socket: zmq.Socket[bytes]
    link: ReceiverLink
    heard: list[ToSender] = field(default_factory=list)
    uses: int = 0

    def say(self, message: ToReceiver | bytes, *body: bytes) -> None:
        data = message if isinstance(message, bytes) else encode(message)
        self.socket.send_multipart([data, *body])

    def hear(self, count: int) -> list[ToSender]:
        """Wait for messages; returns all that have come."""

        def has_heard() -> bool:
            while self.socket.poll(0):
                self.heard.append(decode_for_sender(self.socket.recv()))
            return len(self.heard) >= count

        self.pair.until(has_heard)
        return self.heard

    def send(self, body: bytes, **fields: object) -> str:
        """Send a segment with credit 0, which was granted; returns its outcome."""
        self.uses += 1
        heard = len(self.heard)
        values = {"use": self.uses, "seed": 0, "nbytes": len(body), **fields}
        self.say(Segment(credit=0, **values), body)
        ack = self.hear(heard + 1)[-1]
        assert isinstance(ack, Ack) and (ack.credit, ack.use) == (0, self.uses)
        return ack.outcome


@contextmanager
def raw_sender(pair: KvPair, decode: Side, without: Collection[str] = ()) -> Iterator[RawSender]:
    """Offer a link, and connect a sender that has not sent anything yet."""
    link = decode.receiver.offer("raw", 1, without=dict.fromkeys(without, "left out"))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.routing_id = link.token
    socket.connect(decode.receiver.socket.endpoint)
    try:
        yield RawSender(pair, socket, link)
    finally:
        socket.close(linger=0)
        context.term()


@dataclass
class RawReceiver:
    """A receiver's socket."""

    pair: KvPair
    socket: zmq.Socket[bytes]
    heard: list[ToReceiver] = field(default_factory=list)

    def say(self, message: ToSender | bytes, *more: bytes) -> None:
        data = message if isinstance(message, bytes) else encode(message)
        self.socket.send_multipart([_TOKEN, data, *more])

    def hear(self, count: int) -> list[ToReceiver]:
        """Wait for messages; returns all that have come."""

        def has_heard() -> bool:
            while self.socket.poll(0):
                token, data, *_body = self.socket.recv_multipart()
                assert token[: len(_TOKEN)] == _TOKEN  # payloads have a connection of their own
                self.heard.append(decode_for_receiver(data))
            return len(self.heard) >= count

        self.pair.until(has_heard)
        return self.heard

    def pass_test(self, credits: list[int]) -> None:
        """Wait for a link to open, grant credits, and acknowledge its test."""
        self.hear(1)
        self.say(Grant(credits))
        test = self.hear(2)[1]
        assert isinstance(test, Segment)
        self.say(Ack(test.credit, test.use, "ok"))


@contextmanager
def raw_receiver(
    pair: KvPair, prefill: Side, slot_bytes: int = 1000
) -> Iterator[tuple[RawReceiver, SenderLink]]:
    """Connect a sender to a receiver that has not sent anything yet."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.router_mandatory = True
    port = socket.bind_to_random_port(f"tcp://{HOST}")
    offer = hello(
        worker_id="raw", token=_TOKEN, endpoint=f"tcp://{HOST}:{port}", slot_bytes=slot_bytes
    )
    try:
        yield RawReceiver(pair, socket), prefill.sender.connect(offer)
    finally:
        socket.close(linger=0)
        context.term()


@contextmanager
def reserved() -> Iterator[tuple[KvPair, RawSender, Request]]:
    """Add a request that waits for three blocks, and open a link over which the test can send."""
    with kv_pair("zmq", linked=False, blocks_per_slot=8) as pair:
        pair.starts_jobs = False
        request = pair.ask(PROMPT)
        with raw_sender(pair, pair.decode) as raw:
            raw.say(OPEN)
            assert raw.hear(1) == [Grant([0, 1, 2, 3])]
            pair.until(lambda: request.job)
            yield pair, raw, request


def cells(pair: KvPair) -> list[list[int | None]]:
    return [list(block) for block in pair.decode.device.cells]


def size(count: int, num_groups: int = NUM_GROUPS) -> int:
    """Return the bytes of a payload of some blocks and layer groups."""
    return packed_bytes(LAYOUT, count, num_groups)


def payload(count: int, num_groups: int = NUM_GROUPS) -> bytes:
    """Return an intact payload for seed 0: words and checksums are zero."""
    return bytes(size(count, num_groups))


def segment_with(**fields: object) -> Segment:
    """Return `SEGMENT` with other fields."""
    return msgspec.structs.replace(SEGMENT, **fields)
