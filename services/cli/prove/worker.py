"""A prefill worker that flips a byte of a KV segment, or dies while it sends one, when ordered to.

    python -P -m pagewire.services.cli.prove.worker --orders DIRECTORY --worker-id prefill-0 ...

Only `pagewire prove` starts it. The service is the usual one; what it sends KV segments by is
wrapped here, so that no other worker has code that corrupts data.
"""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from pagewire.services.cli.error_exit import one_line_errors
from pagewire.services.cli.options import DECODE_ONLY, options_of, with_settings
from pagewire.services.cli.prove.orders import Claim, Orders
from pagewire.shared.engine.execution.block_mover import PendingMove
from pagewire.shared.settings.config import WorkerSettings, load_settings
from pagewire.shared.transfer.endpoint.sender import KvSender
from pagewire.shared.transfer.messages import TEST_JOB, Segment
from pagewire.shared.transfer.transports.base import LinkSocket, Outbound, Pending, Transport
from pagewire.shared.worker.compose import make_service
from pagewire.shared.worker.process import run_worker
from pagewire.shared.worker.runtime import WorkerRuntime
from pagewire.shared.worker.service import WorkerService

SIGN_BYTE = 3  # the byte of each 4 with sign and most of the exponent, for floats of 2 or 4 bytes


class _DisturbedOutbound(Outbound):
    """The sender's half of a link, which carries out orders before it sends a segment."""

    def __init__(self, outbound: Outbound, sender: KvSender, orders: Orders, worker: str) -> None:
        self._outbound, self._sender = outbound, sender
        self._orders, self._worker = orders, worker

    @property
    def reply(self) -> bytes:
        """The answer to the receiver's offer, by the wrapped half."""
        return self._outbound.reply

    def send(self, segment: Segment, slot: int, packed: PendingMove) -> Pending:
        """Send a segment whose checksums have been computed, perhaps with a wrong byte."""
        if segment.job != TEST_JOB:
            links = self._sender.links
            peer = next(link.peer for link in links if link.outbound is self)
            claim = Claim(self._worker, peer, segment.nbytes)
            if self._orders.take("kill", claim):
                os.kill(os.getpid(), signal.SIGKILL)
            if self._orders.take("flip", claim):
                index = segment.nbytes // 8 | SIGN_BYTE
                byte = self._sender.staging.buffers[slot][index : index + 1]
                packed = self._sender.moves.queue(byte.bitwise_not_)
        return self._outbound.send(segment, slot, packed)

    def close(self) -> None:
        """Close the wrapped half of the link."""
        self._outbound.close()


class _DisturbedTransport:
    """A transport whose links to receivers carry out orders; all else is the usual one's."""

    def __init__(self, transport: Transport, sender: KvSender, orders: Orders, worker: str) -> None:
        self._transport = transport
        self._disturbed = partial(_DisturbedOutbound, sender=sender, orders=orders, worker=worker)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def outbound(self, link: int, offer: bytes, socket: LinkSocket) -> Outbound:
        """Return the sender's half of a link."""
        return self._disturbed(self._transport.outbound(link, offer, socket))


def make_disturbed(runtime: WorkerRuntime, orders: Orders) -> WorkerService:
    """Compose the prefill service of a worker that carries out orders."""
    service, sender = make_service(runtime), runtime.kv.sender
    sender.transports = {
        name: cast(Transport, _DisturbedTransport(transport, sender, orders, runtime.worker_id))
        for name, transport in sender.transports.items()
    }
    return service


@with_settings(WorkerSettings, omit=DECODE_ONLY)
def worker(
    ctx: typer.Context,
    orders: Annotated[Path, typer.Option(help="Directory of the orders.")],
) -> None:
    """Run a prefill worker that carries out orders."""
    with one_line_errors():
        settings = load_settings(WorkerSettings, options_of(WorkerSettings, ctx.params))
        make = partial(make_disturbed, orders=Orders(orders))
        raise typer.Exit(run_worker(settings, "prefill", make))


if __name__ == "__main__":
    typer.run(worker)
