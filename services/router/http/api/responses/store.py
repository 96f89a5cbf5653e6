"""Stores responses that clients may continue: in Redis, for an hour, within a bound in bytes.

    pagewire:<tag>:r:<id>    a `StoredResponse` as JSON, with a seal
    pagewire:<tag>:rs:<holder>
                             sorted set: "<id> <bytes>" of a holder's, by when they end, ms
    pagewire:<tag>:rb        sorted set: holders by bytes; those of all have the name ""
    pagewire:<tag>:re        sorted set: holders by when their last response ends, ms

Several routers share a store: any of them can continue a response of another. The store is in the
cluster's Redis unless it has one of its own; its bound keeps it from displacing other data there.
A holder is an API key, or an address where there are no keys. When the store is full, the holder
that has most makes room. Each response is stored with its whole conversation. So continuing one
needs a single read, however many turns came before.

The seal (`record_seal.py`) covers the id, the owner, the response, the conversation before it and
the time when it ends. A value without it counts as missing: someone who can only write to Redis
can remove responses, but not change them, move them to another id or key, or bring them back after
an hour. They can put back one that was deleted, until its hour ends.
"""

from __future__ import annotations

import logging
import re
import time
from typing import Any

import msgspec
from redis.asyncio import Redis

from pagewire.services.router.http.api.responses.inputs import MAX_STORED_BYTES
from pagewire.services.router.http.api.responses.store_scripts import GET, PUT, REMOVE
from pagewire.services.router.http.api_errors import ResponseNotFoundError, StoreUnavailableError
from pagewire.shared.base.errors import UNDECODABLE, RedisUnavailableError, SealError
from pagewire.shared.cluster.record_seal import RecordSeal
from pagewire.shared.cluster.redis_client import cluster_tag, redis_call

logger = logging.getLogger(__name__)

TTL_S = 3600
TIMEOUT_S = 1.0
CLOCKS_S = 300  # by which the clocks of two routers may differ
_MAX_LOGGED_IDS = 256

_ID = re.compile(r"resp_[0-9a-f]{32}")


class StoredResponse(msgspec.Struct, frozen=True):
    """A response that is stored.

    Attributes:
        owner: name of the API key that it was made with; None: no key was needed.
        holder: whose bytes it counts as.
        response: the response object.
        items: the conversation, a JSON list.
        ends_s: when it ends, in seconds since 1970 by the clock of the router that stored it.
    """

    owner: str | None
    holder: str
    response: msgspec.Raw
    items: msgspec.Raw
    ends_s: int


class ResponseStore:
    """The responses of a cluster.

    Args:
        redis: where they are.
        cluster_secret: separates the cluster's keys from those of others, and seals the responses.
        max_bytes: of all responses; 0: none is stored.
        max_each: bytes of one holder's responses; None: as many as all may have.
    """

    def __init__(
        self, redis: Redis, cluster_secret: str, max_bytes: int, max_each: int | None = None
    ) -> None:
        self._redis, self._max_bytes = redis, max_bytes
        self._max_each = max_bytes if max_each is None else max_each
        self._seal = RecordSeal(cluster_secret)
        tag = cluster_tag(cluster_secret)
        self._prefix = f"pagewire:{tag}:r:"
        self._sets = f"pagewire:{tag}:rs:"
        self._sums, self._ends = f"pagewire:{tag}:rb", f"pagewire:{tag}:re"
        self._logged: set[str] = set()

    async def put(
        self, response_id: str, owner: str | None, holder: str, response: bytes, items: bytes
    ) -> bool:
        """Store a response; return whether that worked. Never raises: the client has its answer.

        Args:
            response_id: of the response.
            owner: name of the API key that it was made with; None: no key was needed.
            holder: whose bytes it counts as.
            response: the response object.
            items: the conversation, a JSON list.
        """
        ends_s = int(time.time()) + TTL_S
        stored = StoredResponse(owner, holder, msgspec.Raw(response), msgspec.Raw(items), ends_s)
        value = self._seal.seal(self._prefix + response_id, msgspec.json.encode(stored))
        if len(value) > MAX_STORED_BYTES:
            logger.info("not storing a response of %d bytes: too large", len(value))
            return False
        bounds = self._max_bytes, holder, self._max_each
        arguments = (self._prefix, self._sets, response_id, value, TTL_S * 1000, *bounds)
        try:
            return bool(await self._run(PUT, (self._sums, self._ends), *arguments) == 1)
        except StoreUnavailableError as exc:
            logger.warning("cannot store a response: %s", exc)
            return False

    async def get(self, response_id: str, owner: str | None, param: str | None) -> StoredResponse:
        """Return a response.

        Args:
            response_id: of the response.
            owner: name of the client's API key.
            param: the field that names it, for the error.

        Raises:
            ResponseNotFoundError: there is none that is this owner's.
            StoreUnavailableError: Redis does not answer.
        """
        if not _ID.fullmatch(response_id):
            raise ResponseNotFoundError(response_id, param)
        name = self._prefix + response_id
        value = await self._run(GET, (name,), MAX_STORED_BYTES)
        is_there = isinstance(value, bytes) and value
        stored = self._opened(response_id, name, value) if is_there else None
        if stored is None or stored.owner != owner:
            raise ResponseNotFoundError(response_id, param)
        return stored

    async def remove(self, response_id: str, owner: str | None) -> None:
        """Delete a response.

        Raises:
            ResponseNotFoundError: there is none that is this owner's.
            StoreUnavailableError: Redis does not answer.
        """
        stored = await self.get(response_id, owner, None)
        places = self._prefix, self._sets, response_id, stored.holder
        await self._run(REMOVE, (self._sums,), *places)

    def _opened(self, response_id: str, name: str, value: bytes) -> StoredResponse | None:
        """Return the response in a value; None if it has ended or is not the cluster's."""
        try:
            stored = msgspec.json.decode(self._seal.open(name, value), type=StoredResponse)
        except SealError as exc:
            if response_id not in self._logged and len(self._logged) < _MAX_LOGGED_IDS:
                self._logged.add(response_id)
                logger.warning(
                    "the stored response %s counts as missing: %s; an earlier release of Pagewire "
                    "wrote it, or somebody who is not of the cluster",
                    response_id,
                    exc,
                )
            return None
        except UNDECODABLE:  # another release wrote the response
            return None
        return stored if time.time() < stored.ends_s + CLOCKS_S else None

    async def _run(self, script: str, keys: tuple[str, ...], *arguments: str | bytes | int) -> Any:
        try:
            return await redis_call(
                self._redis.eval(script, len(keys), *keys, *arguments), TIMEOUT_S
            )
        except RedisUnavailableError as exc:
            raise StoreUnavailableError(str(exc)) from exc
