"""The `timings` of a response, for a request that asks for them. All times are in milliseconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pagewire.services.router.dispatch.times import AnswerTimes
from pagewire.shared.control.protocol import Timings
from pagewire.shared.errors import InvalidRequestError

HEADER = "x-pagewire-timings"
_VALUES = {"": False, "0": False, "1": True}


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


def wants_timings(header: str) -> bool:
    """Return whether the value of the header `HEADER` asks for timings; empty: it is not there.

    Raises:
        InvalidRequestError: it is neither 0 nor 1.
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
    said, decode_worker = times.workers_say, times.decode_worker
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
    if said is not None:
        is_remote = said.prefill_worker is not None
        prefill_worker = said.prefill_worker or decode_worker
        choice["decode"]["queued_ms"] = _ms(said.wait_s) if is_remote else 0.0
        choice["cached"] = {
            "tokens": said.cached_tokens,
            "worker": prefill_worker,
            "is_local": not is_remote,
            "decode_worker_tokens": said.held_tokens if is_remote else said.cached_tokens,
        }
        choice["prefill"] = {
            "worker": prefill_worker,
            "queued_ms": _ms(said.queue_s),
            "ms": _ms(said.prefill_s),
            "chunks": said.chunks,
        }
        choice["transfer"] = _transfer(said)
    return choice


def _transfer(said: Timings) -> dict[str, Any] | None:
    """Return what is known of the KV's way; None where it came from no other worker."""
    if not said.segments:
        return None
    return {
        "ms": _ms(said.arriving_s),
        "after_first_token_ms": _ms(said.transfer_s),
        "bytes": said.kv_bytes,
        "segments": said.segments,
        "carrier": said.carrier,
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
        # The nearest rank: a step that there was.
        "p99_step_ms": _ms(gaps[(99 * len(gaps) + 99) // 100 - 1]) if gaps else None,
    }


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)
