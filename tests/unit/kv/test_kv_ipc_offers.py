"""CUDA IPC as far as it goes without a GPU: offers, refusals, when staging may be used again."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import msgspec
import pytest
import torch

from pagewire.shared.base.errors import TransferError
from pagewire.shared.kv.device_memory import HANDLE_BYTES, allocate
from pagewire.shared.transfer.messages import MAX_CREDITS, Segment
from pagewire.shared.transfer.peer_process import Process, this_process
from pagewire.shared.transfer.staging import make_staging
from pagewire.shared.transfer.transports.ipc import IpcOffer, IpcReply, IpcTransport
from pagewire.tests.support.ipc_peer import Announced, make_transport

SLOT_BYTES = 1000
HERE = this_process()
OTHER = msgspec.structs.replace(HERE, pid=HERE.pid + 1)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def transport(clock: Clock) -> Iterator[IpcTransport]:
    memory = make_staging(4, SLOT_BYTES, torch.device("cpu")).memory
    opened = make_transport(memory, SLOT_BYTES, quarantine_s=10.0, clock=clock)
    yield opened
    opened.close()


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def make_offer(receiver: Process, **changes: object) -> bytes:
    fields = {
        "receiver": receiver,
        "gpu": "7f2c5a32-0000-0000-0000-000000000001",
        "handle": bytes(HANDLE_BYTES),
        "stride": 1024,
        "num_slots": 4,
    }
    return msgspec.msgpack.encode(fields | changes)


def make_reply(sender: Process) -> bytes:
    return msgspec.msgpack.encode(IpcReply(sender, events=[]))


def refusal(transport: IpcTransport, offer: bytes) -> str:
    with pytest.raises(TransferError) as raised:
        transport.outbound(1, offer, Announced())
    return str(raised.value)


def test_staging_on_a_cpu_is_plain_memory() -> None:
    memory = allocate((2, 512), torch.device("cpu"))
    assert (memory.shape, memory.dtype, memory.device.type) == ((2, 512), torch.uint8, "cpu")


def test_staging_on_a_cpu_is_not_offered(transport: IpcTransport) -> None:
    with pytest.raises(TransferError, match="not GPU memory"):
        transport.offer(1)


def test_another_host_is_refused(transport: IpcTransport) -> None:
    elsewhere = msgspec.structs.replace(OTHER, boot="another", ipc_namespace=1)
    assert refusal(transport, make_offer(elsewhere)) == "the receiver is on another host"


def test_another_ipc_namespace_is_refused_with_what_to_do(transport: IpcTransport) -> None:
    apart = msgspec.structs.replace(OTHER, ipc_namespace=HERE.ipc_namespace + 1)
    reason = refusal(transport, make_offer(apart))
    assert "IPC namespace" in reason
    assert "`ipc: host`" in reason


@pytest.mark.parametrize(
    "offer",
    [
        b"",
        b"\xc1",
        make_offer(OTHER)[:-1],
        make_offer(OTHER) + b"\x00",
        make_offer(OTHER, handle=bytes(HANDLE_BYTES - 1)),
        make_offer(OTHER, handle=bytes(HANDLE_BYTES + 1)),
        make_offer(OTHER, stride=0),
        make_offer(OTHER, num_slots=0),
        make_offer(OTHER, num_slots=1 << 20),
        make_offer(OTHER, gpu="x" * 65),
        make_offer(OTHER, further=1),
        make_offer(msgspec.structs.replace(OTHER, pid=0)),
        make_offer(msgspec.structs.replace(OTHER, boot="x" * 65)),
    ],
)
def test_malformed_offers_are_refused(transport: IpcTransport, offer: bytes) -> None:
    assert "malformed" in refusal(transport, offer)


def test_an_offer_is_decoded_as_it_was_encoded() -> None:
    offer = IpcOffer(OTHER, "a GPU", b"h" * HANDLE_BYTES, 4096, 8)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(offer), type=IpcOffer) == offer


@pytest.mark.parametrize(
    "reply",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"\x90", id="an array"),
        pytest.param(msgspec.msgpack.encode({"pid": 1}), id="other fields"),
        pytest.param(msgspec.msgpack.encode(HERE), id="no events"),
        pytest.param(
            msgspec.msgpack.encode(IpcReply(HERE, [bytes(HANDLE_BYTES)] * (MAX_CREDITS + 1))),
            id="too many events",
        ),
    ],
)
def test_malformed_replies_are_refused(transport: IpcTransport, reply: bytes) -> None:
    with pytest.raises(TransferError, match="malformed"):
        transport.inbound(1, reply)


def test_a_credit_for_which_the_sender_has_no_event_is_refused(transport: IpcTransport) -> None:
    segment = Segment(0, 1, "test", 0, 0, 0, 0, 0, nbytes=1)
    with pytest.raises(TransferError, match="no event for credit 0"):
        transport.inbound(1, make_reply(HERE)).receive(segment, None)


def test_slots_are_free_when_the_senders_process_has_gone(
    transport: IpcTransport, child: subprocess.Popen[bytes]
) -> None:
    sender = msgspec.structs.replace(HERE, pid=child.pid)
    quarantine = transport.inbound(1, make_reply(sender)).close()
    assert not quarantine.poll()
    child.kill()
    deadline = time.monotonic() + 10
    while not quarantine.poll():  # also before anybody has waited for the process
        assert time.monotonic() < deadline
        time.sleep(0.01)
    child.wait(10)
    assert quarantine.poll()


def test_slots_are_free_if_the_senders_process_had_gone_before(
    transport: IpcTransport, child: subprocess.Popen[bytes]
) -> None:
    child.kill()
    child.wait(10)
    sender = msgspec.structs.replace(HERE, pid=child.pid)
    assert transport.inbound(1, make_reply(sender)).close().poll()


def test_slots_are_free_after_a_time_if_the_sender_lives_on(
    transport: IpcTransport, clock: Clock, child: subprocess.Popen[bytes]
) -> None:
    sender = msgspec.structs.replace(HERE, pid=child.pid)
    inbound = transport.inbound(1, make_reply(sender))
    clock.now += 60  # the link's life does not count
    quarantine = inbound.close()
    clock.now += 9.9
    assert not quarantine.poll()
    clock.now += 0.2
    assert quarantine.poll()


def test_a_sender_of_another_pid_namespace_is_given_the_time(
    transport: IpcTransport, clock: Clock, child: subprocess.Popen[bytes]
) -> None:
    """Its process id may be anybody's here: that process's end means nothing."""
    apart = msgspec.structs.replace(HERE, pid=child.pid, pid_namespace=HERE.pid_namespace + 1)
    quarantine = transport.inbound(1, make_reply(apart)).close()
    child.kill()
    child.wait(10)
    assert not quarantine.poll()
    clock.now += 10.1
    assert quarantine.poll()
