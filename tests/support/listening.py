"""Which TCP ports processes listen on, as the kernel says."""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

_LISTENING = "0A"  # state in /proc/net/tcp


def listening_sockets(pids: Iterable[int]) -> set[tuple[IPv4Address | IPv6Address, int]]:
    """Return address and port of each TCP socket on which one of the processes listens."""
    inodes = {inode for pid in pids for inode in _socket_inodes(pid)}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENING and fields[9] in inodes:
                address, _, port = fields[1].partition(":")
                found.add((_address(address), int(port, 16)))
    return found


def _socket_inodes(pid: int) -> Iterable[str]:
    try:
        entries = list(Path(f"/proc/{pid}/fd").iterdir())
    except FileNotFoundError:  # it has ended
        return
    for entry in entries:
        try:
            yield str(entry.readlink()).removeprefix("socket:[").rstrip("]")
        except FileNotFoundError:
            continue


def _address(digits: str) -> IPv4Address | IPv6Address:
    """Read words of 32 bits, each in this machine's byte order."""
    words = [bytes.fromhex(digits[at : at + 8])[::-1] for at in range(0, len(digits), 8)]
    return ip_address(b"".join(words))
