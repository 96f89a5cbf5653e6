"""What the router shows of the workers: their own metrics, relayed, or else what their records say.

A record is as old as the last heartbeat, and stands still while Redis does not answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

import httpx
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import Metric

from pagewire.services.router.metrics.pages import fetch_page
from pagewire.services.router.metrics.state import of_model
from pagewire.shared.cluster.registry import WorkerRecord
from pagewire.shared.metrics.load import KV_BLOCKS, load_families

RELAYED_PREFIX = "pagewire_"


class WorkerScraper:
    """Gets the metrics of the workers, from each itself or else from its record.

    Args:
        model_name: what all of them serve.
        client: owned by the caller.
        registry: gets a counter of failures.
    """

    def __init__(
        self, model_name: str, client: httpx.AsyncClient, registry: CollectorRegistry
    ) -> None:
        self._model_name, self._client = model_name, client
        self._failures = Counter(
            "pagewire_worker_scrape_failures",
            "Attempts to read a worker's metrics that failed",
            ["worker"],
            registry=registry,
        )

    async def scrape(self, records: Sequence[WorkerRecord]) -> list[Metric]:
        """Return the workers' families, each sample labelled with its worker and role.

        Of a worker that does not answer, in time and in Prometheus' format, there is what its
        record says. One family is of all of them: the used share of the decode workers' KV blocks.
        """
        pages = await asyncio.gather(*[self._fetch(record) for record in records])
        merged: dict[str, Metric] = {}
        for record, page in zip(records, pages, strict=True):
            merge_families(merged, record, load_families(record.load) if page is None else page)
        usage = used_share(merged.get(KV_BLOCKS))
        text = "Used share of the decode workers' KV blocks, 0 to 1"
        return [*merged.values(), of_model(self._model_name, "kv_cache_usage_perc", text, usage)]

    async def _fetch(self, record: WorkerRecord) -> list[Metric] | None:
        url, name = record.metrics_endpoint, record.worker_id
        return await fetch_page(self._client, url, name, self._failures)


def used_share(blocks: Metric | None) -> float:
    """Return the share of the decode workers' KV blocks that their sequences hold, 0 to 1."""
    counts = {"used": 0.0, "total": 0.0}
    for sample in blocks.samples if blocks is not None else ():
        if sample.labels["role"] == "decode" and sample.labels.get("state") in counts:
            counts[sample.labels["state"]] += sample.value
    return counts["used"] / counts["total"] if counts["total"] else 0.0


def merge_families(
    merged: dict[str, Metric], record: WorkerRecord, families: Iterable[Metric]
) -> None:
    """Add a worker's families to those of the others, under the worker's name."""
    for metric in families:
        if not metric.name.startswith(RELAYED_PREFIX) or metric.name.endswith("_created"):
            continue
        family = merged.setdefault(
            metric.name, Metric(metric.name, metric.documentation, metric.type)
        )
        if family.type != metric.type:
            continue  # a page with both would be nonsense
        for sample in metric.samples:
            labels = {**sample.labels, "worker": record.worker_id, "role": record.role}
            family.add_sample(sample.name, labels, sample.value)
