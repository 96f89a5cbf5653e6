"""The network device that UCX may listen on: the one whose first address is the worker's own.

UCX is bound to devices, not to addresses. On each it listens on the first IPv4 address. If a
worker's address is a later one of its device, UCX would listen on another address, which may belong
to another network. Such a device is not used.
"""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterator

from pagewire.shared.base.errors import ConfigError

_SIOCGIFADDR = 0x8915
_IFREQ = struct.Struct("16s16s")


def find_device(host: str) -> str:
    """Return the device on which UCX would listen on a host's IPv4 address and on no other.

    Args:
        host: a name or an address of this machine.

    Raises:
        ConfigError: there is none, so that UCX would listen on all devices.
    """
    try:
        found = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # unknown, not a name, or of IPv6
        found = []
    own = [ipaddress.IPv4Address(entry[4][0]) for entry in found]
    for name, address in _devices():
        if address in own or (address.is_loopback and any(a.is_loopback for a in own)):
            return name
    raise ConfigError(
        f"UCX would listen on all network devices, since none has {host!r} as its first IPv4 "
        "address: set UCX_NET_DEVICES to the device of the network between the workers, such "
        "as eth0, or choose KV transport 'zmq'"
    )


def _devices() -> Iterator[tuple[str, ipaddress.IPv4Address]]:
    """Yield each device with its first address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = _IFREQ.pack(name.encode(), b"")
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, request)
            except OSError:  # it has no IPv4 address
                continue
            yield name, ipaddress.IPv4Address(answer[20:24])
