"""Keeps the last requests of a router, for the dashboard."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from pagewire.shared.control.protocol import Timings
from pagewire.shared.metrics.live import MAX_REQUESTS, MAX_WORKERS_SHOWN, RecentRequest, TimePart

ANSWER_PATHS = frozenset(
    {"/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"}
)
UNAUTHORIZED = 401


def is_shown(method: str, path: str, status: int) -> bool:
    """Whether a request asked for an answer, so that the dashboard shows it.

    Requests without a valid key are left out, and so are a browser's preflight requests, which need
    no key: anyone could use them to push out all other requests.
    """
    return method == "POST" and path in ANSWER_PATHS and status != UNAUTHORIZED


class RecentRequests:
    """A bounded ring of requests that have ended.

    Args:
        model: name of the model that answers all of them.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        # Each makes a request's line on the dashboard, when somebody looks.
        self._ring: deque[Callable[[], RecentRequest]] = deque(maxlen=MAX_REQUESTS)

    def note(
        self, request_id: str, fields: Mapping[str, Any], timings: Timings | None, now: float
    ) -> None:
        """Add a request to those that the dashboard shows.

        Args:
            request_id: its id.
            fields: the fields of its log line, see `RequestRecord.fields`.
            timings: what its workers measured; None if that is not known.
            now: Unix time in seconds.
        """
        self._ring.append(partial(self._described, request_id, now, fields, timings))

    def newest_first(self) -> list[RecentRequest]:
        """Return the recorded requests, the one that ended last first."""
        return [described() for described in reversed(self._ring)]

    def _described(
        self, request_id: str, ended_at: float, fields: Mapping[str, Any], timings: Timings | None
    ) -> RecentRequest:
        return RecentRequest(
            id=request_id,
            ended_at=ended_at,
            path=fields["path"],
            model=self._model,
            status=fields["status"],
            outcome=fields["outcome"],
            duration_s=fields["duration_s"],
            key=fields.get("key"),
            prompt_tokens=fields.get("prompt_tokens"),
            cached_tokens=fields.get("cached_tokens"),
            output_tokens=fields.get("output_tokens"),
            ttft_s=fields.get("ttft_s"),
            workers=fields.get("workers", [])[:MAX_WORKERS_SHOWN],
            parts=parts_of(fields["duration_s"], fields.get("ttft_s"), timings),
        )


def parts_of(duration_s: float, ttft_s: float | None, timings: Timings | None) -> list[TimePart]:
    """Return the parts of a request's time, in order. They add up to its duration.

    "first token" is the time to the first token minus what the workers measured: the router's own
    work and the network. Each part is cut to the time that is left, since the numbers come from
    several hosts.

    Args:
        duration_s: duration of the whole request.
        ttft_s: time to first token; None if there was none.
        timings: what its workers measured; None if that is not known.
    """
    if ttft_s is None:
        return [TimePart("no token", duration_s)]
    reported = timings or Timings()
    before, after = min(ttft_s, duration_s), max(0.0, duration_s - ttft_s)
    measured = [("queued", reported.wait_s + reported.queue_s), ("prefill", reported.prefill_s)]
    return [
        *_filled(before, measured, "first token"),
        *_filled(after, [("transfer", reported.transfer_s)], "tokens"),
    ]


def _filled(total: float, measured: list[tuple[str, float]], rest: str) -> Iterator[TimePart]:
    """Yield the parts that took time, then what remains of the total."""
    for name, seconds in measured:
        if (taken := min(seconds, total)) > 0:
            yield TimePart(name, taken)
            total -= taken
    yield TimePart(rest, total)
