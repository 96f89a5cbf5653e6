"""`pagewire` whose router changes or loses tokens, for the test that the router's bench sees it.

    python -P -m pagewire.tests.support.wrong_router router ...

The environment variable WRONG_ROUTER is "change" or "lose".
"""

import os

import msgspec

from pagewire.services.cli.main import app
from pagewire.services.router.cluster.worker_links import WorkerLink
from pagewire.shared.control.protocol import ControlMessage, TokenBatch, TokenOutput

WRONG_AT = 20  # number of each worker's message in which one stream's tokens are wrong

_on_message = WorkerLink.on_message
_counts: dict[WorkerLink, int] = {}


def _wrong(first: TokenOutput, others: list[TokenOutput]) -> TokenBatch:
    if os.environ["WRONG_ROUTER"] == "lose":
        return TokenBatch(outputs=others)
    tokens = [first.token_ids[0] + 1, *first.token_ids[1:]]
    return TokenBatch(outputs=[msgspec.structs.replace(first, token_ids=tokens), *others])


def on_message(self: WorkerLink, message: ControlMessage) -> None:
    if isinstance(message, TokenBatch):
        _counts[self] = _counts.get(self, 0) + 1
        if _counts[self] == WRONG_AT:
            message = _wrong(message.outputs[0], message.outputs[1:])
    _on_message(self, message)


if __name__ == "__main__":
    WorkerLink.on_message = on_message
    app()
