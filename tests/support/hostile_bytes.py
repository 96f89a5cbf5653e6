"""What a stranger may send to a port: an endless random mixture, the same for the same seed."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator, Sequence

# Ends a process that has UCX 1.21 listening on TCP: a magic number, a type and a length.
UCX_KILLER = bytes.fromhex("78563412bebafeca0708000000ffffffffffffffff")
MAX_BYTES = 1 << 17


def _zmtp(mechanism: bytes, minor: int = 1, *, as_server: bool = False) -> bytes:
    signature = b"\xff" + bytes(8) + b"\x7f" + bytes([3, minor])
    return signature + mechanism.ljust(20, b"\0") + bytes([as_server]) + bytes(31)


def _command(name: bytes, body: bytes) -> bytes:
    content = bytes([len(name)]) + name + body
    return b"\x06" + struct.pack(">Q", len(content)) + content


_POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
FIXED = (
    UCX_KILLER,
    UCX_KILLER[:8],
    UCX_KILLER[:13] + bytes(8),
    b"",
    bytes(100_000),
    b"\xff" * 5000,
    b"\r\n" * 1000,
    # ZeroMQ: older protocols, other mechanisms, commands out of order, lengths out of bounds
    b"\x01\x00",
    b"\xff" + bytes(7) + b"\x01\x7f" + b"\x01\x00",
    _zmtp(b"NULL") + _command(b"READY", bytes(30)) + b"\x00\x05hello",
    _zmtp(b"PLAIN") + _command(b"HELLO", b"\x04user\x04pass"),
    _zmtp(b"CURVE") + _command(b"HELLO", bytes(194)),
    _zmtp(b"CURVE") + _command(b"INITIATE", bytes(300)),
    _zmtp(b"CURVE", 0, as_server=True) + _command(b"WELCOME", bytes(160)),
    _zmtp(b"CURVE") + b"\x06" + b"\xff" * 8,
    _zmtp(b"CURVE") + b"\x04\xff" + bytes(255),
    # HTTP: what is malformed, too long, unfinished, or smuggles
    b"GET / HTTP/1.1\r\n\r\n",
    b"GET /metrics HTTP/9.9\r\nHost: localhost\r\n\r\n",
    b"GET /" + b"a" * 100_000,
    b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 10_000,
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9),
    b"CONNECT 127.0.0.1:1 HTTP/1.1\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
    _POST + b"Content-Length: 99999999999999\r\n\r\n{",
    _POST + b"Content-Length: -1\r\n\r\n{}",
    _POST
    + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET / HTTP/1.1\r\n\r\n",
    _POST + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n{",
    _POST + b"Expect: 100-continue\r\nContent-Length: 10\r\n\r\n",
    _POST + b'Content-Length: 20\r\n\r\n{"prompt": "\xff\xfe\x00abcd"',
    _POST + b"Content-Length: 60000\r\n\r\n" + b"[" * 60_000,
    # Redis, TLS, SSH, SOCKS
    b"*1\r\n$8\r\nFLUSHALL\r\n*1\r\n$8\r\nSHUTDOWN\r\n",
    b"*99999999\r\n$99999999999\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(600),
    b"SSH-2.0-OpenSSH_9.6\r\n",
    b"\x05\x01\x00",
)


def hostile_bytes(
    rng: random.Random, recorded: Sequence[bytes], more: Sequence[bytes] = ()
) -> Iterator[bytes]:
    """Yield payloads for one connection after another, without an end: first all of `FIXED`.

    Args:
        rng: source of all random choices.
        recorded: beginnings of real streams, which are replayed, mutated and joined.
        more: payloads to send in addition to `FIXED`.
    """
    fixed = [*FIXED, *more]
    yield from fixed
    samples = [sample for sample in recorded if sample] or fixed
    while True:
        kind = rng.randrange(6)
        if kind == 0:
            yield rng.choice(fixed)
        elif kind == 1:
            yield rng.randbytes(int(2 ** rng.uniform(0, 14)))
        elif kind == 2:
            yield rng.choice(samples)
        elif kind == 3:
            yield _joined(rng, rng.choice(samples), rng.choice([*samples, *fixed]))
        else:
            yield _mutated(rng, rng.choice([*samples, *fixed]))[:MAX_BYTES]


def _joined(rng: random.Random, head: bytes, tail: bytes) -> bytes:
    """Return a beginning of one and an end of another."""
    return head[: rng.randint(0, len(head))] + tail[rng.randint(0, len(tail)) :]


def _mutated(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        at = rng.randint(0, min(len(changed), 400) if rng.random() < 0.7 else len(changed))
        match rng.randrange(5):
            case 0:  # bits
                if at < len(changed):
                    changed[at] ^= 1 << rng.randrange(8)
            case 1:  # a length or a count, perhaps
                size = rng.choice((1, 2, 4, 8))
                changed[at : at + size] = rng.choice((b"\xff", b"\x7f", b"\0", b"\x80")) * size
            case 2:
                del changed[at : at + rng.randint(1, 40)]
            case 3:
                changed[at:at] = rng.randbytes(rng.randint(1, 40))
            case _:  # a part of it twice
                changed[at:at] = changed[at : at + rng.randint(1, 2000)]
    return bytes(changed)
