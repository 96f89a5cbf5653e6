"""Makes one document about a whole cluster: its members, and the numbers of all routers.

If routers share a socket, any of them may answer, and each counts only its own requests. The router
that answers reads the others' numbers from their metrics ports, whose addresses are in their sealed
records. So a browser needs to reach only the operator port.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import httpx
import msgspec

from pagewire.shared.base.errors import ProtocolError
from pagewire.shared.cluster.routers import RouterRecord
from pagewire.shared.metrics.live import MAX_LIVE_BYTES, LivePage, decode_live, newest

logger = logging.getLogger(__name__)

LIVE_PATH = "/live"
# A document younger than this is returned again: `pagewire top` may ask every 0.2 s.
FRESH_S = 0.1
TIMEOUT_S = 1.0
MAX_AT_ONCE = 16


class ClusterData:
    """Makes the body of `/dashboard/data`.

    Args:
        cluster: the body of `/cluster`, see `RouterService.describe_cluster`.
        own: this router's own numbers.
        others: records of the other routers that are alive.
        clock: in seconds, from any time on.
    """

    def __init__(
        self,
        cluster: Callable[[], dict[str, Any]],
        own: Callable[[], LivePage],
        others: Callable[[], list[RouterRecord]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster, self._own, self._others, self._clock = cluster, own, others, clock
        self._made, self._made_at = b"", float("-inf")
        self._lock = asyncio.Lock()

    async def body(self) -> bytes:
        """Return the document in JSON, made now or a moment ago."""
        async with self._lock:
            if self._clock() - self._made_at >= FRESH_S:
                self._made = await self._make()
                self._made_at = self._clock()
            return self._made

    async def _make(self) -> bytes:
        records = self._others()
        live_pages = await self._read_all(records)
        pages = [self._own(), *(page for page in live_pages if page is not None)]
        document = self._cluster() | {
            "at": time.time(),
            "live": sorted((page.router for page in pages), key=lambda each: each.id),
            "silent": [
                record.router_id
                for record, page in zip(records, live_pages, strict=True)
                if page is None
            ],
            "requests": newest(pages),
        }
        return msgspec.json.encode(document)

    async def _read_all(self, records: list[RouterRecord]) -> list[LivePage | None]:
        if not records:
            return []
        limits = httpx.Limits(max_connections=MAX_AT_ONCE)
        # Loading the system's certificates would stall the event loop, and with it all streams.
        no_tls = httpx.AsyncHTTPTransport(verify=False, limits=limits)
        async with httpx.AsyncClient(transport=no_tls, trust_env=False) as client:
            return await asyncio.gather(*(_read(client, record) for record in records))


async def _read(client: httpx.AsyncClient, record: RouterRecord) -> LivePage | None:
    """Return another router's numbers; None if it does not answer as one does."""
    try:
        return decode_live(await _fetch(client, f"{record.metrics_endpoint}{LIVE_PATH}"))
    except (httpx.HTTPError, httpx.InvalidURL, ProtocolError, TimeoutError) as exc:
        logger.debug("cannot read the metrics of %s: %s", record.router_id, exc)
        return None


async def _fetch(client: httpx.AsyncClient, url: str) -> bytes:
    """Return a body; one that is too long is cut, and so cannot be decoded."""
    body = bytearray()
    async with asyncio.timeout(TIMEOUT_S), client.stream("GET", url) as response:
        async for part in response.aiter_bytes():
            body += part
            if len(body) > MAX_LIVE_BYTES:
                break
    return bytes(body[:MAX_LIVE_BYTES])
