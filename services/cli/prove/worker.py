"""A prefill worker that flips a byte of a KV segment, or dies while it sends one, when ordered to.

    python -P -m pagewire.services.cli.prove.worker --orders DIRECTORY --worker-id prefill-0 ...

Only `pagewire prove` starts it. The service is the usual one; what it sends KV segments by is
wrapped here, so that no other worker has code that corrupts data.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from pagewire.services.cli.error_exit import one_line_errors
from pagewire.services.cli.options import DECODE_ONLY, options_of, with_settings
from pagewire.services.cli.prove.orders import Claim, Orders
from pagewire.shared.engine.execution.block_mover import PendingMove
from pagewire.shared.engine.execution.executor import BlockMoves
from pagewire.shared.settings.config import WorkerSettings, load_settings
from pagewire.shared.transfer.messages import TEST_JOB, Segment
from pagewire.shared.transfer.staging import Staging
from pagewire.shared.transfer.transports.base import LinkSocket, Outbound, Pending, Transport
from pagewire.shared.worker.kv import open_transport
from pagewire.shared.worker.process import run_worker

SIGN_BYTE = 3  # the byte of each 4 with sign and most of the exponent, for floats of 2 or 4 bytes


class _DisturbedOutbound(Outbound):
    """The sender's half of a link, which carries out orders before it sends a segment."""

    def __init__(
        self, outbound: Outbound, disturb: Callable[[Segment, int], PendingMove | None]
    ) -> None:
        self._outbound, self._disturb = outbound, disturb

    @property
    def reply(self) -> bytes:
        """The answer to the receiver's offer, by the wrapped half."""
        return self._outbound.reply

    def send(self, segment: Segment, slot: int, packed: PendingMove) -> Pending:
        """Send a segment whose checksums have been computed, perhaps with a wrong byte."""
        if segment.job != TEST_JOB:
            packed = self._disturb(segment, slot) or packed
        return self._outbound.send(segment, slot, packed)

    def close(self) -> None:
        """Close the wrapped half of the link."""
        self._outbound.close()


class _DisturbedTransport:
    """A transport whose links to receivers carry out orders; all else is the usual one's."""

    def __init__(
        self, transport: Transport, staging: Staging, moves: BlockMoves, orders: Orders, worker: str
    ) -> None:
        self._transport, self._staging, self._moves = transport, staging, moves
        self._orders, self._worker = orders, worker

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def outbound(self, link: int, offer: bytes, socket: LinkSocket) -> Outbound:
        """Return the sender's half of a link."""
        outbound = self._transport.outbound(link, offer, socket)
        return _DisturbedOutbound(outbound, partial(self._disturb, socket.peer))

    def _disturb(self, receiver: str, segment: Segment, slot: int) -> PendingMove | None:
        """Carry out orders; return the move that flips a byte of the segment, if any."""
        claim = Claim(self._worker, receiver, segment.nbytes)
        if self._orders.take("kill", claim):
            os.kill(os.getpid(), signal.SIGKILL)
        if not self._orders.take("flip", claim):
            return None
        index = segment.nbytes // 8 | SIGN_BYTE
        byte = self._staging.buffers[slot][index : index + 1]
        return self._moves.queue(byte.bitwise_not_)


def open_disturbed(
    orders: Orders, worker: str, name: str, staging: Staging, moves: BlockMoves, host: str
) -> Transport:
    """Open a transport of a worker that carries out orders; see `open_transport`."""
    transport = open_transport(name, staging, moves, host)
    return cast(Transport, _DisturbedTransport(transport, staging, moves, orders, worker))


@with_settings(WorkerSettings, omit=DECODE_ONLY)
def worker(
    ctx: typer.Context,
    orders: Annotated[Path, typer.Option(help="Directory of the orders.")],
) -> None:
    """Run a prefill worker that carries out orders."""
    with one_line_errors():
        settings = load_settings(WorkerSettings, options_of(WorkerSettings, ctx.params))
        opener = partial(open_disturbed, Orders(orders), settings.worker_id)
        raise typer.Exit(run_worker(settings, "prefill", open_transport=opener))


if __name__ == "__main__":
    typer.run(worker)
