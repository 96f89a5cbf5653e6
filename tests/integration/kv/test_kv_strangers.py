"""Bytes and messages from those who have no link."""

from __future__ import annotations

import asyncio
import os
import secrets

import pytest
import zmq

from pagewire.shared.base.errors import ConfigError
from pagewire.shared.control.auth import ClusterKeys
from pagewire.shared.transfer.endpoint.sockets import KvSockets, ReceiverSocket, SenderSocket
from pagewire.shared.transfer.messages import (
    MAX_MESSAGE_BYTES,
    Grant,
    Open,
    Return,
    encode,
)
from pagewire.tests.support.aio import eventually, run_async
from pagewire.tests.support.kv_pair import kv_pair
from pagewire.tests.support.kv_raw import (
    PROMPT,
    SEGMENT,
    reserved,
)

pytestmark = pytest.mark.timeout(30)
OPEN = Open("zmq", b"")
GARBAGE = [
    b"",
    b"garbage",
    os.urandom(3000),
    b"\x92\xa1\xff\x01",  # msgpack, but its tag is not UTF-8
    b"\x81\xa4type\xa4Oven",
    encode(OPEN) + b"more",
    encode(Grant([0])),  # a receiver's
    b"\0" * (MAX_MESSAGE_BYTES + 1),
]


def test_malformed_bytes_and_unknown_tokens_are_counted_and_disturb_nobody() -> None:
    with kv_pair("zmq", num_prefills=2) as pair:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        stranger = context.socket(zmq.DEALER)
        stranger.connect(pair.decode.receiver.socket.endpoint)
        receiver = pair.decode.receiver
        request = pair.ask(PROMPT)
        for data in GARBAGE:
            stranger.send(data)
            stranger.send_multipart([data, b"payload"])
            stranger.send_multipart([b"", data, b"payload", b"more"])
        said = [OPEN, SEGMENT, Return(0)]
        for message in said:
            stranger.send(encode(message))
        malformed = 3 * len(GARBAGE)
        expected = {"malformed": malformed, "stray": malformed + len(said)}
        pair.until(lambda: expected.items() <= receiver.fault_counts().items())
        monitor = stranger.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        stranger.send(
            bytes(MAX_MESSAGE_BYTES + (1 << 16))
        )  # more than any message may have: libzmq closes it
        pair.until(lambda: monitor.poll(0))
        stranger.disable_monitor()
        monitor.close(linger=0)
        pair.finish()
        assert expected.items() <= receiver.fault_counts().items()
        assert len(request.tried) == 1
        assert (receiver.fault_counts()["lost"], len(receiver.links)) == (0, 2)
        stranger.close(linger=0)
        context.term()


@pytest.mark.parametrize("data", GARBAGE)
def test_malformed_bytes_of_a_known_sender_end_its_link(data: bytes) -> None:
    with reserved() as (pair, raw, _):
        raw.say(data)
        pair.until(lambda: pair.decode.lost)
        ((link, reason),) = pair.decode.lost
        assert link is raw.link
        assert "message" in reason
        assert pair.decode.receiver.fault_counts()["malformed"] == 1


def test_a_host_that_is_not_ours() -> None:
    sockets = KvSockets(None, 100)
    for host in ("192.0.2.1", "2001:db8::1"):
        with pytest.raises(ConfigError, match=f"cannot listen on {host}.*PAGEWIRE_HOST"):
            ReceiverSocket(sockets, host, host)
    sockets.close()


@pytest.mark.parametrize("key", ["the cluster's", "none", "of another cluster", "its own"])
def test_only_the_cluster_gets_anything_in(key: str) -> None:
    ours = ClusterKeys.derive("secret")
    _public, secret = zmq.curve_keypair()
    keys = {
        "the cluster's": ours,
        "none": None,
        "of another cluster": ClusterKeys.derive("other"),
        "its own": OwnKeys(ours.public, secret),
    }[key]

    async def scenario() -> None:
        sockets = KvSockets(ours, 1000)
        others = KvSockets(keys, 1000)
        socket = ReceiverSocket(sockets, "127.0.0.1", "127.0.0.1")
        token = secrets.token_bytes(16)
        sender = SenderSocket(others, socket.endpoint, token, "receiver")
        sender.post(OPEN)
        if key == "the cluster's":
            await eventually(socket.poll)
            assert list(socket.receive()) == [(token, OPEN, None)]
            socket.send(token, Grant([1]))
            await eventually(sender.poll)
            assert list(sender.receive()) == [Grant([1])]
        elif key == "its own":
            await eventually(lambda: sockets.denied)
        else:
            await asyncio.sleep(0.1)
        assert not list(socket.receive())
        sender.close()
        socket.close()
        others.close()
        sockets.close()

    run_async(scenario())


class OwnKeys(ClusterKeys):
    """A client that knows the cluster's public key, and has keys of its own."""

    def secure_client(self, socket: zmq.Socket[bytes]) -> None:
        super().secure_client(socket)
        socket.curve_publickey = zmq.curve_public(self.secret)
