"""Carriers that lose payloads while a test wants it, and one that only one side has."""

from __future__ import annotations

from typing import ClassVar, Literal

from pagewire.shared.engine.execution.block_mover import PendingMove
from pagewire.shared.transfer.carriers.base import DONE, LinkSocket, Outbound, Pending
from pagewire.shared.transfer.messages import Segment
from pagewire.tests.support.loopback_carrier import LoopbackCarrier

Trouble = Literal["lost", "corrupt"]


class ShakyCarrier(LoopbackCarrier):
    """Loopback that loses segments, or announces payloads that do not come.

    Attributes:
        trouble: "lost": nothing is sent; "corrupt": segments are announced without a payload; None:
            all works. For all senders in this process.
        num_tried: number of segments that were to be sent.
    """

    name: ClassVar[str] = "shaky"
    trouble: ClassVar[Trouble | None] = None
    num_tried: ClassVar[int] = 0

    def outbound(self, link: int, offer: bytes, socket: LinkSocket) -> Outbound:
        """Return the sender's half of a link."""
        return _ShakyOutbound(super().outbound(link, offer, socket), socket)


class AbsentCarrier(LoopbackCarrier):
    """Loopback under another name, for a carrier that only one side has."""

    name: ClassVar[str] = "absent"


class _ShakyOutbound:
    def __init__(self, inner: Outbound, socket: LinkSocket) -> None:
        self._inner, self._socket = inner, socket

    @property
    def reply(self) -> bytes:
        return self._inner.reply

    def send(self, segment: Segment, slot: int, packed: PendingMove) -> Pending:
        ShakyCarrier.num_tried += 1
        if ShakyCarrier.trouble is None:
            return self._inner.send(segment, slot, packed)
        return DONE if ShakyCarrier.trouble == "lost" else self._socket.post(segment)

    def close(self) -> None:
        self._inner.close()
