"""Bytes and messages that make no sense, from strangers and from the far end of a link."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import zmq

from pagewire.shared.channel_auth import ClusterKeys
from pagewire.shared.errors import ConfigError
from pagewire.shared.kv.link_test import TEST_JOB
from pagewire.shared.kv.messages import (
    MAX_MESSAGE_BYTES,
    Ack,
    Grant,
    Open,
    Reclaim,
    Return,
    Segment,
    ToReceiver,
    ToSender,
    encode,
)
from pagewire.shared.kv.sockets import KvSockets, ReceiverSocket, SenderSocket
from pagewire.tests.support.aio import eventually, run_async
from pagewire.tests.support.fake_device import NUM_PARTS, make_sequence
from pagewire.tests.support.kv_pair import KvPair, Request, kv_pair
from pagewire.tests.support.kv_raw import RawReceiver, RawSender, raw_receiver, raw_sender
from pagewire.tests.support.kv_sides import PARTS

pytestmark = pytest.mark.timeout(30)
PROMPT = [1, 2, 3, 4, 5, 6, 0, 1, 2, 3]  # 2 full blocks and 2 tokens
SEGMENT = Segment(
    credit=0, use=1, job="job", first=0, count=1, first_part=0, num_parts=2, seed=0, nbytes=32
)
GARBAGE = [
    b"",
    b"garbage",
    os.urandom(3000),
    b"\x92\xa1\xff\x01",  # msgpack, but its tag is not UTF-8
    b"\x81\xa4type\xa4Oven",
    encode(Open()) + b"more",
    encode(Grant([0])),  # a receiver's
    b"\0" * (MAX_MESSAGE_BYTES + 1),
]


# Segments of the far end


@contextmanager
def reserved() -> Iterator[tuple[KvPair, RawSender, Request]]:
    """A request that waits for three blocks, and a link to send something by."""
    with kv_pair("zmq", linked=False, blocks_per_slot=8) as pair:
        pair.starts_jobs = False
        request = pair.ask(PROMPT)
        with raw_sender(pair, pair.decode) as raw:
            raw.say(Open())
            assert raw.hear(1) == [Grant([0, 1, 2, 3])]
            pair.until(lambda: request.job)
            yield pair, raw, request


def cells(pair: KvPair) -> list[list[int | None]]:
    return [list(block) for block in pair.decode.device.cells]


def size(count: int, num_parts: int = NUM_PARTS) -> int:
    """Bytes of a payload."""
    return PARTS.packed_bytes(count, num_parts)


def payload(count: int, num_parts: int = NUM_PARTS) -> bytes:
    """What is intact: words and sums of zero, for seed 0."""
    return bytes(size(count, num_parts))


@pytest.mark.parametrize(
    ("change", "nbytes"),
    [
        ({"job": "another"}, size(3)),
        ({"first": 1}, size(3)),
        ({"first": 3, "count": 1}, size(1)),
        ({"first": 2**40 - 1, "count": 1}, size(1)),
        ({"count": 4}, size(4)),
        ({"count": 2}, size(3)),
        ({}, size(3) - 1),
        ({}, size(3) + 1),
        ({}, 1),
        ({"count": 0}, 1),
        ({"count": 2**40 - 1}, size(8)),
        ({"num_parts": 0}, size(3)),
        ({"num_parts": 1}, size(3)),
        ({"num_parts": NUM_PARTS + 1}, size(3, NUM_PARTS + 1)),
        ({"first_part": 1}, size(3)),
        ({"first_part": NUM_PARTS, "num_parts": 1}, size(3, 1)),
        ({"first_part": 7, "num_parts": 8, "count": 1}, size(1, 8)),
    ],
    ids=str,
)
def test_a_segment_that_is_not_expected_is_dropped(change: dict[str, Any], nbytes: int) -> None:
    with reserved() as (pair, raw, request):
        before = cells(pair)
        fields = {"job": request.job, "first": 0, "count": 3, "first_part": 0, "num_parts": 2}
        assert raw.send(bytes(nbytes), **fields | change) == "dropped"
        assert cells(pair) == before
        assert raw.send(payload(3), **fields) == "ok"


def test_what_has_arrived_or_is_arriving_is_not_written_over() -> None:
    with reserved() as (pair, raw, request):
        fields = {"job": request.job, "first_part": 0, "num_parts": NUM_PARTS}
        assert raw.send(payload(1), **fields, first=1, count=1) == "ok"
        before = cells(pair)
        assert raw.send(bytes(payload(3)), **fields, first=0, count=3) == "dropped"
        assert raw.send(b"\1" + payload(1)[1:], **fields, first=1, count=1) == "dropped"
        part = {**fields, "num_parts": 1}
        assert raw.send(payload(1, 1), **part, first=1, count=1) == "dropped"
        assert cells(pair) == before
        assert raw.send(payload(1, 1), **part, first=0, count=1) == "ok"
        assert raw.send(payload(1, 1), **part, first=0, count=1) == "dropped"


def test_what_arrived_corrupt_is_taken_again() -> None:
    with reserved() as (_pair, raw, request):
        fields = {"job": request.job, "first": 0, "count": 3, "first_part": 0, "num_parts": 2}
        for spoiled in (b"\1" + payload(3)[1:], payload(3)[:-1] + b"\1"):
            assert raw.send(spoiled, **fields) == "corrupt"
        assert raw.send(payload(3), **fields, seed=1) == "corrupt"  # left from another use
        assert raw.send(payload(3), **fields) == "ok"


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ([Open()], "the link was opened twice"),
        ([Return(0)], " nobody asked for"),
        ([Return(200)], "returns credit 200, which nobody asked for"),
        ([SEGMENT, SEGMENT], "has no use 1"),
    ],
    ids=["open", "return", "return-unknown", "twice"],
)
def test_a_sender_that_breaks_the_protocol_loses_its_link_alone(
    messages: list[ToReceiver], why: str
) -> None:
    _loses(messages, payload(1), why)


@pytest.mark.parametrize(
    ("change", "body", "why"),
    [
        ({"credit": 4}, payload(1), "has no use 1 of credit 4"),
        ({"credit": 255}, payload(1), "has no use 1 of credit 255"),
        ({"use": 0}, payload(1), "has no use 0"),
        ({"nbytes": 0}, b"", "a segment of 0 bytes in a slot of 64"),
        ({"nbytes": 65}, bytes(65), "a segment of 65 bytes in a slot of 64"),
        ({"nbytes": 2**40 - 1}, payload(1), "in a slot of 64"),
        ({}, payload(1)[1:], "a payload of 31 bytes, announced as 32"),
        ({}, None, "a payload of 0 bytes, announced as 32"),
    ],
    ids=str,
)
def test_a_segment_without_a_place_ends_its_link(
    change: dict[str, int], body: bytes | None, why: str
) -> None:
    fields = {name: getattr(SEGMENT, name) for name in SEGMENT.__struct_fields__}
    _loses([Segment(**fields | change)], body, why)


def _loses(messages: list[ToReceiver], body: bytes | None, why: str) -> None:
    """Let one of two senders say something that ends its link."""
    with kv_pair("zmq") as pair, raw_sender(pair, pair.decode) as raw:
        raw.say(Open())
        first = raw.hear(2)[0]  # one more as the other link returns it
        before = cells(pair)
        for message in messages:
            if getattr(message, "credit", 0) < 4:
                message = _with_credit(message, first)
            raw.say(message, *([] if body is None or not isinstance(message, Segment) else [body]))
        pair.until(lambda: pair.decode.lost)
        ((link, reason),) = pair.decode.lost
        assert link is raw.link
        assert why in reason
        assert cells(pair) == before
        pair.ask(PROMPT)
        pair.finish()


def _with_credit(message: ToReceiver, grant: ToSender) -> ToReceiver:
    """Name a credit that was granted."""
    assert isinstance(grant, Grant)
    if isinstance(message, Open):
        return message
    return msgspec.structs.replace(message, credit=grant.credits[0])


def test_the_test_of_a_link_may_not_be_anything() -> None:
    with reserved() as (pair, raw, _request):
        fields = {"job": TEST_JOB, "first": 0, "count": 0, "first_part": 0, "num_parts": 0}
        assert raw.send(bytes(100), **fields) == "corrupt"
        assert pair.decode.tested == []


# What the far end says to a sender


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ([Grant([1])], "credit 1 was granted twice"),
        ([Grant([5, 5])], "credit 5 was granted twice"),
        ([Ack(1, 1, "ok")], "credit 1 was acknowledged and nothing was sent"),
        ([Ack(200, 1, "ok")], "credit 200 was acknowledged and nothing was sent"),
        ([Reclaim(200)], "credit 200 was reclaimed and is not here"),
        ([Reclaim(1), Reclaim(1)], "credit 1 was reclaimed and is not here"),
        ([b"garbage"], "not a message of a KV receiver"),
        ([encode(Open())], "not a message of a KV receiver"),
        ([b"\0" * 4097], "a KV message of 4097 bytes exceeds 4096"),
    ],
    ids=str,
)
def test_a_receiver_that_breaks_the_protocol_loses_its_link_alone(
    messages: list[ToSender | bytes], why: str
) -> None:
    with kv_pair("zmq") as pair, raw_receiver(pair, pair.prefill) as (raw, link):
        raw.pass_test([0, 1])
        for message in messages:
            raw.say(message)
        pair.until(lambda: pair.prefill.lost)
        ((lost, reason),) = pair.prefill.lost
        assert lost is link
        assert why in reason
        pair.ask(PROMPT)
        pair.finish()


def test_a_receiver_that_acknowledges_another_use_loses_its_link() -> None:
    with kv_pair("zmq") as pair, raw_receiver(pair, pair.prefill) as (raw, link):
        raw.hear(1)
        raw.say(Grant([3]))
        test = raw.hear(2)[1]
        assert isinstance(test, Segment)
        raw.say(Ack(3, test.use + 1, "ok"))
        pair.until(lambda: pair.prefill.lost)
        assert pair.prefill.lost[0][0] is link
        assert "was acknowledged and is not open" in pair.prefill.lost[0][1]


def test_credits_are_reclaimed_and_come_back() -> None:
    with kv_pair("zmq", linked=False) as pair, raw_receiver(pair, pair.prefill) as (raw, link):
        raw.pass_test([0, 1])
        raw.say(Reclaim(1))
        assert raw.hear(3)[2] == Return(1)
        raw.say(Grant([1]))
        pair.until(lambda: list(link.credits.idle) == [0, 1])


def test_a_credit_that_is_packed_into_comes_back_when_it_is_not_used() -> None:
    with kv_pair("zmq", linked=False) as pair, raw_receiver(pair, pair.prefill) as (raw, link):
        raw.pass_test([0])
        pair.until(lambda: link.credits.idle)
        pair.prefill.device.has_moved = False
        _export(pair, raw, link)
        raw.say(Reclaim(0))
        raw.say(Grant([1]))  # shows that the other was read
        pair.until(lambda: pair.prefill.sender.staging.num_free == 2)
        pair.prefill.sender.cancel("job", link)
        pair.prefill.device.has_moved = True
        assert raw.hear(3)[2] == Return(0)
        assert not pair.prefill.held()


def test_a_payload_that_is_under_way_answers_a_reclaim() -> None:
    with kv_pair("zmq", linked=False) as pair, raw_receiver(pair, pair.prefill) as (raw, link):
        raw.pass_test([0])
        pair.until(lambda: link.credits.idle)
        _export(pair, raw, link)
        segment = raw.hear(3)[2]
        assert isinstance(segment, Segment) and segment.job == "job"
        raw.say(Reclaim(0))
        raw.say(Ack(0, segment.use, "dropped"))
        raw.say(Grant([1]))
        pair.until(lambda: list(link.credits.idle) == [1] or link.credits.num_in_use)
        pair.prefill.sender.cancel("job", link)


def _export(pair: KvPair, raw: RawReceiver, link: Any) -> None:
    pair.prefill.core.add(make_sequence("job", PROMPT, prefill_only=True))
    pair.prefill.sender.export("job", link, 0, 3)
    pair.until(lambda: pair.prefill.device.moved)


# Strangers


def test_malformed_bytes_and_unknown_tokens_are_counted_and_disturb_nobody() -> None:
    with kv_pair("zmq", num_prefills=2) as pair:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        stranger = context.socket(zmq.DEALER)
        stranger.connect(pair.decode.receiver.socket.endpoint)
        receiver = pair.decode.receiver
        request = pair.ask(PROMPT)
        for data in GARBAGE:
            stranger.send(data)
            stranger.send_multipart([data, b"payload"])
            stranger.send_multipart([b"", data, b"payload", b"more"])
        said = [Open(), SEGMENT, Return(0)]
        for message in said:
            stranger.send(encode(message))
        expected = 3 * len(GARBAGE) + len(said)
        pair.until(lambda: receiver.fault_counts()["malformed"] == expected)
        stranger.send(b"x" * (1 << 20))  # more than any message may have: libzmq closes it
        pair.finish()
        assert len(request.tried) == 1
        assert (receiver.fault_counts()["lost"], receiver.num_links) == (0, 2)
        stranger.close(linger=0)
        context.term()


def test_malformed_bytes_of_a_known_sender_are_counted() -> None:
    with reserved() as (pair, raw, request):
        for data in GARBAGE:
            raw.say(data)
        fields = {"job": request.job, "first": 0, "count": 3, "first_part": 0, "num_parts": 2}
        assert raw.send(payload(3), **fields) == "ok"
        assert pair.decode.receiver.fault_counts()["malformed"] == len(GARBAGE)


def test_a_host_that_is_not_ours() -> None:
    sockets = KvSockets(None, 100)
    for host in ("192.0.2.1", "2001:db8::1"):
        with pytest.raises(ConfigError, match=f"cannot listen on {host}.*PAGEWIRE_HOST"):
            ReceiverSocket(sockets, host, host)
    sockets.close()


@pytest.mark.parametrize("key", ["the cluster's", "none", "of another cluster", "its own"])
def test_only_the_cluster_gets_anything_in(key: str) -> None:
    ours = ClusterKeys.derive("secret")
    _public, secret = zmq.curve_keypair()
    keys = {
        "the cluster's": ours,
        "none": None,
        "of another cluster": ClusterKeys.derive("other"),
        "its own": OwnKeys(ours.public, secret),
    }[key]

    async def scenario() -> None:
        sockets = KvSockets(ours, 1000)
        others = KvSockets(keys, 1000)
        socket = ReceiverSocket(sockets, "127.0.0.1", "127.0.0.1")
        token = secrets.token_bytes(16)
        sender = SenderSocket(others.connect(socket.endpoint, token))
        sender.open()
        if key == "the cluster's":
            await eventually(socket.is_due)
            assert socket.receive() == (token, Open(), None)
            socket.send(token, Grant([1]))
            await eventually(sender.is_due)
            assert list(sender.receive()) == [Grant([1])]
        elif key == "its own":
            await eventually(lambda: socket.num_denied)
        else:
            await asyncio.sleep(0.1)
        assert socket.receive() is None
        sender.close()
        socket.close()
        others.close()
        sockets.close()

    run_async(scenario())


class OwnKeys(ClusterKeys):
    """A client that knows the cluster's public key, and has keys of its own."""

    def secure_client(self, socket: zmq.Socket[bytes]) -> None:
        super().secure_client(socket)
        socket.curve_publickey = zmq.curve_public(self.secret)
