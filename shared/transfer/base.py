"""The interface of all KV transports.

A transport moves pieces: a header and a payload of bytes that lie in a staging slot. It knows
nothing of requests or blocks. The sender's `send` ends when its slot may be used again, which
does not mean that the piece was received: the acknowledgement is the services' own. The receiver
takes a free slot before it takes a payload, so that slots are the flow control.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import ClassVar

import torch

from pagewire.shared.errors import TransferError
from pagewire.shared.protocol import PieceHeader
from pagewire.shared.transfer.staging import StagingPool, StagingSlot

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReceivedPiece:
    """A piece that has landed. Whoever took it from `recv` owns the slot and releases it.

    Attributes:
        peer_id: who sent it, as named in `connect`.
        slot: holds the payload in its first `header.nbytes` bytes.
    """

    peer_id: str
    header: PieceHeader
    slot: StagingSlot


@dataclass(slots=True)
class TransportStats:
    """What went wrong so far.

    Attributes:
        malformed: messages that cannot be read, and headers that were refused.
        strays: messages and payloads that nobody was waiting for.
        expired: granted slots whose payload never came.
        broken: connections that were broken off.
    """

    malformed: int = 0
    strays: int = 0
    expired: int = 0
    broken: int = 0

    def note_malformed(self, what: str) -> None:
        """Count a message that cannot be read; only the first is a warning in the log."""
        self.malformed += 1
        level = logging.WARNING if self.malformed == 1 else logging.DEBUG
        logger.log(level, "malformed KV transfer message: %s", what)


# Returns when a payload is there; raises if it never will be.
UntilPacked = Callable[[], Awaitable[None]]


class KvTransport(ABC):
    """Moves pieces between this process and its peers; lives in one asyncio event loop.

    Attributes:
        name: as it appears in configuration, worker cards and metrics, e.g. "ucx".
        stats: what went wrong so far.
    """

    name: ClassVar[str]

    def __init__(self, worker_id: str, staging: StagingPool) -> None:
        self.worker_id = worker_id
        self.staging = staging
        self.stats = TransportStats()

    @abstractmethod
    def hold_slots(self, count: int) -> None:
        """Hold so many slots for each peer's next pieces, as long as half of all stay free."""

    @abstractmethod
    async def start(self, timeout: float) -> bytes:
        """Open for peers; return the address that a peer passes to `connect`."""

    @abstractmethod
    async def connect(self, peer_id: str, address: bytes, timeout: float) -> None:
        """Make a peer reachable, and accept pieces from it.

        Replaces an earlier connection of the same `peer_id` (the peer was restarted).

        Raises:
            TransferError: the address makes no sense or nobody answers there.
        """

    @abstractmethod
    async def send(
        self,
        peer_id: str,
        header: PieceHeader,
        payload: torch.Tensor,
        timeout: float,
        until_packed: UntilPacked | None = None,
    ) -> None:
        """Send one piece; on return, whatever the outcome, the payload may be overwritten.

        Args:
            peer_id: a connected peer.
            header: `header.nbytes` must equal the payload's size.
            payload: 1-D uint8 tensor, a prefix of a staging slot's buffer.
            timeout: seconds, not counting those in which it is packed and no slot is kept for it.
            until_packed: awaited before the payload leaves, which may change until then. Where the
                receiver holds a slot for us, the piece is offered before that, and withdrawn if
                this raises.

        Raises:
            TransferTimeoutError: the payload was not packed, or the peer took none, in time.
            TransferError: there is no such peer, or the connection broke.
            Exception: whatever `until_packed` raises.
        """

    @abstractmethod
    async def recv(self) -> ReceivedPiece:
        """Return the next piece of any peer; waits without bound, so cancel it to stop."""

    @abstractmethod
    async def disconnect(self, peer_id: str) -> None:
        """Forget a peer; unknown ones are fine.

        Sends to it fail; what was received of a piece is dropped and its slot released.
        """

    @abstractmethod
    async def close(self) -> None:
        """Disconnect all peers and free everything. Safe to call twice."""

    def fault_counts(self) -> dict[str, int]:
        """Return how often things went wrong so far, by kind; always the same kinds."""
        return asdict(self.stats)

    def lane(self, peer_id: str) -> str:
        """Name the hardware way to a peer, e.g. "cuda_ipc", "cma", "tcp", for people to read."""
        return self.name


def check_payload(header: PieceHeader, payload: torch.Tensor) -> None:
    """See whether a payload is what its header says.

    Raises:
        TransferError: it is not.
    """
    if not 0 < header.nbytes == payload.nbytes or payload.dtype != torch.uint8:
        raise TransferError(
            f"the header says {header.nbytes} bytes, the payload is {payload.nbytes} bytes "
            f"of {payload.dtype}"
        )
