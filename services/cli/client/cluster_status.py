"""A snapshot of a cluster: what its operator port shows, with the metrics of all processes."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from pagewire.services.cli.cluster_view import ClusterView, Service, fetch_cluster_view
from pagewire.services.cli.program import own_command
from pagewire.shared.base.errors import PagewireError, ProtocolError
from pagewire.shared.cluster.worker_record import LINK_WAIT_S
from pagewire.shared.metrics.load import BLOCK_STATES, KV_BLOCKS
from pagewire.shared.metrics.pages import MAX_PAGE_BYTES, Target, decode_targets, joined

METRICS_TIMEOUT_S = 2.0
WAIT_POLL_S = 0.2

WORKER_SAMPLES = {
    "pagewire_requests_running": "running",
    "pagewire_requests_waiting": "waiting",
    "pagewire_queued_prefill_tokens": "queued_prefill_tokens",
}
_REDIS_UP = "pagewire_redis_up"
_TOTALS = {
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:generation_tokens_total": "generation_tokens",
    "vllm:prefix_cache_queries_total": "prefix_queries",
    "vllm:prefix_cache_hits_total": "prefix_hits",
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
}


class NotReadyError(PagewireError):
    """A cluster did not become ready in time."""


class NoRouterError(PagewireError):
    """A URL is not that of an operator port of a Pagewire router."""

    def __init__(self, url: str) -> None:
        super().__init__(
            f"no Pagewire router answers operators at {url}; start a cluster with "
            f"`{own_command()} up`, or name another with --operator-url"
        )


@dataclass
class WorkerStatus:
    """One worker; numbers are None if they are not reported.

    Attributes:
        service: the worker as the router describes it.
        blocks: KV blocks by state: free, cached, used, total.
    """

    service: Service
    running: float | None = None
    waiting: float | None = None
    queued_prefill_tokens: float | None = None
    blocks: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of_record(cls, service: Service) -> WorkerStatus:
        """Return the status from a worker record, which is up to one heartbeat old."""
        load = service.load
        if load is None:
            return cls(service)
        blocks = {state: float(getattr(load, f"{state}_blocks")) for state in BLOCK_STATES}
        return cls(service, load.running, load.waiting, load.queued_prefill_tokens, blocks)

    def share(self, state: str) -> float | None:
        """Return the share of KV blocks in a state, 0 to 1; None if that is not known."""
        total = self.blocks.get("total", 0.0)
        return self.blocks.get(state, 0.0) / total if total else None


@dataclass
class ClusterStatus:
    """A cluster at one moment.

    Attributes:
        ok: whether the cluster is ready.
        problem: why the cluster is not ready; empty if it is.
        at: time of the snapshot, on the monotonic clock.
        totals: sums of counters over all routers, by short name; empty if there are no metrics.
    """

    url: str
    model: str
    ok: bool
    at: float
    workers: list[WorkerStatus]
    totals: dict[str, float]
    problem: str = ""

    @property
    def prefix_hit_rate(self) -> float | None:
        """Share of the prompt tokens that were cached, since the routers started."""
        queries = self.totals.get("prefix_queries", 0.0)
        return self.totals.get("prefix_hits", 0.0) / queries if queries else None

    def rate(self, name: str, before: ClusterStatus | None) -> float | None:
        """Return a total's growth per second since an earlier snapshot; None if that is unknown."""
        if before is None or self.at <= before.at:
            return None
        if name not in self.totals or name not in before.totals:
            return None
        grown = self.totals[name] - before.totals[name]
        return grown / (self.at - before.at) if grown >= 0 else None  # negative after a restart

    def as_json(self) -> dict[str, Any]:
        """Return the whole status in JSON types."""
        redis_up = self.totals.get("redis_up")
        return {
            "url": self.url,
            "model": self.model,
            "ok": self.ok,
            "problem": self.problem or None,
            "redis_up": None if redis_up is None else bool(redis_up),
            "requests": {name: self.totals.get(name) for name in ("running", "waiting")},
            "tokens": {
                "prompt": self.totals.get("prompt_tokens"),
                "generated": self.totals.get("generation_tokens"),
                "prefix_hit_rate": self.prefix_hit_rate,
            },
            "workers": [_worker_json(worker) for worker in self.workers],
        }


async def wait_until_ready(
    client: httpx.AsyncClient, url: str, timeout_s: float, notify: Callable[[str], None]
) -> None:
    """Wait until a cluster is ready; there may be nothing at the URL yet.

    A ready cluster's KV links are waited for, too, for `LINK_WAIT_S` at most.

    Args:
        client: owned by the caller.
        url: URL of a router's operator port.
        timeout_s: the longest wait.
        notify: called with what is missing, whenever that has changed.

    Raises:
        NotReadyError: the cluster was not ready in time; the message says why.
    """
    deadline_s, ready_s, known = time.monotonic() + timeout_s, math.inf, ""
    while True:
        view = await fetch_cluster_view(client, url)
        now_s = time.monotonic()
        is_ready = view is not None and view.ok and bool(view.model)
        ready_s = min(ready_s, now_s) if is_ready else math.inf
        missing = _missing(view)
        if is_ready and (not missing or now_s > min(deadline_s, ready_s + LINK_WAIT_S)):
            return
        if now_s > deadline_s:
            raise NotReadyError(f"{url} is not ready after {timeout_s:g} s: {missing}")
        if missing != known:
            known = missing
            notify(missing)
        await asyncio.sleep(WAIT_POLL_S)


def _missing(view: ClusterView | None) -> str:
    """Return what keeps a cluster from being ready and linked; empty if nothing does."""
    if view is None or not view.model:
        return "no Pagewire router answers there"
    links = [f"{prefill} -> {decode}" for prefill, decode in view.missing_links]
    return view.problem or (f"no KV link yet: {', '.join(links)}" if links else "")


async def fetch_status(client: httpx.AsyncClient, url: str) -> ClusterStatus:
    """Fetch a router's view of its cluster, and the metrics of each process.

    If a worker does not answer, its status comes from its record.

    Args:
        client: owned by the caller.
        url: URL of a router's operator port, without a path.

    Raises:
        NoRouterError: the URL is not that of a router's operator port.
    """
    view = await fetch_cluster_view(client, url)
    if view is None or not view.model:
        raise NoRouterError(url)
    return build_status(url, view, await fetch_metrics(client, url), time.monotonic())


def build_status(url: str, view: ClusterView, metrics: str, at: float) -> ClusterStatus:
    """Combine a router's view and the metrics.

    Args:
        url: URL of the operator port.
        view: the router's view of the cluster.
        metrics: metrics of all processes in Prometheus' text format; may be empty.
        at: time at which they were read.
    """
    workers = {service.id: WorkerStatus.of_record(service) for service in view.services}
    totals: dict[str, float] = {}
    for name, labels, value in _samples(metrics):
        worker = workers.get(labels.get("worker", ""))
        if name in _TOTALS:
            totals[_TOTALS[name]] = totals.get(_TOTALS[name], 0.0) + value
        elif name == _REDIS_UP:
            totals["redis_up"] = min(totals.get("redis_up", value), value)
        elif worker is not None and name in WORKER_SAMPLES:
            setattr(worker, WORKER_SAMPLES[name], value)
        elif worker is not None and name == KV_BLOCKS:
            worker.blocks[labels.get("state", "")] = value
    shown = list(workers.values())
    return ClusterStatus(url, view.model, view.ok, at, shown, totals, view.problem)


async def fetch_metrics(client: httpx.AsyncClient, url: str) -> str:
    """Return the metrics of all processes as one text; processes that do not answer are left out.

    Args:
        client: owned by the caller.
        url: URL of a router's operator port.
    """
    try:
        targets = decode_targets(await _fetch(client, f"{url}/sd"))
    except ProtocolError:
        return ""
    pages = await asyncio.gather(*[_fetch_page(client, target) for target in targets])
    return joined(zip([target.labels for target in targets], pages, strict=True))


async def _fetch_page(client: httpx.AsyncClient, target: Target) -> str:
    pages = [await _fetch(client, page) for page in target.urls]
    return b"\n".join(pages).decode(errors="replace")


async def _fetch(client: httpx.AsyncClient, url: str) -> bytes:
    """Return a response's body; empty after an error, since metrics are optional."""
    body = bytearray()
    try:
        async with asyncio.timeout(METRICS_TIMEOUT_S), client.stream("GET", url) as response:
            if not response.is_success:
                return b""
            async for part in response.aiter_bytes():
                body += part
                if len(body) > MAX_PAGE_BYTES:
                    return b""
    except (httpx.HTTPError, httpx.InvalidURL, TimeoutError):  # busy, or shutting down
        return b""
    return bytes(body)


def _samples(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                yield sample.name, sample.labels, sample.value
    except ValueError:  # cut off, or not in Prometheus' format: keep what was parsed
        return


def _worker_json(worker: WorkerStatus) -> dict[str, Any]:
    service = worker.service
    return {
        "id": service.id,
        "role": service.role,
        "state": service.state,
        "max_model_len": service.max_model_len,
        "full_model_len": service.full_model_len,
        "running": worker.running,
        "waiting": worker.waiting,
        "queued_prefill_tokens": worker.queued_prefill_tokens,
        "kv_blocks": worker.blocks,
        "kv_used": worker.share("used"),
        "links": msgspec.to_builtins(service.links),
    }
