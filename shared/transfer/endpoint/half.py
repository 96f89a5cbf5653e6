"""The base class of `KvSender` and `KvReceiver`: what both need, and their links."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from pagewire.shared.engine.execution.executor import BlockMoves
from pagewire.shared.engine.live_sequences import LiveSequences
from pagewire.shared.kv.kv_layout import KvLayout
from pagewire.shared.transfer.endpoint.events import KvEvent, LinkLost
from pagewire.shared.transfer.endpoint.receiver_link import ReceiverLink
from pagewire.shared.transfer.endpoint.sender_link import SenderLink
from pagewire.shared.transfer.staging import Staging
from pagewire.shared.transfer.transports.base import Transport

LinkT = TypeVar("LinkT", ReceiverLink, SenderLink)


@dataclass(slots=True)
class KvStats:
    """Counts what one half of an endpoint has done since it started.

    Attributes:
        outcomes: segments by outcome; a sender also counts those as "lost" whose link ended.
        bytes: bytes that were sent and acknowledged, or received, by (peer, transport).
        resends: segments that were packed again.
        lost_links: links that ended because of a fault.
        strays: messages that belong to no open link.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    bytes: Counter[tuple[str, str]] = field(default_factory=Counter)
    resends: int = 0
    lost_links: int = 0
    strays: int = 0


@dataclass(slots=True, kw_only=True)
class KvHalf(ABC, Generic[LinkT]):
    """One half of a KV endpoint; `KvEndpoint` calls it before and after each launch.

    Attributes:
        sequences: the engine's live sequences, which this half looks up, activates or frees.
        moves: packs and unpacks the engine's blocks.
        staging: the staging slots for payloads.
        layout: of the blocks.
        transports: the transports that are open in this process, by name, the preferred one first.
        events: what has happened and nobody has handled, oldest first; both halves share them.
        watch, unwatch: called with file descriptors that should wake the engine's thread.
        links: those that are open. Other threads may read a copy.
    """

    sequences: LiveSequences
    moves: BlockMoves
    staging: Staging
    layout: KvLayout
    transports: Mapping[str, Transport]
    events: deque[KvEvent]
    watch: Callable[[int], None] = lambda _fd: None
    unwatch: Callable[[int], None] = lambda _fd: None
    links: list[LinkT] = field(default_factory=list)
    clock: Callable[[], float] = time.monotonic
    stats: KvStats = field(default_factory=KvStats)

    def close_all(self) -> None:
        """End all links; the engine's thread has ended."""
        for link in list(self.links):
            self.close(link)

    @abstractmethod
    def close(self, link: LinkT) -> None:
        """End a link, if it is open."""

    def lose(self, link: LinkT, reason: str) -> None:
        """End a link because of a fault, if it is open."""
        if link in self.links:
            self.stats.lost_links += 1
            self.close(link)
            self.events.append(LinkLost(link, reason))
