"""The messages of a link between two KV endpoints, over a ZeroMQ connection.

    prefill --Open, Segment, Return--> decode --Grant, Ack, Reclaim--> prefill

and, between them, the messages of prefill jobs (job_messages.py).

A credit is a staging slot of the receiver that the sender may write to. A use of a credit is one
segment; uses are numbered. Each `Segment` gets exactly one `Ack`, which returns the credit to the
sender. The sender answers a `Reclaim` with a `Return`; if a `Segment` with that credit is under
way, its `Ack` ends the use, and the credit stays with the receiver. `KvHello`, which comes first,
and `KvRefusal` are control messages (shared/control/protocol.py).

A segment may be announced while it is being packed; its payload follows, unless the link ends.
Payloads that cross by ZeroMQ have a second connection, with their `Segment`s: order holds only
within each.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from pagewire.shared.base.errors import UNDECODABLE, ProtocolError
from pagewire.shared.control.protocol import MAX_FRAME_BYTES, Count, Id, Int64
from pagewire.shared.kv.kv_layout import MAX_LAYER_GROUPS
from pagewire.shared.transfer.job_messages import JobReport, JobRequest

MAX_MESSAGE_BYTES = MAX_FRAME_BYTES  # a `Prefill` with a long prompt is the largest
MAX_CREDITS = 256  # of all links of a receiver
MAX_REPLY_BYTES = 32 << 10

TEST_JOB = "test"

CreditIndex = Annotated[int, Meta(ge=0, lt=MAX_CREDITS)]

Outcome = Literal["ok", "corrupt", "dropped"]


class _Message(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    pass


class Open(_Message, frozen=True):
    """The sender has connected; the receiver answers with credits.

    Attributes:
        transport: the transport that it has chosen from `KvHello`.
        reply: what the receiver's half of the transport needs to know.
        ranks: number of the sender's ranks.
    """

    transport: Id
    reply: Annotated[bytes, Meta(max_length=MAX_REPLY_BYTES)]
    ranks: Annotated[int, Meta(ge=1, le=64)] = 1


class Segment(_Message, frozen=True):
    """A contiguous range of a job's blocks, and of the layer groups of each of them.

    Attributes:
        credit, use: the staging slot of the payload, and the number of this use.
        job: the job's id, from `Prefill`; or `TEST_JOB`: the segment tests the link, is checked and
            goes into no block.
        first_block, num_blocks: numbers of the blocks in the job, see `KvLayout.job_blocks`.
        first_group, num_groups: layer groups of each block.
        seed: added to the checksums after the blocks.
        nbytes: size of the payload: blocks and checksums.
    """

    credit: CreditIndex
    use: Count
    job: Id
    first_block: Count
    num_blocks: Count
    first_group: Annotated[int, Meta(ge=0, lt=MAX_LAYER_GROUPS)]
    num_groups: Annotated[int, Meta(ge=0, le=MAX_LAYER_GROUPS)]
    seed: Int64
    nbytes: Annotated[int, Meta(gt=0, lt=2**40)]

    @property
    def blocks(self) -> range:
        """Numbers of the blocks in the job."""
        return range(self.first_block, self.first_block + self.num_blocks)

    @property
    def groups(self) -> range:
        """Numbers of the layer groups of each block."""
        return range(self.first_group, self.first_group + self.num_groups)


class Return(_Message, frozen=True):
    """A reclaimed credit that was idle."""

    credit: CreditIndex


class Grant(_Message, frozen=True):
    """The sender may use these staging slots of the receiver."""

    credits: Annotated[list[CreditIndex], Meta(max_length=MAX_CREDITS)]


class Ack(_Message, frozen=True):
    """The receiver is done with a segment.

    Attributes:
        outcome: "ok": the blocks are in place; "corrupt": a checksum is wrong, so the segment must
            be packed again; "dropped": no sequence waits for it any more.
    """

    credit: CreditIndex
    use: Count
    outcome: Outcome


class Reclaim(_Message, frozen=True):
    """The receiver wants a credit back."""

    credit: CreditIndex


ToReceiver = Open | Segment | Return | JobReport
ToSender = Grant | Ack | Reclaim | JobRequest

T = TypeVar("T")

encode: Callable[[ToReceiver | ToSender], bytes] = msgspec.msgpack.Encoder().encode


def _decode(decoder: msgspec.msgpack.Decoder[T], whose: str, data: bytes | memoryview) -> T:
    """Decode the message of a peer.

    Raises:
        ProtocolError: it is too large, or not one.
    """
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a KV message of {len(data)} bytes exceeds {MAX_MESSAGE_BYTES}")
    try:
        return decoder.decode(data)
    except UNDECODABLE as exc:
        raise ProtocolError(f"not a message of a KV {whose}: {exc}") from exc


_to_receiver: msgspec.msgpack.Decoder[ToReceiver] = msgspec.msgpack.Decoder(ToReceiver)
_to_sender: msgspec.msgpack.Decoder[ToSender] = msgspec.msgpack.Decoder(ToSender)
decode_for_receiver = partial(_decode, _to_receiver, "sender")
decode_for_sender = partial(_decode, _to_sender, "receiver")
