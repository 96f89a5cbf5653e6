"""The `timings` of a response (timings.py) as types, see objects.py."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

Milliseconds = Annotated[float, Meta(ge=0, description="milliseconds")]


class CachedPart(msgspec.Struct):
    """Which of a prompt's tokens were cached.

    Attributes:
        tokens: cached on the worker that computed the rest of the prompt.
        is_local: whether that worker is the decode worker itself.
        decode_worker_tokens: those that the decode worker had cached.
    """

    tokens: int
    worker: str
    is_local: bool
    decode_worker_tokens: int


class PrefillPart(msgspec.Struct):
    """The computation of a prompt."""

    worker: str
    queued_ms: Milliseconds
    ms: Milliseconds
    chunks: int


class TransferPart(msgspec.Struct):
    """The transfer of KV blocks.

    Attributes:
        ms: from the first segment to the last block.
        after_first_token_ms: from the first token to the last block; about 0 if that came before.
        bytes: all that were sent, with checksums.
    """

    ms: Milliseconds
    after_first_token_ms: Milliseconds
    bytes: int
    segments: int
    carrier: str


class DecodePart(msgspec.Struct):
    """The steps that computed the tokens after the first one."""

    worker: str | None
    queued_ms: Milliseconds | None
    steps: int
    ms: Milliseconds
    mean_step_ms: Milliseconds | None
    p99_step_ms: Milliseconds | None


class ChoiceTimings(msgspec.Struct):
    """Where the time of one answer went.

    Attributes:
        placed_ms: until it was sent to a decode worker.
        migrations: how often it changed its decode worker.
        workers: all decode workers that it had.
    """

    index: int
    placed_ms: Milliseconds
    cached: CachedPart | None
    prefill: PrefillPart | None
    transfer: TransferPart | None
    decode: DecodePart
    migrations: int
    workers: list[str]


class RequestTimings(msgspec.Struct):
    """Where the time of a request went.

    Attributes:
        router_ms: until its body was read, checked and tokenized.
    """

    router_ms: Milliseconds
    first_token_ms: Milliseconds | None
    total_ms: Milliseconds
    choices: list[ChoiceTimings]
