"""What transports tell each other beside the payloads: addresses and session messages.

Everything is strictly decoded msgpack. Messages carry the `channel` number that their receiver
chose for their sender, so that what is left over from an earlier connection matches nothing.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from pagewire.shared.errors import UNDECODABLE, ProtocolError, TransferError
from pagewire.shared.protocol import MAX_HEADER_BYTES

NONCE_BYTES = 16
CHANNEL_BITS = 31
SEQ_BITS = 32
MAX_MESSAGE_BYTES = MAX_HEADER_BYTES + 256

_DIGEST_BYTES = 8

Nonce = Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
Channel = Annotated[int, Meta(gt=0, lt=1 << CHANNEL_BITS)]
Seq = Annotated[int, Meta(ge=0, lt=1 << SEQ_BITS)]


class Address(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where one incarnation of a transport is to be found.

    Attributes:
        nonce: random, made at `start`: a restarted peer is another one.
        endpoint: what the carrier connects to.
        digest: of the rest, since a carrier may not survive a damaged endpoint.
    """

    transport: Annotated[str, Meta(max_length=16)]
    nonce: Nonce
    endpoint: Annotated[bytes, Meta(max_length=1 << 15)]
    digest: Annotated[bytes, Meta(min_length=_DIGEST_BYTES, max_length=_DIGEST_BYTES)]


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The sender has connected; from now on it takes messages with `channel` from the receiver.

    Attributes:
        sender, receiver: nonces of both; a message for an earlier incarnation is dropped.
        echo: the receiver's channel as far as the sender knows it, else 0: what proves to the
            receiver that a message of its will be understood.
        generation: how many ways to the receiver the sender has made so far. The carrier may pair
            them, so whoever has made fewer follows.
    """

    sender: Nonce
    receiver: Nonce
    channel: Channel
    echo: Annotated[int, Meta(ge=0, lt=1 << CHANNEL_BITS)]
    generation: Annotated[int, Meta(gt=0, lt=1 << 16)]


class Offer(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A piece is to be sent; its payload is packed, or will be.

    Attributes:
        timeout_ms: after which the sender will have lost patience.
        header: the encoded `PieceHeader`.
        by_credit: if the payload follows without a grant, into a slot that was held for it ahead,
            the channel of the sender's last `Hello`: the slot is one of that connection. Else 0.
    """

    channel: Channel
    seq: Seq
    timeout_ms: Annotated[int, Meta(ge=0, lt=2**31)]
    header: Annotated[bytes, Meta(max_length=MAX_HEADER_BYTES)]
    by_credit: Annotated[int, Meta(ge=0, lt=1 << CHANNEL_BITS)] = 0


class Grant(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A slot is held for the offered piece: send its payload."""

    channel: Channel
    seq: Seq


class Credit(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A slot is held for a piece that will be offered: its payload need not wait for a grant.

    Attributes:
        given_on: the channel of the sender's last `Hello`. A credit that comes late, from an
            earlier connection that only the sender has forgotten, carries another one.
    """

    channel: Channel
    given_on: Channel


class Refusal(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The offered piece will never be taken."""

    channel: Channel
    seq: Seq
    reason: Annotated[str, Meta(max_length=200)]


class Withdrawal(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The payload of an offered piece will not come."""

    channel: Channel
    seq: Seq


class Payload(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Precedes the bytes of a granted piece, on carriers that don't mark them otherwise."""

    channel: Channel
    seq: Seq


class Bye(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The sender has disconnected from the receiver."""

    channel: Channel


SessionMessage: TypeAlias = Hello | Offer | Grant | Credit | Refusal | Withdrawal | Payload | Bye

_encoder = msgspec.msgpack.Encoder()
_message_decoder: msgspec.msgpack.Decoder[SessionMessage] = msgspec.msgpack.Decoder(SessionMessage)
_address_decoder = msgspec.msgpack.Decoder(Address)


def encode_message(message: SessionMessage) -> bytes:
    """Return the bytes of a session message."""
    return _encoder.encode(message)


def decode_message(data: bytes | bytearray | memoryview) -> SessionMessage:
    """Return the session message of some bytes.

    Raises:
        ProtocolError: they are too many, or are no session message.
    """
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a session message of {len(data)} bytes exceeds {MAX_MESSAGE_BYTES}")
    try:
        return _message_decoder.decode(data)
    except UNDECODABLE as exc:
        raise ProtocolError(f"not a session message: {exc}") from exc


def encode_address(transport: str, nonce: bytes, endpoint: bytes) -> bytes:
    """Return the address that peers pass to `KvTransport.connect`."""
    digest = _digest(transport, nonce, endpoint)
    return _encoder.encode(Address(transport, nonce, endpoint, digest))


def decode_address(data: bytes, transport: str) -> Address:
    """Return the address of some bytes, if it is one of this transport.

    Raises:
        TransferError: it is not, or it is damaged.
    """
    try:
        address = _address_decoder.decode(data)
    except UNDECODABLE as exc:
        raise TransferError(f"not a transport address: {exc}") from exc
    if address.transport != transport:
        raise TransferError(f"the address is one of {address.transport!r}, not of {transport!r}")
    if address.digest != _digest(address.transport, address.nonce, address.endpoint):
        raise TransferError("the transport address is damaged")
    return address


def _digest(transport: str, nonce: bytes, endpoint: bytes) -> bytes:
    content = _encoder.encode((transport, nonce, endpoint))
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()
