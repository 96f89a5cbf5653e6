"""The socket that routers accept connections from: bound here, or by another process.

Routers that accept from one socket have one queue of connections. If one of them dies, the others
serve what waits there; with a socket each (SO_REUSEPORT) it would be lost.
"""

from __future__ import annotations

import socket

from pagewire.shared.errors import ConfigError

_FAMILIES = (socket.AF_INET, socket.AF_INET6)


def bound_socket(host: str, port: int) -> socket.socket:
    """Return a bound socket, not listening yet: nobody connects before there is an answer.

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
            "--port or --host, or stop what uses it"
        ) from exc
    return listener


def inherited_socket(fd: int) -> socket.socket:
    """Return the bound TCP socket that another process has passed on.

    Raises:
        ConfigError: the file descriptor is not such a socket's.
    """
    try:
        listener = socket.socket(fileno=fd)
    except OSError as exc:
        raise ConfigError(f"--fd {fd} is not a socket: {exc.strerror}") from exc
    is_tcp = listener.type == socket.SOCK_STREAM and listener.family in _FAMILIES
    if not is_tcp or not listener.getsockname()[1]:
        listener.detach()  # whatever it is, it is not ours to close
        raise ConfigError(f"--fd {fd} is not a TCP socket that is bound to a port")
    listener.set_inheritable(False)
    return listener
