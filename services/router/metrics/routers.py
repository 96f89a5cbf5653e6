"""The metrics of all routers on one page, whichever of them is asked.

Routers accept connections from one socket, or have a gateway in front, so that nobody can choose
the one that answers. Each reads the others' own pages. A sample's label `router` says whose it is:
sums over all would look like counters that were reset when a router ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

import httpx
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import Metric

from pagewire.services.router.metrics.pages import fetch_page
from pagewire.shared.cluster.routers import RouterRecord

Page = tuple[str, Iterable[Metric]]  # router id, its families


class RouterScraper:
    """Gets the metrics of the other routers.

    Args:
        client: owned by the caller.
        registry: gets a counter of failures.
    """

    def __init__(self, client: httpx.AsyncClient, registry: CollectorRegistry) -> None:
        self._client = client
        self._failures = Counter(
            "pagewire_router_scrape_failures",
            "Attempts to read another router's metrics that failed",
            ["peer"],
            registry=registry,
        )

    async def scrape(self, records: Sequence[RouterRecord]) -> list[Page]:
        """Return the families of each router that answers."""
        pages = await asyncio.gather(*[self._fetch(record) for record in records])
        named = zip(records, pages, strict=True)
        return [(record.router_id, page) for record, page in named if page is not None]

    async def _fetch(self, record: RouterRecord) -> list[Metric] | None:
        url, name = record.metrics_endpoint, record.router_id
        return await fetch_page(self._client, url, name, self._failures)


def merge_routers(own: Page, others: Iterable[Page]) -> list[Metric]:
    """Return the families of this router with the others' samples, each with its router's id."""
    merged: dict[str, Metric] = {}
    for router_id, families in (own, *others):
        for metric in families:
            if router_id == own[0]:
                merged[metric.name] = Metric(metric.name, metric.documentation, metric.type)
            family = merged.get(metric.name)
            if family is None or family.type != metric.type:
                continue  # of another release
            for sample in metric.samples:
                family.add_sample(sample.name, {**sample.labels, "router": router_id}, sample.value)
    return list(merged.values())
