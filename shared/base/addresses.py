"""Chooses the address that a service advertises, and resolves the host names of others.

A service in a container listens on all addresses (0.0.0.0), which it cannot advertise. It may
advertise a name, whose address can then change while the service runs.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import socket
from urllib.parse import urlsplit

from pagewire.shared.base.errors import ConfigError

WILDCARDS = frozenset({"0.0.0.0", "::", ""})  # noqa: S104 - compared with, not bound
MAX_PORT = 65535
OPERATOR_OFFSET = 1000
_LOOPBACK = "127.0.0.1"
_REDIS_PORT = 6379


async def advertised_host(host: str, advertise_host: str | None, redis_url: str) -> str:
    """Return the name or address that a service announces itself with.

    This is `advertise_host` if it is set, else the address that the service listens on. If it
    listens on all addresses, it is this machine's address on the route to Redis, because all
    services of a cluster reach that network.

    Args:
        host: the address that the service listens on.
        advertise_host: the setting.
        redis_url: URL of the cluster's Redis.

    Raises:
        ConfigError: there is no route to Redis.
    """
    if advertise_host is not None or host not in WILDCARDS:
        return advertise_host or host
    url = urlsplit(redis_url)
    if url.hostname is None:  # a Unix socket: everybody is on this machine
        return _LOOPBACK
    family = socket.AF_INET if host == "0.0.0.0" else socket.AF_UNSPEC  # noqa: S104 - see above
    try:
        return await asyncio.to_thread(_own_address, url.hostname, url.port or _REDIS_PORT, family)
    except OSError as exc:
        raise ConfigError(
            f"no address of this machine leads to {url.hostname}: {exc.strerror}; "
            "set PAGEWIRE_ADVERTISE_HOST to one that the other services reach"
        ) from exc


def usual_operator_port(port: int) -> int:
    """Return the operator port that goes with an endpoint's port by default.

    It is not the next port, which may be the endpoint of a second cluster. For port 0 and for the
    highest ports it is 0, which takes a free port.
    """
    return port + OPERATOR_OFFSET if 0 < port <= MAX_PORT - OPERATOR_OFFSET else 0


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens on an address, or on that of a name."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    address = _address(host)
    return address is not None and address.is_loopback


def is_unspecified(host: str) -> bool:
    """Whether this is the address that stands for all of a machine, such as 0.0.0.0."""
    address = _address(host)
    return address is not None and address.is_unspecified


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return an address, that of IPv4 if it is one within IPv6; None if it is a name."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def with_host(endpoint: str, host: str) -> str:
    """Replace the host of an endpoint such as "tcp://0.0.0.0:1234"."""
    scheme, _, address = endpoint.partition("://")
    bracketed = f"[{host}]" if ":" in host else host
    return f"{scheme}://{bracketed}:{address.rpartition(':')[2]}"


async def numeric_endpoint(endpoint: str) -> str:
    """Resolve the name in an endpoint, e.g. "tcp://prefill:1234", ahead of libzmq.

    libzmq looks names up in the thread that serves all connections, and does not report an unknown
    name.

    Raises:
        OSError: the name has no address now, or this is not an endpoint.
    """
    try:
        host = urlsplit(endpoint).hostname
        if not host or is_address(host):
            return endpoint
        loop = asyncio.get_running_loop()
        infos = await loop.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except ValueError as exc:  # brackets that don't match, or a label that is too long
        raise OSError(errno.EINVAL, f"not an endpoint: {exc}") from exc
    return with_host(endpoint, str(infos[0][4][0]))


def is_address(host: str) -> bool:
    """Whether this is an address, not a name."""
    return _address(host) is not None


def _own_address(host: str, port: int, family: socket.AddressFamily) -> str:
    kind, target = socket.getaddrinfo(host, port, family, socket.SOCK_DGRAM)[0][0:5:4]
    with socket.socket(socket.AddressFamily(kind), socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # sends nothing
        return str(probe.getsockname()[0])
