"""The sender's state of a KV link, its jobs and segments; the choice of the link's transport."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from pagewire.shared.base.errors import TransferError
from pagewire.shared.control.protocol import KvHello
from pagewire.shared.costs.link_speed import LinkSpeed
from pagewire.shared.kv.kv_layout import KvLayout
from pagewire.shared.transfer.endpoint.credits import SenderCredits
from pagewire.shared.transfer.endpoint.segments import ExportQueue, SegmentRange
from pagewire.shared.transfer.endpoint.sockets import SenderSocket
from pagewire.shared.transfer.messages import Segment
from pagewire.shared.transfer.transports.base import Outbound, Pending, Transport

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class SenderJob:
    """A job in the engine, or a link's test, which has no sequence there.

    Attributes:
        name: of the job, and of its sequence in the engine; or `TEST_JOB`.
        unacknowledged: number of layer groups of blocks without an acknowledgement.
        resends: how often each range was packed again.
        is_over: it has ended here. The receiver drops segments that still arrive for it.
    """

    name: str
    link: SenderLink
    queue: ExportQueue
    unacknowledged: int
    resends: Counter[SegmentRange] = field(default_factory=Counter)
    is_over: bool = False


@dataclass(slots=True, eq=False)
class OutgoingSegment:
    """A segment, from its packing until it is acknowledged.

    Attributes:
        segment_range: the part of the job that the segment has.
        slot: the sender's staging slot, until the payload is sent.
        packed: the packing.
        pending: the sending.
        since: when the packing was launched, then when its end was seen.
        is_packed: the end of the packing was seen.
    """

    job: SenderJob
    segment_range: SegmentRange
    segment: Segment
    slot: int
    packed: Pending
    pending: Pending
    since: float
    is_packed: bool = False


@dataclass(slots=True, eq=False)
class SenderLink:
    """A link to one run of another worker.

    Attributes:
        peer: name of the worker that receives.
        transport: name of the transport.
        slot_bytes: size of the staging slots, where both sides differ that of the smaller ones.
        layout: of segments: a part for each of the ranks of the side that has more of them.
        speed: of the segments, from the end of their packing to their acknowledgement; unknown
            before the test is acknowledged.
        sent: segments that are not acknowledged, by credit, in the order of their sending.
        acked_s: when the segment that was the first in `sent` was acknowledged, most recently.
        test: sends the link's first segment, which tests the transport. `KvSender.connect` sets it.
    """

    peer: str
    transport: str
    slot_bytes: int
    layout: KvLayout
    socket: SenderSocket
    outbound: Outbound
    credits: SenderCredits = field(default_factory=SenderCredits)
    sent: dict[int, OutgoingSegment] = field(default_factory=dict)
    speed: LinkSpeed = field(default_factory=LinkSpeed)
    acked_s: float = -math.inf
    test: SenderJob = field(init=False)

    @property
    def gb_per_s(self) -> float:
        """GB/s of the test, then of what the link carries; 0 before the test."""
        return self.speed.bytes_per_s / 1e9


def choose_transport(
    hello: KvHello, transports: Mapping[str, Transport], socket: SenderSocket
) -> tuple[str, Outbound]:
    """Return the receiver's first transport that works from here, and the sender's half of it.

    Args:
        hello: the receiver's offer.
        transports: the transports that are open in this process, by name.
        socket: for the link's announcements.

    Raises:
        TransferError: none works; says why each does not.
    """
    problems = []
    for name, offer in hello.transports.items():
        transport = transports.get(name)
        if transport is None:
            problems.append(f"{name}: this worker does not have it")
            continue
        try:
            outbound = transport.outbound(hello.link, offer, socket)
        except TransferError as exc:
            problems.append(f"{name}: {exc}")
            continue
        if problems:
            text = "; ".join(problems)
            logger.warning("KV blocks to %s cross by %s (%s)", hello.worker_id, name, text)
        return name, outbound
    raise TransferError(
        f"{hello.worker_id} can be reached by no transport ({'; '.join(problems) or 'none'})"
    )
