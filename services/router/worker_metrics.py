"""What the router shows of the workers: their cards as gauges, and their own metrics, relayed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator, Sequence

import httpx
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families

from pagewire.services.router.dispatch import Dispatcher
from pagewire.shared.registry import WorkerCard, WorkerDirectory

logger = logging.getLogger(__name__)

SCRAPE_TIMEOUT_S = 1.0
MAX_SCRAPE_BYTES = 4 << 20
RELAYED_PREFIX = "pagewire_"
BLOCK_STATES = ("free", "cached", "used", "total")

_WORKER_GAUGES = {
    "pagewire_worker_requests_running": ("Sequences in a worker's batch", "running"),
    "pagewire_worker_requests_waiting": ("Sequences in a worker's queue", "waiting"),
    "pagewire_worker_queued_prefill_tokens": ("Tokens to compute", "queued_prefill_tokens"),
}


class ClusterCollector:
    """Gauges of the router's own state and of the workers' cards."""

    def __init__(self, model_name: str, dispatcher: Dispatcher, directory: WorkerDirectory) -> None:
        self._model_name = model_name
        self._dispatcher, self._directory = dispatcher, directory

    def collect(self) -> Iterator[Metric]:
        """Yield one family after another."""
        cards = self._directory.workers()
        decodes = [card.load for card in cards if card.role == "decode"]
        total = sum(load.total_blocks for load in decodes)
        usage = sum(load.used_blocks for load in decodes) / total if total else 0.0
        for name, text, value in (
            ("num_requests_running", "Sequences whose tokens come", self._dispatcher.num_running),
            ("num_requests_waiting", "Sequences without a token", self._dispatcher.num_waiting),
            ("kv_cache_usage_perc", "Used share of the decode workers' KV blocks, 0 to 1", usage),
        ):
            family = GaugeMetricFamily(f"vllm:{name}", text, labels=["model_name"])
            family.add_metric([self._model_name], value)
            yield family
        yield GaugeMetricFamily(
            "pagewire_redis_up",
            "Whether the worker registry answers",
            value=float(self._directory.redis_ok),
        )
        yield from _card_families(cards)


class WorkerScraper:
    """Fetches the workers' own metrics.

    Args:
        client: owned by the caller.
        registry: gets a counter of failures.
    """

    def __init__(self, client: httpx.AsyncClient, registry: CollectorRegistry) -> None:
        self._client = client
        self._failures = Counter(
            "pagewire_worker_scrape_failures",
            "Workers that did not show their metrics",
            ["worker"],
            registry=registry,
        )

    async def scrape(self, cards: Sequence[WorkerCard]) -> list[Metric]:
        """Return the workers' families, each sample labelled with its worker and role.

        A worker that does not answer in time is left out.
        """
        texts = await asyncio.gather(*[self._fetch(card) for card in cards])
        merged: dict[str, Metric] = {}
        for card, text in zip(cards, texts, strict=True):
            try:
                merge_families(merged, card, text)
            except ValueError as exc:
                self._failed(card, exc)
        return list(merged.values())

    async def _fetch(self, card: WorkerCard) -> str:
        try:
            async with (
                asyncio.timeout(SCRAPE_TIMEOUT_S),
                self._client.stream("GET", f"{card.metrics_endpoint}/metrics") as response,
            ):
                response.raise_for_status()
                return await _read_bounded(response)
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError, ValueError) as exc:
            self._failed(card, exc)
            return ""

    def _failed(self, card: WorkerCard, exc: Exception) -> None:
        self._failures.labels(card.worker_id).inc()
        logger.info("no metrics of %s: %s", card.worker_id, exc or type(exc).__name__)


def render(registry: CollectorRegistry, relayed: Iterable[Metric]) -> bytes:
    """Return Prometheus' text of the router's own families and the relayed ones.

    A family that the router itself has wins.
    """
    own = list(registry.collect())
    names = {metric.name for metric in own}
    page = CollectorRegistry(auto_describe=False)
    page.register(_Families([*own, *(m for m in relayed if m.name not in names)]))
    return generate_latest(page)


class _Families:
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


async def _read_bounded(response: httpx.Response) -> str:
    body = bytearray()
    async for chunk in response.aiter_bytes():
        body += chunk
        if len(body) > MAX_SCRAPE_BYTES:
            raise ValueError(f"more than {MAX_SCRAPE_BYTES} bytes")
    return body.decode()


def _card_families(cards: Sequence[WorkerCard]) -> Iterator[Metric]:
    labels = ["worker", "role"]
    blocks = GaugeMetricFamily(
        "pagewire_kv_blocks",
        "KV blocks by state, from the workers' cards",
        labels=[*labels, "state"],
    )
    for card in cards:
        for state in BLOCK_STATES:
            count = getattr(card.load, f"{state}_blocks")
            blocks.add_metric([card.worker_id, card.role, state], count)
    yield blocks
    for name, (text, attribute) in _WORKER_GAUGES.items():
        family = GaugeMetricFamily(name, text, labels=labels)
        for card in cards:
            family.add_metric([card.worker_id, card.role], getattr(card.load, attribute))
        yield family


def merge_families(merged: dict[str, Metric], card: WorkerCard, text: str) -> None:
    """Add a worker's families to those of the others.

    Raises:
        ValueError: the text is not Prometheus' format.
    """
    for metric in text_string_to_metric_families(text):
        if not metric.name.startswith(RELAYED_PREFIX) or metric.name.endswith("_created"):
            continue
        family = merged.setdefault(
            metric.name, Metric(metric.name, metric.documentation, metric.type)
        )
        for sample in metric.samples:
            labels = {**sample.labels, "worker": card.worker_id, "role": card.role}
            family.add_sample(sample.name, labels, sample.value)
