"""Prefix indexes on a test's own Redis."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from typing import Any

from pagewire.shared.cluster.redis_client import connect_redis
from pagewire.shared.costs.load import Load
from pagewire.shared.index.prefix_index import PrefixIndex
from pagewire.shared.index.publisher import IndexPublisher
from pagewire.shared.kv.block_hash import BlockHash, BlockHasher
from pagewire.tests.support.kv_layouts import model_identity

TAG = "0123abcd"
HASHER = BlockHasher("secret", model_identity())
EPOCH = 1_790_000_000_000_000_001  # greater than 2**53


def blocks(count: int, start: int = 0) -> list[BlockHash]:
    """Return the hashes of a prompt's blocks; another start is another prompt."""
    return HASHER.hash_prompt(range(start, start + 4 * count))


def entry_key(block_hash: BlockHash) -> bytes:
    return f"pagewire:{TAG}:b:".encode() + block_hash


@asynccontextmanager
async def index_at(
    url: str,
    lookup_timeout_s: float = 20.0,
    write_timeout_s: float = 20.0,
    router_id: str = "",
) -> AsyncIterator[PrefixIndex]:
    """Connect an index whose timeouts a busy machine does not reach, unless a test needs them."""
    client = await connect_redis(url)
    index = PrefixIndex(client, TAG, router_id, lookup_timeout_s, write_timeout_s)
    try:
        yield index
    finally:
        await index.close()
        await client.aclose()


@asynccontextmanager
async def publishing(
    index: PrefixIndex,
    worker_id: str = "w",
    epoch: int = EPOCH,
    snapshot: Callable[[], Collection[BlockHash]] = tuple,
    **options: Any,
) -> AsyncIterator[IndexPublisher]:
    publisher = IndexPublisher(index, worker_id, epoch, snapshot, flush_interval_s=0.01, **options)
    publisher.start()
    try:
        yield publisher
    finally:
        await publisher.close()


async def until_found(
    index: PrefixIndex, hashes: list[BlockHash], expected: dict[str, int], **epochs: int
) -> None:
    """Wait until a lookup returns these hits."""
    deadline = time.monotonic() + 20
    while (found := (await index.lookup(hashes, epochs or {"w": EPOCH})).hits) != expected:
        assert time.monotonic() < deadline, f"{found} instead of {expected}"
        await asyncio.sleep(0.02)


async def until_reserved(
    index: PrefixIndex, epochs: dict[str, int], expected: dict[str, Load]
) -> None:
    """Wait until a lookup returns this reserved load of other routers."""
    deadline = time.monotonic() + 20
    while (found := (await index.lookup([], epochs)).reserved) != expected:
        assert time.monotonic() < deadline, found
        await asyncio.sleep(0.01)
