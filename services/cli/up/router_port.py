"""Chooses the ports of a cluster's routers, and names the program that has a taken one."""

from __future__ import annotations

import httpx

from pagewire.services.cli.cluster_view import fetch_cluster_view
from pagewire.services.cli.up.machine import LOOPBACK, PortTakenError, local_url, require_free_port
from pagewire.shared.base.addresses import usual_operator_port
from pagewire.shared.base.errors import ConfigError

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
            view = await fetch_cluster_view(client, url, "/health")
        if view is not None and view.model:
            by, remedy = f" by a Pagewire that serves {view.model}", f"stop it (it is at {url})"
        else:
            by, remedy = "", "stop what listens there"
        raise PortTakenError(
            f"port {port} on {host} is in use{by}: {remedy}, or take another one: --port {free}",
            free,
        ) from exc


def operator_port(chosen: int | None, port: int) -> int:
    """Return the operator port, which is this machine's alone.

    Args:
        chosen: the port that the user chose; None takes the usual one, or a free one instead.
        port: the endpoint's port.

    Raises:
        PortTakenError: the one asked for is taken; names a free one.
        ConfigError: it is not allowed, or the endpoint's.
    """
    if chosen == port != 0:
        raise ConfigError(f"--operator-port {chosen} is the endpoint's --port: name another one")
    try:
        return require_free_port(LOOPBACK, usual_operator_port(port) if chosen is None else chosen)
    except PortTakenError as exc:
        if chosen is None:
            return require_free_port(LOOPBACK, 0)
        free = free_port_near(LOOPBACK, chosen)
        raise PortTakenError(
            f"port {chosen} on {LOOPBACK} is in use: stop what listens there, or take another one: "
            f"--operator-port {free}",
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
