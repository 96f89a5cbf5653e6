"""Chooses the cluster's own Redis: a real server on a private socket, or the one in the package."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from pathlib import Path

from pagewire.services.cli.up.processes import ChildSpec
from pagewire.shared.base.errors import ConfigError, RedisSetupError
from pagewire.shared.cluster.redis_client import connect_redis

SERVERS = ("redis-server", "valkey-server")
SOCKET = "redis.sock"
MAX_SOCKET_BYTES = 107
MEMORY_LIMIT = "512mb"
PROBE_S = 1.0
POLL_S = 0.05


def find_server() -> str | None:
    """Return the path of an installed Redis server, if there is one."""
    return next((path for name in SERVERS if (path := shutil.which(name))), None)


def server_spec(program: str, private_dir: Path) -> tuple[ChildSpec, str]:
    """Return how to run a real server for this cluster alone, and its URL.

    It listens on a Unix socket in `private_dir` (which only this user may enter), on no TCP port,
    and keeps nothing on disk: the index is soft state.

    Raises:
        ConfigError: the directory's name is too long.
    """
    socket_path = _socket_in(private_dir)
    options = {
        "port": "0",
        "unixsocket": str(socket_path),
        "unixsocketperm": "700",
        "dir": str(private_dir),
        "save": "",
        "appendonly": "no",
        "daemonize": "no",
        "loglevel": "notice",
        "maxmemory": MEMORY_LIMIT,
        "maxmemory-policy": "allkeys-lru",
    }
    arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
    return ChildSpec("redis", (program, *arguments), is_store=True), f"unix://{socket_path}"


def embedded_spec(private_dir: Path) -> tuple[ChildSpec, str]:
    """Return how to run the stand-in for machines without a Redis server, and its URL.

    It, too, listens on a Unix socket in `private_dir` and on no TCP port.

    Raises:
        ConfigError: the directory's name is too long.
    """
    socket_path = _socket_in(private_dir)
    argv = (sys.executable, "-P", "-m", "pagewire.services.cli.up.fake_redis", str(socket_path))
    return ChildSpec("redis", argv, is_store=True), f"unix://{socket_path}"


def _socket_in(private_dir: Path) -> Path:
    path = private_dir / SOCKET
    if (length := len(os.fsencode(path))) > MAX_SOCKET_BYTES:
        raise ConfigError(
            f"Redis cannot open a socket as {path}: {length} bytes, and the system takes "
            f"{MAX_SOCKET_BYTES}; set TMPDIR to a directory with a shorter name"
        )
    return path


async def is_answering(url: str) -> bool:
    """Return whether a Redis answers a ping now."""
    try:
        client = await connect_redis(url, PROBE_S)
    except RedisSetupError:
        return False
    await client.aclose()
    return True


async def wait_until_answering(url: str, timeout_s: float) -> None:
    """Wait until a Redis answers.

    Raises:
        RedisSetupError: it did not in that time, or refuses; the message has no password.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while True:
        try:
            client = await connect_redis(url, PROBE_S)
        except RedisSetupError:
            if loop.time() > deadline:
                raise
        else:
            return await client.aclose()
        await asyncio.sleep(POLL_S)
