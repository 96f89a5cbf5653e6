"""A router's numbers for the dashboard: the body of `/live` at its metrics port.

Counters and histograms only grow while a router runs, so the difference of two documents is what
happened between them. A router that was restarted has another epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from pagewire.shared.base.errors import UNDECODABLE, ProtocolError
from pagewire.shared.control.protocol import Epoch, Id

MAX_LIVE_BYTES = 1 << 20
MAX_REQUESTS = 100
MAX_WORKERS_SHOWN = 8

_Text = Annotated[str, Meta(max_length=512)]
_Count = Epoch  # tokens of months
_Seconds = Annotated[float, Meta(ge=0)]


class Histogram(msgspec.Struct, frozen=True):
    """A histogram since a router's start.

    Attributes:
        bounds: upper bounds of the buckets, in ascending order; one bucket without a bound follows.
        counts: number of values in each bucket, including the last one.
    """

    bounds: Annotated[list[float], Meta(max_length=64)] = []
    counts: Annotated[list[_Count], Meta(max_length=65)] = []

    def __post_init__(self) -> None:
        """Check the number of counts.

        Raises:
            ValueError: it is wrong; a decoder reports that as a wrong field.
        """
        if len(self.counts) != (len(self.bounds) + 1 if self.bounds else 0):
            raise ValueError(f"{len(self.counts)} counts for {len(self.bounds)} bounds")

    def since(self, before: Histogram) -> Histogram:
        """Return what was added since an earlier histogram of the same router."""
        if before.bounds != self.bounds:
            return self
        counts = [now - then for now, then in zip(self.counts, before.counts, strict=True)]
        return Histogram(self.bounds, [max(0, count) for count in counts])

    def plus(self, other: Histogram) -> Histogram:
        """Return the sum of both; an empty histogram has no bounds."""
        if self.bounds != other.bounds:
            return self if self.bounds else other
        counts = [one + two for one, two in zip(self.counts, other.counts, strict=True)]
        return Histogram(self.bounds, counts)

    def quantile(self, share: float) -> float | None:
        """Return the value below which this share of all values lies; None without values.

        As in Prometheus' histogram_quantile, values count as evenly spread within a bucket, and
        those above the last bound as that bound.
        """
        rank = share * sum(self.counts)
        if not rank:
            return None
        lower = 0.0
        for upper, count in zip(self.bounds, self.counts, strict=False):
            if count and rank <= count:
                return lower + (upper - lower) * rank / count
            rank, lower = rank - count, upper
        return lower


class TimePart(msgspec.Struct, frozen=True):
    """A part of a request's time."""

    name: _Text
    seconds: _Seconds


class RecentRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request that has ended.

    Attributes:
        ended_at: Unix time in seconds, by the router's clock.
        key: name of its API key.
        ttft_s: time from its arrival to its first token; None if there was none.
        workers: the workers that have answered, at most `MAX_WORKERS_SHOWN`.
        parts: the parts of its duration, in order; their sum is the duration.
    """

    id: _Text
    ended_at: Annotated[float, Meta(ge=0, le=1e11)]
    path: _Text
    model: _Text
    status: _Count
    outcome: _Text
    duration_s: _Seconds
    key: _Text | None = None
    prompt_tokens: _Count | None = None
    cached_tokens: _Count | None = None
    output_tokens: _Count | None = None
    ttft_s: _Seconds | None = None
    workers: Annotated[list[_Text], Meta(max_length=MAX_WORKERS_SHOWN)] = []
    parts: Annotated[list[TimePart], Meta(max_length=16)] = []


class RouterLive(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of a router that its dashboard shows.

    Attributes:
        running, waiting, queue_limit: numbers of sequences, as in the router's metrics.
        prompt_tokens, cached_tokens, output_tokens: tokens since its start.
        ttft, gaps: times in seconds.
    """

    id: Id
    epoch: Epoch
    running: _Count = 0
    waiting: _Count = 0
    queue_limit: _Count = 0
    prompt_tokens: _Count = 0
    cached_tokens: _Count = 0
    output_tokens: _Count = 0
    ttft: Histogram = Histogram()
    gaps: Histogram = Histogram()


class LivePage(msgspec.Struct, frozen=True, kw_only=True):
    """The body of `/live`.

    Attributes:
        requests: the last ones that have ended, newest first.
    """

    router: RouterLive
    requests: Annotated[list[RecentRequest], Meta(max_length=MAX_REQUESTS)] = []


_decoder = msgspec.json.Decoder(LivePage)


def decode_live(body: bytes) -> LivePage:
    """Return what a router's `/live` shows.

    Raises:
        ProtocolError: it is not such a page.
    """
    try:
        return _decoder.decode(body)
    except UNDECODABLE as exc:
        raise ProtocolError(f"not a router's numbers: {exc}") from exc


def newest(pages: Sequence[LivePage]) -> list[RecentRequest]:
    """Return the last requests of several routers, newest first, at most `MAX_REQUESTS`."""
    requests = [request for page in pages for request in page.requests]
    return sorted(requests, key=lambda each: -each.ended_at)[:MAX_REQUESTS]
