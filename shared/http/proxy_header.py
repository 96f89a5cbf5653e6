"""Reads the PROXY protocol, version 2, in which a gateway reports its client's address.

signature (12 bytes) | version, command | family, transport | length (2) | addresses | TLVs
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass

from pagewire.shared.base.errors import ProtocolError

SIGNATURE = b"\r\n\r\n\0\r\nQUIT\n"  # no HTTP request begins with a NUL in its third line
MOST_BYTES = 4096  # of addresses and TLVs, which are certificates at the most

_VERSION = 2
_LOCAL, _PROXY = 0, 1  # a gateway's own connection, such as a health check; a client's
_FIXED = struct.Struct("!12sBBH")
# family and transport -> family, two addresses, two ports
_ADDRESSES = {
    0x11: (socket.AF_INET, struct.Struct("!4s4sHH")),
    0x21: (socket.AF_INET6, struct.Struct("!16s16sHH")),
}


@dataclass(frozen=True, slots=True)
class ProxyHeader:
    """The gateway's header.

    Attributes:
        num_bytes: length of the header; the client's first byte follows.
        client: address and port; None if the gateway speaks for itself or does not know.
    """

    num_bytes: int
    client: tuple[str, int] | None


def may_begin(data: bytes) -> bool:
    """Whether a connection's first bytes, perhaps very few, may begin a header."""
    return data.startswith(SIGNATURE[: len(data)])


def parse(data: bytes) -> ProxyHeader | None:
    """Return the header at the start of `data`; None if it is incomplete.

    Raises:
        ProtocolError: it is malformed, or longer than `MOST_BYTES`.
    """
    if len(data) < _FIXED.size:
        return None
    _, command, kind, length = _FIXED.unpack_from(data)
    if command >> 4 != _VERSION or command & 15 not in (_LOCAL, _PROXY) or length > MOST_BYTES:
        raise ProtocolError(f"PROXY header with command {command:#x} and {length} bytes")
    num_bytes = _FIXED.size + length
    if len(data) < num_bytes:
        return None
    if command & 15 == _LOCAL or kind not in _ADDRESSES:
        return ProxyHeader(num_bytes, None)
    family, layout = _ADDRESSES[kind]
    if length < layout.size:
        raise ProtocolError(f"PROXY header with {length} bytes for addresses of {layout.size}")
    client, _, port, _ = layout.unpack_from(data, _FIXED.size)
    return ProxyHeader(num_bytes, (socket.inet_ntop(family, client), port))
