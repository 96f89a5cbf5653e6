from __future__ import annotations

import contextlib
import random
from itertools import islice
from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewire.shared.base.errors import ProtocolError
from pagewire.shared.kv.kv_layout import MAX_LAYER_GROUPS
from pagewire.shared.transfer.job_messages import JobReport, JobRequest
from pagewire.shared.transfer.messages import (
    MAX_CREDITS,
    MAX_MESSAGE_BYTES,
    MAX_REPLY_BYTES,
    Ack,
    Grant,
    Open,
    Outcome,
    Reclaim,
    Return,
    Segment,
    ToReceiver,
    ToSender,
    decode_for_receiver,
    decode_for_sender,
    encode,
)
from pagewire.tests.support.examples import MANY_EXAMPLES
from pagewire.tests.support.hostile_bytes import hostile_bytes
from pagewire.tests.support.message_values import values_of

PACK = msgspec.msgpack.encode
DECODERS = (decode_for_receiver, decode_for_sender)
MAX_COUNT = 2**40 - 1

credit_indices = st.integers(0, MAX_CREDITS - 1)
counts = st.integers(0, MAX_COUNT)
reports, requests = [
    st.one_of([values_of(msgspec.inspect.type_info(kind)) for kind in get_args(kinds)])
    for kinds in (JobReport, JobRequest)
]
to_receiver = st.one_of(
    reports,
    st.builds(
        Open, transport=st.text(min_size=1, max_size=64), reply=st.binary(max_size=MAX_REPLY_BYTES)
    ),
    st.builds(Return, credit_indices),
    st.builds(
        Segment,
        credit=credit_indices,
        use=counts,
        job=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=64),
        first_block=counts,
        num_blocks=counts,
        first_group=st.integers(0, MAX_LAYER_GROUPS - 1),
        num_groups=st.integers(0, MAX_LAYER_GROUPS),
        seed=st.integers(-(2**63), 2**63 - 1),
        nbytes=st.integers(1, MAX_COUNT),
    ),
)
to_sender = st.one_of(
    requests,
    st.builds(Grant, st.lists(credit_indices, max_size=MAX_CREDITS)),
    st.builds(Ack, credit_indices, counts, st.sampled_from(get_args(Outcome))),
    st.builds(Reclaim, credit_indices),
)

LARGEST_SEGMENT = Segment(
    credit=MAX_CREDITS - 1,
    use=MAX_COUNT,
    job="\U0010ffff" * 64,
    first_block=MAX_COUNT,
    num_blocks=MAX_COUNT,
    first_group=MAX_LAYER_GROUPS - 1,
    num_groups=MAX_LAYER_GROUPS,
    seed=-(2**63),
    nbytes=MAX_COUNT,
)


@given(message=to_receiver)
def test_the_receiver_reads_what_a_sender_writes(message: ToReceiver) -> None:
    data = encode(message)
    assert len(data) <= MAX_MESSAGE_BYTES
    assert decode_for_receiver(data) == decode_for_receiver(memoryview(data)) == message
    with pytest.raises(ProtocolError, match="not a message of a KV receiver"):
        decode_for_sender(data)


@given(message=to_sender)
def test_the_sender_reads_what_a_receiver_writes(message: ToSender) -> None:
    data = encode(message)
    assert len(data) <= MAX_MESSAGE_BYTES
    assert decode_for_sender(data) == decode_for_sender(memoryview(data)) == message
    with pytest.raises(ProtocolError, match="not a message of a KV sender"):
        decode_for_receiver(data)


def test_the_largest_messages_fit() -> None:
    grant = Grant([MAX_CREDITS - 1] * MAX_CREDITS)
    assert len(encode(LARGEST_SEGMENT)) <= MAX_MESSAGE_BYTES
    assert decode_for_receiver(encode(LARGEST_SEGMENT)) == LARGEST_SEGMENT
    assert len(encode(grant)) <= MAX_MESSAGE_BYTES
    assert decode_for_sender(encode(grant)) == grant


def test_a_segment_has_its_blocks_and_layer_groups() -> None:
    segment = msgspec.structs.replace(
        LARGEST_SEGMENT, first_block=5, num_blocks=3, first_group=2, num_groups=4
    )
    assert segment.blocks == range(5, 8)
    assert segment.groups == range(2, 6)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[
            (name, -1)
            for name in ("credit", "use", "first_block", "num_blocks", "first_group", "nbytes")
        ],
        ("nbytes", 0),
        ("credit", MAX_CREDITS),
        ("credit", "0"),
        ("credit", 0.5),
        ("credit", None),
        *[(name, MAX_COUNT + 1) for name in ("use", "first_block", "num_blocks", "nbytes")],
        ("job", ""),
        ("job", "j" * 65),
        ("job", 7),
        ("first_group", MAX_LAYER_GROUPS),
        ("num_groups", MAX_LAYER_GROUPS + 1),
        ("num_groups", -1),
        ("seed", 2**63),
        ("more", 0),
        ("type", "Grant"),
    ],
)
def test_a_field_out_of_bounds_is_an_error(field: str, value: object) -> None:
    fields = {"type": "Segment", **msgspec.structs.asdict(LARGEST_SEGMENT)}
    assert decode_for_receiver(PACK(fields)) == LARGEST_SEGMENT
    with pytest.raises(ProtocolError, match="not a message of a KV sender"):
        decode_for_receiver(PACK({**fields, field: value}))


@pytest.mark.parametrize(
    "message",
    [
        {"type": "Grant", "credits": [0] * (MAX_CREDITS + 1)},
        {"type": "Grant", "credits": [0, MAX_CREDITS]},
        {"type": "Grant", "credits": 1},
        {"type": "Grant"},
        {"type": "Ack", "credit": 0, "use": 1, "outcome": "lost"},
        {"type": "Ack", "credit": 0, "use": 1},
        {"type": "Reclaim", "credit": -1},
        {"type": "Void", "credit": 0},
        {"credit": 0},
    ],
)
def test_a_wrong_message_to_a_sender_is_an_error(message: dict[str, object]) -> None:
    with pytest.raises(ProtocolError, match="not a message of a KV receiver"):
        decode_for_sender(PACK(message))


@MANY_EXAMPLES
@given(data=st.binary(max_size=200))
def test_garbage_is_a_protocol_error(data: bytes) -> None:
    for decode in DECODERS:
        with pytest.raises(ProtocolError):
            decode(data)


@MANY_EXAMPLES
@given(message=st.one_of(to_receiver, to_sender), data=st.data())
def test_a_corrupt_message_is_a_message_or_an_error(
    message: ToReceiver | ToSender, data: st.DataObject
) -> None:
    encoded = bytearray(encode(message))
    at = data.draw(st.integers(0, len(encoded) - 1))
    encoded[at] ^= data.draw(st.integers(1, 255))
    for decode in DECODERS:
        with contextlib.suppress(ProtocolError):
            decode(bytes(encoded))  # perhaps an equal one: a number has several encodings
        with pytest.raises(ProtocolError):
            decode(bytes(encode(message)[:at]))
        with pytest.raises(ProtocolError):
            decode(encode(message) + b"\0")


def test_what_strangers_send_is_a_protocol_error() -> None:
    recorded = [encode(LARGEST_SEGMENT), encode(Grant([1, 2, 3]))]
    for data in islice(hostile_bytes(random.Random(3), recorded), 1500):
        for decode, kinds in ((decode_for_receiver, ToReceiver), (decode_for_sender, ToSender)):
            with contextlib.suppress(ProtocolError):
                assert isinstance(decode(data), kinds)


def test_depth_and_size_are_bounded() -> None:
    for decode in DECODERS:
        with pytest.raises(ProtocolError, match="not a message"):
            decode(b"\x91" * MAX_MESSAGE_BYTES)
        with pytest.raises(ProtocolError, match=f"{MAX_MESSAGE_BYTES + 1} bytes exceeds"):
            decode(bytes(MAX_MESSAGE_BYTES + 1))
        with pytest.raises(ProtocolError, match="not a message"):
            decode(b"")
