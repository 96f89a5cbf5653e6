"""The far end of a link says what makes no sense there."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from pagewire.shared.transfer.endpoint.sender_link import SenderLink
from pagewire.shared.transfer.messages import (
    MAX_MESSAGE_BYTES,
    TEST_JOB,
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
from pagewire.tests.support.fake_engine import make_sequence
from pagewire.tests.support.kv_pair import KvPair, kv_pair
from pagewire.tests.support.kv_raw import (
    OPEN,
    PROMPT,
    SEGMENT,
    RawReceiver,
    cells,
    payload,
    raw_receiver,
    raw_sender,
    segment_with,
    size,
)
from pagewire.tests.support.kv_sides import TIMEOUT_S

pytestmark = pytest.mark.timeout(30)


# A sender


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ([OPEN], "the link was opened twice"),
        ([Return(0)], " nobody asked for"),
        ([Return(200)], "returns credit 200, which nobody asked for"),
        ([SEGMENT, SEGMENT], "has no use 1"),
        ([b"garbage"], "not a message of a KV sender"),
        ([encode(Grant([1]))], "not a message of a KV sender"),
    ],
    ids=["open", "return", "return-unknown", "twice", "garbage", "not-its-own"],
)
def test_a_sender_that_breaks_the_protocol_loses_its_link_alone(
    messages: list[ToReceiver | bytes], why: str
) -> None:
    _loses(messages, payload(1), why)


@pytest.mark.parametrize(
    ("change", "body", "why"),
    [
        ({"credit": 4}, payload(1), "has no use 1 of credit 4"),
        ({"credit": 255}, payload(1), "has no use 1 of credit 255"),
        ({"use": 0}, payload(1), "has no use 0"),
        ({"nbytes": 65}, bytes(65), "a segment of 65 bytes in a staging slot of 64"),
        ({"nbytes": 2**40 - 1}, payload(1), "in a staging slot of 64"),
        ({}, payload(1)[1:], "a payload of 31 bytes, announced as 32"),
        ({}, None, "a payload of 0 bytes, announced as 32"),
    ],
    ids=str,
)
def test_a_segment_without_a_place_ends_its_link(
    change: dict[str, int], body: bytes | None, why: str
) -> None:
    _loses([segment_with(**change)], body, why)


def _loses(messages: Sequence[ToReceiver | bytes], body: bytes | None, why: str) -> None:
    """Let one of two senders say something that ends its link."""
    with kv_pair("zmq") as pair, raw_sender(pair, pair.decode) as raw:
        raw.say(OPEN)
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


def _with_credit(message: ToReceiver | bytes, grant: ToSender) -> ToReceiver | bytes:
    """Name a credit that was granted."""
    assert isinstance(grant, Grant)
    if isinstance(message, bytes | Open):
        return message
    return msgspec.structs.replace(message, credit=grant.credits[0])


def test_credits_of_a_sender_that_is_gone_are_granted_before_they_are_reclaimed() -> None:
    with kv_pair("zmq", num_prefills=2, decode_slots=12, linked=False) as pair:
        with raw_sender(pair, pair.decode) as raw:
            raw.say(OPEN)
            raw.hear(1)
            links = []
            for prefill in pair.prefills:
                links.append(pair.connect(prefill, pair.decode))
                pair.until(lambda: links[-1].received.transport)
            # Eight of its twelve credits are reclaimed. These three come back, highest first, and
            # the first of the others gets them.
            test = segment_with(job=TEST_JOB)
            for credit in (7, 6, 5):
                pair.until(lambda: not pair.decode.device.moves)
                pair.decode.device.has_moved = credit > 5
                raw.say(msgspec.structs.replace(test, credit=credit), payload(1))
                if credit > 5:
                    pair.until(lambda: credit in links[0].sent.credits.idle)  # noqa: B023
            pair.until(lambda: pair.decode.device.moves)
        time.sleep(0.3)  # libzmq notices that it is gone
        pair.decode.device.has_moved = True
        pair.until(lambda: pair.decode.lost)
        ((lost, reason),) = pair.decode.lost
        assert lost is raw.link
        assert reason.startswith("the sender cannot be reached")
        for _ in range(100):
            pair.step()
            time.sleep(0.002)
        assert [prefill.lost for prefill in pair.prefills] == [[], []]
        assert pair.decode.lost == [(lost, reason)]


# A receiver


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
        ([encode(OPEN)], "not a message of a KV receiver"),
        ([bytes(MAX_MESSAGE_BYTES + 1)], "bytes exceeds"),
    ],
    ids=lambda value: str(value)[:50],
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


def test_what_is_packed_in_vain_is_sent_and_answers_a_reclaim() -> None:
    with kv_pair("zmq", linked=False) as pair, raw_receiver(pair, pair.prefill) as (raw, link):
        raw.pass_test([0])
        pair.until(lambda: link.credits.idle)
        pair.prefill.device.has_moved = False
        _export(pair, raw, link)
        raw.say(Reclaim(0))
        raw.say(Grant([1]))  # shows that the other was read
        pair.until(lambda: pair.prefill.slots.num_idle == 2)
        pair.prefill.sender.cancel("job", link)
        pair.prefill.device.has_moved = True
        for credit, segment in enumerate(raw.hear(4)[2:]):
            assert isinstance(segment, Segment) and (segment.job, segment.credit) == ("job", credit)
            raw.say(Ack(credit, segment.use, "dropped"))
        pair.until(lambda: not pair.prefill.held())
        assert list(link.credits.idle) == [1]


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
        pair.until(lambda: list(link.credits.idle) == [1] or link.credits.in_use)
        pair.prefill.sender.cancel("job", link)


@contextmanager
def _three_segments_sent() -> Iterator[tuple[KvPair, RawReceiver, SenderLink, list[Segment]]]:
    """Send three segments to a receiver that has not acknowledged them yet."""
    with (
        kv_pair("zmq", linked=False) as pair,
        raw_receiver(pair, pair.prefill, slot_bytes=size(1)) as (raw, link),
    ):
        raw.pass_test([0, 1, 2])
        _export(pair, raw, link)
        segments = [message for message in raw.hear(5)[2:] if isinstance(message, Segment)]
        pair.until(lambda: all(sent.is_packed for sent in link.sent.values()))
        assert len(segments) == len(link.sent) == 3
        yield pair, raw, link, segments


def _acknowledge(pair: KvPair, raw: RawReceiver, link: SenderLink, segment: Segment) -> None:
    raw.say(Ack(segment.credit, segment.use, "ok"))
    pair.until(lambda: segment.credit in link.credits.idle)


def test_a_slow_link_is_kept_as_long_as_segments_are_acknowledged() -> None:
    with _three_segments_sent() as (pair, raw, link, segments):
        for segment in segments:  # the last one after three times the limit
            pair.clock.now += TIMEOUT_S - 0.2
            _acknowledge(pair, raw, link, segment)
        assert pair.prefill.lost == []
        pair.until(lambda: not pair.held())


def test_a_segment_that_is_never_acknowledged_ends_its_link_whatever_overtakes_it() -> None:
    with _three_segments_sent() as (pair, raw, link, segments):
        for segment in segments[1:]:
            pair.clock.now += TIMEOUT_S / 2 - 0.1
            _acknowledge(pair, raw, link, segment)
        assert pair.prefill.lost == []
        pair.clock.now += 0.4
        pair.until(lambda: pair.prefill.lost)


def _export(pair: KvPair, raw: RawReceiver, link: Any) -> None:
    pair.prefill.core.sequences.add(make_sequence("job", PROMPT, prefill_only=True))
    pair.prefill.sender.export("job", link, 0, 3)
    pair.until(lambda: pair.prefill.device.moved)
