"""The `timings` of a response, for a request that asks for them. All times are in milliseconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pagewire.services.router.dispatch.times import AnswerTimes
from pagewire.shared.base.errors import InvalidRequestError
from pagewire.shared.control.protocol import Timings

HEADER = "x-pagewire-timings"
_VALUES = {None: False, "0": False, "1": True}


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Where the time of a request went; in seconds.

    Attributes:
        router_s: from its arrival until its answers were admitted: the body is read, checked and
            tokenized.
        first_token_s: from its arrival to the first token of any answer; None before that.
        total_s: from its arrival to the last token of all answers, or until now.
        answers: in the order of prompts and then of choices.
    """

    router_s: float
    first_token_s: float | None
    total_s: float
    answers: Sequence[AnswerTimes]


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


def timings_field(times: RequestTimes) -> dict[str, Any]:
    """Return the field `timings` of a response."""
    return {
        "router_ms": _ms(times.router_s),
        "first_token_ms": None if times.first_token_s is None else _ms(times.first_token_s),
        "total_ms": _ms(times.total_s),
        "choices": [_choice(index, answer) for index, answer in enumerate(times.answers)],
    }


def _choice(index: int, times: AnswerTimes) -> dict[str, Any]:
    reported, decode_worker = times.reported, times.decode_worker
    choice: dict[str, Any] = {
        "index": index,
        "placed_ms": _ms(times.placed_s),
        "cached": None,
        "prefill": None,
        "transfer": None,
        "decode": _decode(times),
        "migrations": times.migrations,
        "workers": list(times.workers),
    }
    if reported is not None:
        is_remote = reported.prefill_worker is not None
        prefill_worker = reported.prefill_worker or decode_worker
        choice["decode"]["queued_ms"] = _ms(reported.wait_s) if is_remote else 0.0
        choice["cached"] = {
            "tokens": reported.cached_tokens,
            "worker": prefill_worker,
            "is_local": not is_remote,
            "decode_worker_tokens": reported.held_tokens if is_remote else reported.cached_tokens,
        }
        choice["prefill"] = {
            "worker": prefill_worker,
            "queued_ms": _ms(reported.queue_s),
            "ms": _ms(reported.prefill_s),
            "chunks": reported.chunks,
        }
        choice["transfer"] = _transfer(reported)
    return choice


def _transfer(reported: Timings) -> dict[str, Any] | None:
    """Return what is known of the KV transfer; None if no other worker sent KV blocks."""
    if not reported.segments:
        return None
    return {
        "ms": _ms(reported.arriving_s),
        "after_first_token_ms": _ms(reported.transfer_s),
        "bytes": reported.kv_bytes,
        "segments": reported.segments,
        "carrier": reported.carrier,
    }


def _decode(times: AnswerTimes) -> dict[str, Any]:
    steps = times.num_steps
    gaps = sorted(times.gaps or ())
    return {
        "worker": times.decode_worker,
        "queued_ms": None,
        "steps": steps,
        "ms": _ms(times.decode_s),
        "mean_step_ms": _ms(times.decode_s / steps) if steps else None,
        # By nearest rank, so that it is the time of an actual step.
        "p99_step_ms": _ms(gaps[(99 * len(gaps) + 99) // 100 - 1]) if gaps else None,
    }


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)
