"""Connects to Redis, and raises its errors as Pagewire's own."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable
from typing import TypeVar

from redis.asyncio import BlockingConnectionPool, Connection, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, RedisError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError

from pagewire.shared.base.errors import RedisSetupError, RedisUnavailableError

T = TypeVar("T")

# Exceptions of reading a reply that Redis would never give.
WRONG_REPLY = (TypeError, ValueError, AttributeError, LookupError)

_MAX_CONNECTIONS = 16
_SETTING = "PAGEWIRE_REDIS_URL"


class _Connection(Connection):
    """Looks the host's name up before it connects.

    uvloop's `create_connection` leaves a lookup running if it is cancelled meanwhile, and asyncio
    then logs a traceback of the lookup's error, which nobody retrieves.
    """

    async def connect(self) -> None:
        """Connect unless it is connected.

        Raises:
            RedisError: there is no such host, or no server there.
        """
        if not self.is_connected:
            try:
                await asyncio.get_running_loop().getaddrinfo(self.host, self.port)
            except OSError as exc:
                raise RedisConnectionError(f"{self.host} has no address: {exc.strerror}") from exc
        await super().connect()  # type: ignore[no-untyped-call]


def cluster_tag(cluster_secret: str) -> str:
    """Return the part of a cluster's Redis keys that keeps it apart from other clusters."""
    raw = hashlib.blake2b(cluster_secret.encode(), digest_size=4, person=b"pagewire-tag")
    return raw.hexdigest()


async def connect_redis(url: str, timeout: float = 2.0, setting: str = _SETTING) -> Redis:
    """Return a client whose server answers; the caller closes it with `aclose`.

    Calls on it have no timeout of their own: make them through `redis_call`.

    Args:
        url: `redis://`, `rediss://` or `unix://`.
        timeout: seconds for the first answer, and for each connection later.
        setting: that the URL is from, for errors.

    Raises:
        RedisSetupError: it refuses or does not answer; one line, without the password.
    """
    where = without_password(url)
    try:
        pool = BlockingConnectionPool.from_url(
            url,
            max_connections=_MAX_CONNECTIONS,
            timeout=timeout,
            # None here: redis-py's own uses asyncio.wait_for, which in Python 3.11 may swallow the
            # cancellation of its task. `redis_call` bounds each call instead.
            socket_timeout=None,
            socket_connect_timeout=timeout,
            connection_class=_Connection,
            retry=Retry(NoBackoff(), 0),  # whoever calls knows better whether to wait
            protocol=2,  # the embedded stand-in speaks no other
        )
    except ValueError as exc:
        raise RedisSetupError(f"{where!r} is not a Redis URL: {exc}") from exc
    client = Redis.from_pool(pool)
    try:
        async with asyncio.timeout(timeout):
            await client.ping()
    except (RedisError, OSError) as exc:
        await client.aclose()
        raise RedisSetupError(_explain(where, exc, timeout, setting)) from exc
    except BaseException:  # cancelled
        await client.aclose()
        raise
    return client


async def redis_call(reply: Awaitable[T], timeout: float) -> T:
    """Await a reply.

    Raises:
        RedisUnavailableError: there was none in time, or an error, or it cannot be read.
    """
    try:
        async with asyncio.timeout(timeout):
            return await reply
    except (RedisError, OSError) as exc:  # asyncio's TimeoutError is an OSError
        raise RedisUnavailableError(f"Redis: {str(exc) or 'no answer in time'}") from exc
    except WRONG_REPLY as exc:
        raise RedisUnavailableError(f"Redis: its reply cannot be read: {exc!r}") from exc


def _explain(where: str, exc: Exception, timeout: float, setting: str) -> str:
    hint = f"set {setting} to a server that is up"
    # A wrong password is a ConnectionError, from an AuthenticationError.
    if isinstance(exc, ResponseError) or isinstance(exc.__cause__ or exc, AuthenticationError):
        reason = str(exc).splitlines()[0]
        return (
            f"Redis at {where} refuses: {reason}; "
            f"give the right password in {setting} (redis://:password@host:port/0)"
        )
    if isinstance(exc, TimeoutError):
        return f"Redis at {where} does not answer within {timeout:g} s; {hint}"
    return f"Redis at {where} cannot be reached: {' '.join(str(exc).split())}; start it, or {hint}"


def without_password(url: str) -> str:
    """Return a URL, or what was meant to be one, as it can be shown."""
    scheme, separator, rest = url.rpartition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2].partition('?')[0]}"
