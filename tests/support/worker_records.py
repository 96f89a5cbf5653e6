"""Worker records, and registries on a test's own Redis."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from redis.asyncio import Redis

from pagewire.shared.cluster.record_seal import RecordSeal
from pagewire.shared.cluster.redis_client import cluster_tag, connect_redis
from pagewire.shared.cluster.registry import (
    Registry,
    WorkerRecord,
)
from pagewire.shared.control.protocol import PROTOCOL_VERSION
from pagewire.tests.support.kv_layouts import model_identity

SECRET = "the cluster's secret"
TAG = cluster_tag(SECRET)
IDENTITY = model_identity(block_size=16)


def record(worker_id: str = "decode-0", epoch: int = 1, **changes: Any) -> WorkerRecord:
    fields: dict[str, Any] = {
        "role": "decode",
        "endpoint": "tcp://127.0.0.1:1",
        "metrics_endpoint": "http://127.0.0.1:2",
        "model": "demo",
        "model_identity": IDENTITY,
        "max_model_len": 2048,
        "protocol": PROTOCOL_VERSION,
    }
    return WorkerRecord(worker_id=worker_id, epoch=epoch, **(fields | changes))


@asynccontextmanager
async def client_of(url: str, timeout: float = 5.0) -> AsyncIterator[Redis]:
    client = await connect_redis(url, timeout)
    try:
        yield client
    finally:
        await client.aclose()


@asynccontextmanager
async def registry_at(
    url: str, lease_s: float = 5.0, secret: str = SECRET
) -> AsyncIterator[Registry]:
    async with client_of(url) as client:
        yield Registry(client, secret, lease_s, timeout_s=1.0)


async def put_bytes(client: Redis, worker_id: str, stored: bytes) -> None:
    """Put something where a worker's record would be."""
    await client.set(f"pagewire:{TAG}:worker:{worker_id}", stored)
    await client.sadd(f"pagewire:{TAG}:workers", worker_id)


def sealed(worker_id: str, record: bytes, secret: str = SECRET) -> bytes:
    """Return a record as a member of a cluster stores it."""
    return RecordSeal(secret).seal(f"pagewire:{cluster_tag(secret)}:worker:{worker_id}", record)


def ids(records: Any) -> list[str]:
    return sorted(c.worker_id for c in records)
