"""Reads from their metrics what the processes of a proof's cluster count."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import httpx
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from pagewire.shared.base.errors import ProtocolError
from pagewire.shared.metrics.pages import ScrapeTarget, decode_targets

FETCH_TIMEOUT_S = 3.0


@dataclass(frozen=True)
class Counters:
    """The samples of all processes that answer, each with the name of its router or worker."""

    samples: list[tuple[str, Sample]] = field(default_factory=list)

    def by_process(self, name: str, **labels: str) -> dict[str, float]:
        """Return a metric of each process that has it, summed over its other labels."""
        totals: dict[str, float] = {}
        for process, sample in self.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                totals[process] = totals.get(process, 0.0) + sample.value
        return totals

    def total(self, name: str, **labels: str) -> int:
        """Return the sum of a metric over all processes."""
        return int(sum(self.by_process(name, **labels).values()))


async def read_counters(
    client: httpx.AsyncClient, operator_url: str, role: str | None = None
) -> Counters:
    """Return the numbers of all processes, or of those of one role.

    A process that does not answer in time is left out.
    """
    try:
        response = await client.get(f"{operator_url}/sd", timeout=FETCH_TIMEOUT_S)
        targets = decode_targets(response.content)
    except (httpx.HTTPError, ProtocolError):
        return Counters()
    wanted = [page for page in targets if role in (None, page.labels.get("role"))]
    pages = await asyncio.gather(*(_fetch(client, target) for target in wanted))
    return Counters([sample for page in pages for sample in page])


async def _fetch(client: httpx.AsyncClient, target: ScrapeTarget) -> list[tuple[str, Sample]]:
    try:
        pages = [(await client.get(url, timeout=FETCH_TIMEOUT_S)).text for url in target.urls]
    except httpx.HTTPError:
        return []
    families = [family for page in pages for family in text_string_to_metric_families(page)]
    return [(target.labels["instance"], sample) for family in families for sample in family.samples]
