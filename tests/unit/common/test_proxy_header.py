"""PROXY protocol v2: headers as HAProxy sends them, cut anywhere, and malformed ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewire.shared.base.errors import ProtocolError
from pagewire.shared.http.proxy_header import MOST_BYTES, SIGNATURE, ProxyHeader, may_begin, parse

TCP4 = bytes([192, 0, 2, 7, 10, 0, 0, 1]) + (51000).to_bytes(2) + (8000).to_bytes(2)
TCP6 = bytes.fromhex("20010db8" + "00" * 11 + "07" + "00" * 15 + "01") + b"\xc7\x38\x1f\x40"
TLV = b"\x04\x00\x03abc"


def header(rest: bytes, command: int = 0x21, kind: int = 0x11) -> bytes:
    return SIGNATURE + bytes([command, kind]) + len(rest).to_bytes(2) + rest


@pytest.mark.parametrize(
    ("data", "client"),
    [
        (header(TCP4), ("192.0.2.7", 51000)),
        (header(TCP4 + TLV), ("192.0.2.7", 51000)),
        (header(TCP6, kind=0x21), ("2001:db8::7", 51000)),
        (header(TCP6 + TLV, kind=0x21), ("2001:db8::7", 51000)),
        (header(b"", command=0x20, kind=0), None),
        (header(TCP4 + TLV, command=0x20), None),
        (header(b"\0" * 216, kind=0x31), None),  # a Unix socket
    ],
)
def test_a_header_names_its_client(data: bytes, client: tuple[str, int] | None) -> None:
    for cut in range(len(data)):
        assert may_begin(data[:cut])
        assert parse(data[:cut]) is None
    assert parse(data + b"GET /") == ProxyHeader(len(data), client)


@pytest.mark.parametrize(
    "data",
    [
        header(TCP4, command=0x11),
        header(TCP4, command=0x22),
        header(TCP4[:-1]),
        header(TCP4, kind=0x21),
        header(b"\0" * (MOST_BYTES + 1)),
    ],
    ids=["version", "command", "short", "family", "long"],
)
def test_a_malformed_header_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="PROXY header"):
        parse(data)


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1", b"\r\nGET /", b"PROXY TCP4 ", b"\0"])
def test_a_request_is_not_taken_for_one(data: bytes) -> None:
    assert not may_begin(data)


@given(st.binary(max_size=64))
def test_any_bytes_are_a_header_or_refused(rest: bytes) -> None:
    try:
        found = parse(SIGNATURE + rest)
    except ProtocolError:
        return
    assert found is None or 16 <= found.num_bytes <= 12 + len(rest)
