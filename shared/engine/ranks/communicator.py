"""Sums and logits among ranks on the CPUs of one host, over a Unix socket for each two ranks.

Ranks on GPUs have these sockets, too, and meet over them while they load.

A step of a small model has dozens of sums, each of which waits for the slowest rank, so that the
way from one process to another counts: 8 x 128 numbers take two ranks 0.06 ms this way, and 1 ms
with gloo, whose own threads stand between its sockets and the caller's thread. Nobody else on the
host can connect to these sockets, and if one closes, it is clear which rank is lost.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from pagewire.shared.base.errors import RankError
from pagewire.shared.model.shard import Communicator

STEP_S = 5.0  # at least, for another rank to get as far in a step as this one has
# For rank 0: if its process is stopped, it may go on later, and if it hangs, its worker ends it.
RANK_0_S = 600.0
LOAD_S = 600.0  # for another rank to get as far in loading
POLL_S = 0.25
# The number of the exchange, which is the same on all ranks, and the bytes that follow.
_HEADER = struct.Struct("<IQ")


class RankCommunicator(Communicator, Protocol):
    """The `Communicator` of a rank in a process of its own."""

    def open(self, device: torch.device) -> None:
        """Connect this rank's device with those of the others; all ranks call this together.

        Raises:
            ConfigError: this machine's devices cannot be connected.
            RankError: a rank is lost.
        """
        ...

    def join(self) -> None:
        """Add up with the other ranks from now on; all ranks call this together.

        Raises:
            RankError: a rank is lost.
        """
        ...

    def meet(self) -> None:
        """Wait until all ranks have called this.

        Raises:
            RankError: a rank is lost.
        """
        ...

    def check(self) -> None:
        """Check that a step that has ended has waited for no rank in vain.

        Raises:
            RankError: it has, and what it returned means nothing.
        """
        ...

    def close(self) -> None:
        """Free everything; no step runs any more."""
        ...


@dataclass(slots=True, eq=False)
class _Peer:
    """Another rank in one exchange: what is still to be sent to it and to be received from it."""

    rank: int
    connection: socket.socket
    outgoing: memoryview
    incoming: memoryview
    header: bytearray | None
    payload: torch.Tensor | None = None

    @property
    def is_done(self) -> bool:
        return not self.outgoing and self.payload is not None and not self.incoming


@dataclass(slots=True, eq=False)
class SocketCommunicator:
    """The `Communicator` of a rank whose model is on the CPU.

    Attributes:
        rank: this rank.
        sockets: to each of the others, by rank; they do not block.
        patience_s: how long this waits in a step for a rank of which nothing comes, unless that is
            rank 0.
        rank_0_s: how long it waits for rank 0.
        is_loading: no step needs other ranks yet, for which this waits for `LOAD_S`.
    """

    rank: int
    sockets: Mapping[int, socket.socket]
    patience_s: float = STEP_S
    rank_0_s: float = RANK_0_S
    is_loading: bool = False
    _number: int = field(default=0)

    def reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over the ranks, added in their order: the same bits on each rank.

        Sums of 16-bit numbers are rounded once.

        Raises:
            RankError: a rank is lost, or computes something else.
        """
        first, *others = self._exchange(x)
        if any(part.numel() != x.numel() for part in others):
            raise RankError("the ranks add up values of different shapes")
        total = first.to(torch.float32) if x.dtype.itemsize < 4 else first.clone()
        for part in others:
            total += part
        return total.to(x.dtype).view(x.shape)

    def reduce_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        residual: torch.Tensor | None,
    ) -> None:
        """Return None: there is no kernel for both."""

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[N, sum of n]` of each rank's `[N, n]`, in the order of the ranks.

        Raises:
            RankError: a rank is lost, or computes something else.
        """
        if not len(x):  # as on the other ranks, whose widths are not known
            widths = self._exchange(torch.tensor([x.shape[1]]))
            return x.new_empty(0, sum(int(width) for width in widths))
        return torch.cat([part.view(len(x), -1) for part in self._exchange(x)], dim=1)

    def open(self, device: torch.device) -> None:
        """Do nothing: the sockets are open."""

    def join(self) -> None:
        """Do nothing: this has never added up alone."""

    def meet(self) -> None:
        """Wait until all ranks have called this.

        Raises:
            RankError: a rank is lost, or computes something else.
        """
        self._exchange(torch.zeros(1, dtype=torch.uint8))

    def check(self) -> None:
        """Do nothing: `reduce` and `gather` have raised the error."""

    def close(self) -> None:
        """Close the sockets; other ranks that wait for this one fail."""
        for connection in self.sockets.values():
            connection.close()

    def _exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Send a tensor to all others; return each rank's, as one row, in the ranks' order."""
        own = x.contiguous().view(-1)
        body = _bytes_of(own)
        self._number = (self._number + 1) % (1 << 32)
        message = memoryview(_HEADER.pack(self._number, len(body)) + bytes(body))
        peers: dict[int, _Peer] = {}
        for rank, connection in self.sockets.items():
            header = bytearray(_HEADER.size)
            peers[rank] = _Peer(rank, connection, message, memoryview(header), header)
        self._advance(peers, x.dtype)
        parts = {rank: peer.payload for rank, peer in peers.items()} | {self.rank: own}
        return [part for _, part in sorted(parts.items()) if part is not None]

    def _advance(self, peers: Mapping[int, _Peer], dtype: torch.dtype) -> None:
        """Send and receive until everything is sent and received."""
        silent_s = 0.0
        left = list(peers.values())
        while True:
            moved = [self._move(peer, dtype) for peer in left]
            left = [peer for peer in left if not peer.is_done]
            if not left:
                return
            if any(moved):
                silent_s = 0.0
                continue
            poller = select.poll()
            for peer in left:
                poller.register(
                    peer.connection, select.POLLIN | (select.POLLOUT if peer.outgoing else 0)
                )
            if poller.poll(POLL_S * 1000):
                continue
            # Counted in short waits: while all ranks are stopped, as in a paused container, the
            # clock goes on.
            silent_s += POLL_S
            rank = min(peer.rank for peer in left)
            patience_s = LOAD_S if self.is_loading else self.patience_s
            patience_s = patience_s if rank else self.rank_0_s
            if silent_s >= patience_s:
                raise RankError(f"rank {rank} has not answered for {patience_s:g} s", rank)

    def _move(self, peer: _Peer, dtype: torch.dtype) -> bool:
        """Send and receive what does not block; return whether that was anything."""
        before = len(peer.outgoing), len(peer.incoming), peer.payload is None
        try:
            while peer.outgoing:
                peer.outgoing = peer.outgoing[peer.connection.send(peer.outgoing) :]
        except BlockingIOError:
            pass
        except OSError as exc:
            raise RankError(f"rank {peer.rank} has ended", peer.rank) from exc
        self._receive(peer, dtype)
        return before != (len(peer.outgoing), len(peer.incoming), peer.payload is None)

    def _receive(self, peer: _Peer, dtype: torch.dtype) -> None:
        try:
            while peer.incoming:
                if not (taken := peer.connection.recv_into(peer.incoming)):
                    raise ConnectionResetError
                peer.incoming = peer.incoming[taken:]
                if not peer.incoming and peer.header is not None:
                    number, size = _HEADER.unpack(peer.header)
                    if number != self._number or size % dtype.itemsize:
                        problem = f"rank {peer.rank} computes another step than rank {self.rank}"
                        raise RankError(problem, peer.rank)
                    peer.header = None
                    peer.payload = torch.empty(size // dtype.itemsize, dtype=dtype)
                    peer.incoming = _bytes_of(peer.payload)
        except BlockingIOError:
            pass
        except OSError as exc:
            raise RankError(f"rank {peer.rank} has ended", peer.rank) from exc


def _bytes_of(row: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor with one dimension."""
    return row.view(torch.uint8).numpy().data


def connected(count: int) -> list[dict[int, socket.socket]]:
    """Return, for each of `count` ranks, its sockets to the others by rank; they do not block.

    Raises:
        OSError: there are too many open files.
    """
    sockets: list[dict[int, socket.socket]] = [{} for _ in range(count)]
    with contextlib.ExitStack() as undo:
        for rank in range(count):
            for other in range(rank):
                sockets[rank][other], sockets[other][rank] = pair = socket.socketpair()
                for connection in pair:
                    undo.enter_context(connection)
                    connection.setblocking(False)
        undo.pop_all()
    return sockets
