"""Responses that clients may continue: in Redis, for an hour, within a bound in bytes.

    pagewire:<tag>:r:<id>    a `StoredResponse` as JSON
    pagewire:<tag>:rs        sorted set: "<id> <bytes>" of each, by when it ends, ms
    pagewire:<tag>:rb        bytes of all

Several routers share a store: any of them can continue a response of another. The store is in the
cluster's Redis unless it has one of its own; its bound keeps it from displacing other data there.
Each response is stored with its whole conversation. So continuing one needs a single read, however
many turns came before.
"""

from __future__ import annotations

import logging
import re

import msgspec
from redis.asyncio import Redis

from pagewire.services.router.http.api.responses.inputs import MAX_STORED_BYTES
from pagewire.services.router.http.errors import ResponseNotFoundError, StoreUnavailableError
from pagewire.shared.base.errors import UNDECODABLE, RedisUnavailableError
from pagewire.shared.cluster.redis_client import redis_call

logger = logging.getLogger(__name__)

TTL_S = 3600
TIMEOUT_S = 1.0

_ID = re.compile(r"resp_[0-9a-f]{32}")

# Store a value; those that expire first make room. Returns whether it is stored.
# KEYS: sorted set, sum. ARGV: key prefix, id, value, TTL in ms, bound in bytes.
PUT = """
local all, sum, prefix, id, value = KEYS[1], KEYS[2], ARGV[1], ARGV[2], ARGV[3]
local ttl, bound = tonumber(ARGV[4]), tonumber(ARGV[5])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
if #value > bound then return 0 end
local total = tonumber(redis.call('GET', sum) or '-1')
if total < 0 then -- lost: Redis may remove any key where its memory is full
  total = 0
  for _, each in ipairs(redis.call('ZRANGE', all, 0, -1)) do
    total = total + tonumber(string.match(each, ' (%d+)$'))
  end
end
while true do
  local first = redis.call('ZRANGE', all, 0, 0, 'WITHSCORES')
  if #first == 0 then total = 0 break end
  if total + #value <= bound and tonumber(first[2]) > now then break end
  local name, size = string.match(first[1], '^(%S+) (%d+)$')
  redis.call('DEL', prefix .. name)
  redis.call('ZREM', all, first[1])
  total = total - tonumber(size)
end
redis.call('SET', prefix .. id, value, 'PX', ttl)
redis.call('ZADD', all, now + ttl, id .. ' ' .. #value)
redis.call('SET', sum, total + #value, 'PX', ttl)
redis.call('PEXPIRE', all, ttl)
return 1
"""

# Remove a value. KEYS: sorted set, sum. ARGV: key prefix, id.
REMOVE = """
local key = ARGV[1] .. ARGV[2]
local size = redis.call('STRLEN', key)
if redis.call('DEL', key) == 1 and
   redis.call('ZREM', KEYS[1], ARGV[2] .. ' ' .. size) == 1 and
   redis.call('EXISTS', KEYS[2]) == 1 then
  redis.call('DECRBY', KEYS[2], size)
end
return 1
"""


class StoredResponse(msgspec.Struct, frozen=True):
    """A response that is stored.

    Attributes:
        owner: name of the API key that it was made with; None: no key was needed.
        response: the response object.
        items: the conversation, a JSON list.
    """

    owner: str | None
    response: msgspec.Raw
    items: msgspec.Raw


class ResponseStore:
    """The responses of a cluster.

    Args:
        redis: where they are.
        tag: of the cluster, see `cluster_tag`.
        max_bytes: of all responses; 0: none is stored.
    """

    def __init__(self, redis: Redis, tag: str, max_bytes: int) -> None:
        self._redis, self._max_bytes = redis, max_bytes
        self._prefix = f"pagewire:{tag}:r:"
        self._keys = (f"pagewire:{tag}:rs", f"pagewire:{tag}:rb")

    async def put(self, response_id: str, stored: StoredResponse) -> bool:
        """Store a response; return whether that worked. Never raises: the client has its answer."""
        value = msgspec.json.encode(stored)
        if len(value) > MAX_STORED_BYTES:
            logger.info("a response of %d bytes is too large to be stored", len(value))
            return False
        arguments = (self._prefix, response_id, value, TTL_S * 1000, self._max_bytes)
        try:
            return bool(await self._run(PUT, *arguments))
        except StoreUnavailableError as exc:
            logger.warning("a response is not stored: %s", exc)
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
        try:
            value = await redis_call(self._redis.get(self._prefix + response_id), TIMEOUT_S)
        except RedisUnavailableError as exc:
            raise StoreUnavailableError(str(exc)) from exc
        try:
            stored = msgspec.json.decode(value or b"null", type=StoredResponse | None)
        except UNDECODABLE as exc:
            raise ResponseNotFoundError(response_id, param) from exc
        if stored is None or stored.owner != owner:
            raise ResponseNotFoundError(response_id, param)
        return stored

    async def remove(self, response_id: str, owner: str | None) -> None:
        """Delete a response.

        Raises:
            ResponseNotFoundError: there is none that is this owner's.
            StoreUnavailableError: Redis does not answer.
        """
        await self.get(response_id, owner, None)
        await self._run(REMOVE, self._prefix, response_id)

    async def _run(self, script: str, *arguments: str | bytes | int) -> object:
        try:
            call = self._redis.eval(script, len(self._keys), *self._keys, *arguments)
            return await redis_call(call, TIMEOUT_S)
        except RedisUnavailableError as exc:
            raise StoreUnavailableError(str(exc)) from exc
