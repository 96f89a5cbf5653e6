"""`pagewire prove` whose services lack one thing that answers depend on.

    python -P -m pagewire.tests.support.gutted_proof WHAT prove --json

WHAT is "checksum" (decode workers take each segment for intact), "resend" (prefill workers do not
send a corrupt segment again) or "migration" (the router does not move answers).
"""

from __future__ import annotations

import sys
from typing import Any

import typer

from pagewire.services.cli.main import app
from pagewire.services.cli.prove import cluster

MODULE = "pagewire.tests.support.gutted_proof"
SERVICES = ("prefill", "decode", "router")


def gut(what: str, service: str) -> None:
    """Leave one thing out of the service in this process, if it has it."""
    if (what, service) == ("checksum", "decode"):
        from pagewire.shared.engine.execution.block_mover import PendingCheck

        PendingCheck.verify = lambda _self: True
    elif (what, service) == ("resend", "prefill"):
        from pagewire.shared.transfer.endpoint.sender import KvSender

        KvSender._resend = lambda _self, _job, _cut: None
    elif (what, service) == ("migration", "router"):
        from pagewire.services.router.dispatch.dispatcher import TokenStream
        from pagewire.shared.base.errors import RequestFailedError

        def fail(_self: TokenStream, lost: Any) -> None:
            raise RequestFailedError(f"not moved: {lost.reason}")

        TokenStream._on_worker_lost = fail


def main() -> None:
    what, command = sys.argv[1:3]
    del sys.argv[1]
    if command == "prove":
        cluster.MODULES = {service: (MODULE, what, service) for service in SERVICES}
    elif command in SERVICES:
        gut(what, command)
    if command == "prefill":
        from pagewire.services.cli.prove.worker import worker

        del sys.argv[1]
        typer.run(worker)
    else:
        app()


if __name__ == "__main__":
    main()
