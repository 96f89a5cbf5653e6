"""The port of a cluster's router, and which program has it if it is taken."""

from __future__ import annotations

import httpx

from pagewire.services.cli.health import fetch_health
from pagewire.services.cli.up.machine import PortTakenError, local_url, require_free_port
from pagewire.shared.errors import ConfigError

NEAR = 20


async def router_port(host: str, port: int) -> int:
    """Return the port, or a free one for 0.

    Raises:
        PortTakenError: it is taken; says whether a Pagewire has it, and names a free one.
        ConfigError: it is not allowed, or the host is not this machine's.
    """
    try:
        return require_free_port(host, port)
    except PortTakenError as exc:
        free = free_port_near(host, port)
        url = local_url(host, port)
        async with httpx.AsyncClient(trust_env=False) as client:
            health = await fetch_health(client, url)
        if health is not None and health.model:
            by, remedy = f" by a Pagewire that serves {health.model}", f"stop it (it is at {url})"
        else:
            by, remedy = "", "stop what listens there"
        raise PortTakenError(
            f"port {port} on {host} is in use{by}: {remedy}, or take another one: --port {free}",
            free,
        ) from exc


def free_port_near(host: str, port: int) -> int:
    """Return the next free port, or any free one where the next few are taken.

    Raises:
        ConfigError: the host is not this machine's.
    """
    for candidate in range(port + 1, min(port + NEAR, 65536)):
        try:
            return require_free_port(host, candidate)
        except ConfigError:  # also taken, or not allowed
            continue
    return require_free_port(host, 0)
