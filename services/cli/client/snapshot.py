"""Fetches the dashboard's document for `pagewire status` and `top`, and compares two of them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Literal

import httpx
import msgspec

from pagewire.services.cli.cluster_view import PROBE_TIMEOUT_S, ClusterView
from pagewire.services.cli.program import own_command
from pagewire.shared.base.errors import UNDECODABLE, PagewireError
from pagewire.shared.metrics.live import Histogram, RecentRequest, RouterLive


class NoRouterError(PagewireError):
    """A URL is not that of an operator port of a Pagewire router."""

    def __init__(self, url: str) -> None:
        super().__init__(
            f"no Pagewire router answers operators at {url}; start a cluster with "
            f"`{own_command()} up`, or name another with --operator-url"
        )


class Snapshot(ClusterView, frozen=True):
    """The cluster, and the numbers of its routers.

    Attributes:
        redis: "up" or "down", as the router that answered sees it.
        at: Unix time in seconds, by the clock of the router that answered.
        live: numbers of each router that answers.
        silent: ids of the routers that do not answer.
        requests: the requests that ended last, newest first.
    """

    redis: str = "up"
    at: float = 0.0
    live: list[RouterLive] = msgspec.field(default_factory=list)
    silent: list[str] = msgspec.field(default_factory=list)
    requests: list[RecentRequest] = msgspec.field(default_factory=list)

    def total(
        self,
        name: Literal["running", "waiting", "prompt_tokens", "cached_tokens", "output_tokens"],
    ) -> int:
        """Return the sum of one number of all routers that answer."""
        return sum(getattr(router, name) for router in self.live)

    @property
    def prefix_hit_rate(self) -> float | None:
        """Share of the prompt tokens that were cached, since the routers started."""
        prompt = self.total("prompt_tokens")
        return self.total("cached_tokens") / prompt if prompt else None


@dataclass(frozen=True, slots=True)
class Numbers:
    """Numbers of the time between two snapshots; None if they are not known.

    Attributes:
        output, prompt: tokens per second.
        cached_share: cached share of the prompt tokens, 0 to 1.
        ttft, gaps: times to first token and between tokens, in seconds.
        transfer: KV bytes per second.
    """

    running: int
    waiting: int
    output: float | None
    prompt: float | None
    cached_share: float | None
    ttft: Histogram
    gaps: Histogram
    transfer: float | None


WINDOW_S = 10.0  # length of the time whose numbers are shown
SHORTEST_INTERVAL_S = 0.2  # longer than routers reuse a document


class Window:
    """Snapshots of the last `WINDOW_S`, by this machine's clock: a router's clock may be set back.

    Args:
        clock: returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: deque[tuple[float, Snapshot]] = deque()

    def __len__(self) -> int:
        return len(self._seen)

    def add(self, snapshot: Snapshot) -> Snapshot:
        """Add a snapshot; return the one to compare it with (itself, if it is the first)."""
        now = self._clock()
        self._seen.append((now, snapshot))
        while len(self._seen) > 2 and self._seen[1][0] <= now - WINDOW_S:
            self._seen.popleft()
        return self._seen[0][1]


async def fetch_snapshot(client: httpx.AsyncClient, url: str) -> Snapshot:
    """Fetch the document from a router's operator port.

    Args:
        client: owned by the caller.
        url: URL of the operator port, without a path.

    Raises:
        NoRouterError: the URL is not that of a router's operator port.
    """
    try:
        response = await client.get(f"{url}/dashboard/data", timeout=PROBE_TIMEOUT_S)
        snapshot = msgspec.json.decode(response.content, type=Snapshot)
    except (httpx.HTTPError, *UNDECODABLE) as exc:
        raise NoRouterError(url) from exc
    if not snapshot.model:
        raise NoRouterError(url)
    return snapshot


def between(before: Snapshot, now: Snapshot) -> Numbers:
    """Return the numbers of the time between two snapshots.

    A router that was restarted between them is left out.
    """
    old = {(router.id, router.epoch): router for router in before.live}
    pairs = [(old[key], router) for router in now.live if (key := (router.id, router.epoch)) in old]
    seconds = now.at - before.at

    def rate(value: float) -> float | None:
        return value / seconds if seconds > 0 else None

    prompt = sum(new.prompt_tokens - was.prompt_tokens for was, new in pairs)
    cached = sum(new.cached_tokens - was.cached_tokens for was, new in pairs)
    return Numbers(
        running=now.total("running"),
        waiting=now.total("waiting"),
        output=rate(sum(new.output_tokens - was.output_tokens for was, new in pairs)),
        prompt=rate(prompt),
        cached_share=cached / prompt if prompt > 0 else None,
        ttft=reduce(Histogram.plus, (new.ttft.since(was.ttft) for was, new in pairs), Histogram()),
        gaps=reduce(Histogram.plus, (new.gaps.since(was.gaps) for was, new in pairs), Histogram()),
        transfer=rate(sum(link_bytes(before, now).values())),
    )


def link_bytes(before: Snapshot, now: Snapshot) -> dict[tuple[str, str, str], int]:
    """Return the bytes sent between two snapshots, by sender, receiver and transport.

    A link is included only if both snapshots have it with the same runs of its workers.
    """
    old = _sent(before)
    grown = {key: max(0, sent - old[key]) for key, sent in _sent(now).items() if key in old}
    return {key[:3]: sent for key, sent in grown.items()}


def _sent(snapshot: Snapshot) -> dict[tuple[str, str, str, int | None, int | None], int]:
    epochs = {service.id: service.epoch for service in snapshot.services}
    return {
        (link.peer, to.id, link.transport, epochs.get(link.peer), to.epoch): link.bytes
        for to in snapshot.services
        for link in to.links
    }
