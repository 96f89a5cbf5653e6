"""The network device that UCX may listen on: the one whose first address is the worker's own.

UCX is bound to devices, not to addresses. On each it listens on the first IPv4 address, or on the
first IPv6 address that is not link-local. If a worker's address is a later one of its device, UCX
would listen on another address, which may belong to another network. Such a device is not used.
"""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

_SIOCGIFADDR = 0x8915
_IFREQ = struct.Struct("16s16s")
_IPV6_ADDRESSES = Path("/proc/net/if_inet6")


@dataclass(frozen=True)
class NetDevice:
    """A network device and the address on it that UCX takes for the IP version of `address`."""

    name: str
    address: IpAddress


def find_device(host: str) -> NetDevice | None:
    """Return the device on which UCX would listen on a host's address and on no other.

    A name may have several addresses: IPv4 goes first, as it does in UCX.

    Args:
        host: a name or an address of this machine.
    """
    devices = list(_devices())
    for address in _addresses(host):
        for device in devices:
            both_loopback = device.address.is_loopback and address.is_loopback
            same_version = device.address.version == address.version
            if device.address == address or (both_loopback and same_version):
                return device
    return None


def _addresses(host: str) -> list[IpAddress]:
    """Return the addresses of a name, those of IPv4 first."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # unknown, or not a name
        return []
    addresses = [ipaddress.ip_address(entry[4][0]) for entry in found]
    return sorted(addresses, key=lambda address: address.version)


def _devices() -> Iterator[NetDevice]:
    """Yield each device with the address of each IP version that UCX would take there."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = _IFREQ.pack(name.encode(), b"")
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, request)
            except OSError:  # it has no IPv4 address
                continue
            yield NetDevice(name, ipaddress.IPv4Address(answer[20:24]))
    by_name = defaultdict(list)
    for name, address in _ipv6_addresses():
        if not address.is_link_local:
            by_name[name].append(address)
    # The kernel does not list them in UCX's order: with two it is not known which comes first.
    yield from (NetDevice(name, found[0]) for name, found in by_name.items() if len(found) == 1)


def _ipv6_addresses() -> Iterator[tuple[str, ipaddress.IPv6Address]]:
    try:
        lines = _IPV6_ADDRESSES.read_text().splitlines()
    except OSError:  # this kernel has no IPv6
        return
    for line in lines:
        digits, *_, name = line.split()
        yield name, ipaddress.IPv6Address(bytes.fromhex(digits))
