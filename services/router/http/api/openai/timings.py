"""Fills in the `timings` of a response, in milliseconds, for requests that ask for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from pagewire.services.router.dispatch.answer_times import AnswerTimes
from pagewire.shared.base.errors import InvalidRequestError
from pagewire.shared.control.protocol import Timings

HEADER = "x-pagewire-timings"
_VALUES = {None: False, "0": False, "1": True}

Milliseconds = Annotated[float, Meta(ge=0, description="milliseconds")]


class CachedPart(msgspec.Struct):
    """The numbers of a prompt's tokens that were cached.

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
    """Where and how fast the prompt was computed."""

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
    transport: str | None


class DecodePart(msgspec.Struct, kw_only=True):
    """The steps that computed the tokens after the first one."""

    worker: str | None
    queued_ms: Milliseconds | None = None
    steps: int
    ms: Milliseconds
    mean_step_ms: Milliseconds | None
    p99_step_ms: Milliseconds | None


class ChoiceTimings(msgspec.Struct, kw_only=True):
    """Where the time of one answer went.

    Attributes:
        placed_ms: until it was sent to a decode worker.
        migrations: how often it changed its decode worker.
        workers: all workers that have worked on it, prefill workers included.
    """

    index: int
    placed_ms: Milliseconds
    cached: CachedPart | None = None
    prefill: PrefillPart | None = None
    transfer: TransferPart | None = None
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


def wants_timings(header: str | None) -> bool:
    """Return whether a request asks for timings by its header `HEADER`.

    Args:
        header: its value; None if the request does not have it.

    Raises:
        InvalidRequestError: the value is neither 0 nor 1.
    """
    try:
        return _VALUES[header]
    except KeyError as exc:
        raise InvalidRequestError(f"the header {HEADER} must be 1 or 0", HEADER) from exc


def timings_field(
    router_s: float, first_token_s: float | None, total_s: float, answers: Sequence[AnswerTimes]
) -> RequestTimings:
    """Return the field `timings` of a response.

    Args:
        router_s: from its arrival until its answers were admitted: the body is read, checked and
            tokenized; in seconds, as all others.
        first_token_s: from its arrival to the first token of any answer; None before that.
        total_s: from its arrival to the last token of all answers, or until now.
        answers: in the order of prompts and then of choices.
    """
    return RequestTimings(
        router_ms=_ms(router_s),
        first_token_ms=None if first_token_s is None else _ms(first_token_s),
        total_ms=_ms(total_s),
        choices=[_choice(index, answer) for index, answer in enumerate(answers)],
    )


def _choice(index: int, times: AnswerTimes) -> ChoiceTimings:
    choice = ChoiceTimings(
        index=index,
        placed_ms=_ms(times.placed_s),
        decode=_decode(times),
        migrations=times.migrations,
        workers=list(times.workers),
    )
    if (reported := times.reported) is not None:
        is_local = reported.prefill_worker is None
        worker = reported.prefill_worker or times.decode_worker or ""
        held = reported.cached_tokens if is_local else reported.held_tokens
        choice.decode.queued_ms = 0.0 if is_local else _ms(reported.wait_s)
        choice.cached = CachedPart(reported.cached_tokens, worker, is_local, held)
        choice.prefill = PrefillPart(
            worker, _ms(reported.queue_s), _ms(reported.prefill_s), reported.chunks
        )
        choice.transfer = _transfer(reported)
    return choice


def _transfer(reported: Timings) -> TransferPart | None:
    """Return what is known of the KV transfer; None if no other worker sent KV blocks."""
    if not reported.segments:
        return None
    return TransferPart(
        ms=_ms(reported.arriving_s),
        after_first_token_ms=_ms(reported.transfer_s),
        bytes=reported.kv_bytes,
        segments=reported.segments,
        transport=reported.transport,
    )


def _decode(times: AnswerTimes) -> DecodePart:
    steps = times.num_steps
    gaps = sorted(times.gaps or ())
    return DecodePart(
        worker=times.decode_worker,
        steps=steps,
        ms=_ms(times.decode_s),
        mean_step_ms=_ms(times.decode_s / steps) if steps else None,
        # By nearest rank, so that it is the time of an actual step.
        p99_step_ms=_ms(gaps[(99 * len(gaps) + 99) // 100 - 1]) if gaps else None,
    )


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)
