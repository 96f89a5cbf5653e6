"""The receiver's state of a KV link."""

from __future__ import annotations

from dataclasses import dataclass, field

from pagewire.shared.kv.kv_layout import KvLayout
from pagewire.shared.transfer.transports.base import Inbound


@dataclass(slots=True, eq=False)
class ReceiverLink:
    """A link from one run of another worker.

    Attributes:
        number: counts up; never used again in this process.
        peer: name of the worker that sends.
        epoch: number of its run.
        token: identifies the link on the socket.
        layout: of segments, from `Open` on: a part for each of the ranks of the side that has more.
        offers: what a sender needs to know, by transport.
        transport: name of the transport; empty until the sender has chosen one.
        inbound: the receiver's half of the transport; None until then.
        is_granted: the sender was given credits.
        is_tested: the first segment has arrived intact.
    """

    number: int
    peer: str
    epoch: int
    token: bytes
    layout: KvLayout
    offers: dict[str, bytes] = field(default_factory=dict)
    transport: str = ""
    inbound: Inbound | None = None
    is_granted: bool = False
    is_tested: bool = False
