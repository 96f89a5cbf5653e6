"""Pages in Prometheus' text format: those of other processes read, this router's own made."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

import httpx
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

logger = logging.getLogger(__name__)

SCRAPE_TIMEOUT_S = 1.0
MAX_SCRAPE_BYTES = 4 << 20
MAX_PORT = 65535
_PAGE_ERRORS = (httpx.HTTPError, httpx.InvalidURL, TimeoutError, ValueError)


async def fetch_page(
    client: httpx.AsyncClient, endpoint: str, name: str, failures: Counter
) -> list[Metric] | None:
    """Return the families of a process's `/metrics`; None if it gives none in time.

    Args:
        client: owned by the caller.
        endpoint: base URL.
        name: of the process, for the log.
        failures: counts that; by the process's name.
    """
    try:
        async with (
            asyncio.timeout(SCRAPE_TIMEOUT_S),
            client.stream("GET", _page_url(endpoint)) as response,
        ):
            response.raise_for_status()
            return _parsed(await _read_bounded(response))
    except _PAGE_ERRORS as exc:
        failures.labels(name).inc()
        logger.info("no metrics of %s: %s", name, exc or type(exc).__name__)
        return None


def render(own: list[Metric], relayed: Iterable[Metric]) -> bytes:
    """Return Prometheus' text of the routers' families and the workers'.

    A family that a router has wins.
    """
    names = {metric.name for metric in own}
    page = CollectorRegistry(auto_describe=False)
    page.register(_Families([*own, *(m for m in relayed if m.name not in names)]))
    return generate_latest(page)


class _Families:
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


def _page_url(endpoint: str) -> httpx.URL:
    url = httpx.URL(f"{endpoint}/metrics")
    if (url.port or 0) > MAX_PORT:  # connecting would raise an ExceptionGroup
        raise ValueError(f"{endpoint} has a port above {MAX_PORT}")
    return url


def _parsed(text: str) -> list[Metric]:
    try:
        return list(text_string_to_metric_families(text))
    except Exception as exc:  # of some nonsense the parser makes an IndexError
        raise ValueError("it is not Prometheus' text format") from exc


async def _read_bounded(response: httpx.Response) -> str:
    body = bytearray()
    async for chunk in response.aiter_bytes():
        body += chunk
        if len(body) > MAX_SCRAPE_BYTES:
            raise ValueError(f"more than {MAX_SCRAPE_BYTES} bytes")
    return body.decode()
