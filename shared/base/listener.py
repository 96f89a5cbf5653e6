"""The socket that routers accept connections from: bound here, or by another process.

Routers that accept from one socket have one queue of connections. If one router dies, the others
accept the waiting connections; with a socket for each (SO_REUSEPORT) these would be lost.
"""

from __future__ import annotations

import socket

from pagewire.shared.base.errors import ConfigError

_FAMILIES = (socket.AF_INET, socket.AF_INET6)


def bound_socket(host: str, port: int, option: str = "--port") -> socket.socket:
    """Return a bound socket, not listening yet: nobody connects before there is an answer.

    Args:
        host: name or address.
        port: 0 takes a free one.
        option: of the command line that chooses the port, for the error.

    Raises:
        ConfigError: the address cannot be had.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except OSError as exc:
        raise ConfigError(
            f"the router cannot listen on {host} port {port}: {exc.strerror}; choose another "
            f"{option} or --host, or stop what uses it"
        ) from exc
    return listener


def inherited_socket(fd: int, option: str = "--fd") -> socket.socket:
    """Return the bound TCP socket that another process has passed on.

    Args:
        fd: its file descriptor.
        option: of the command line that names it, for the error.

    Raises:
        ConfigError: the file descriptor is not such a socket's.
    """
    try:
        listener = socket.socket(fileno=fd)
    except OSError as exc:
        raise ConfigError(f"{option} {fd} is not a socket: {exc.strerror}") from exc
    is_tcp = listener.type == socket.SOCK_STREAM and listener.family in _FAMILIES
    if not is_tcp or not listener.getsockname()[1]:
        listener.detach()  # whatever it is, it is not ours to close
        raise ConfigError(f"{option} {fd} is not a TCP socket that is bound to a port")
    listener.set_inheritable(False)
    return listener
