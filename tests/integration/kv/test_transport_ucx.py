"""The UCX transport between two processes over TCP: payloads, and links that end in the middle."""

import select
import signal
import time
from collections.abc import Callable

import pytest
import torch

from pagewire.shared.base.errors import TransferError
from pagewire.shared.engine.execution.block_mover import PendingMove
from pagewire.shared.transfer.messages import Segment
from pagewire.shared.transfer.staging import Staging, make_staging
from pagewire.shared.transfer.transports.ucx import UcxTransport
from pagewire.shared.transfer.transports.ucx_settings import ucx_settings
from pagewire.shared.transfer.transports.ucx_worker import MAX_ABANDONED
from pagewire.tests.support.ucx_half import MIB, Half, Silent, connect, cross, two_halves

LARGE = 64 * MIB
# A receiver that rests from its third millisecond on is in the midst of a large payload then.
REST_AFTER_MS, REST_MS, BREAK_OFF_MS = 3, 100, 15
NUM_BREAKS = 12

pytestmark = pytest.mark.timeout(120)


def begin_large(sender: Half, receiver: Half, link: int, use: int) -> None:
    """Begin a payload in whose midst the receiver rests for a moment."""
    sender.do("send", link, 0, use, LARGE)
    sender.wait("begun", link, use)
    receiver.do("after", REST_AFTER_MS, "rest", REST_MS)
    receiver.do("receive", link, 0, use, LARGE)


def break_off(sender: Half, receiver: Half, link: int) -> int:
    """End a link's sending half in mid-payload; returns how many workers the sender abandoned."""
    begin_large(sender, receiver, link, 2)
    sender.do("after", BREAK_OFF_MS, "close", link)
    return int(sender.wait("closed", link)[2])


def test_payloads_arrive_intact_and_in_any_order_relative_to_announcements() -> None:
    with two_halves() as (sender, receiver):
        connect(sender, receiver, 1)
        for use, nbytes in enumerate([1, 1000, 20_000, MIB - 1, MIB], start=1):
            cross(sender, receiver, 1, use, nbytes)
        for credit in range(4):  # announced before they are sent, and in another order
            receiver.do("receive", 1, credit, 6, MIB - credit)
        for credit in (2, 0, 3, 1):
            sender.do("send", 1, credit, 6, MIB - credit)
        for _ in range(4):
            receiver.wait("intact", 1, 6)
        for credit in range(4):  # sent before they are announced
            sender.do("send", 1, credit, 7, 1000 * (credit + 1))
        receiver.do("rest", 100)
        for credit in (3, 1, 2, 0):
            receiver.do("receive", 1, credit, 7, 1000 * (credit + 1))
        for _ in range(4):
            receiver.wait("intact", 1, 7)
        sender.do("close", 1)
        assert sender.wait("closed", 1)[2] == "0"
        receiver.do("close", 1)
        assert receiver.wait("closed", 1)[2] == "0"
        receiver.wait("ended", 1)
        assert (sender.end(), receiver.end()) == (0, 0)


def test_links_do_not_see_each_others_payloads() -> None:
    with two_halves() as (sender, receiver):
        for link in (1, 2, 3):
            connect(sender, receiver, link)
        for credit, link in enumerate((3, 1, 2)):
            sender.do("send", link, credit, 1, 50_000)
        for credit, link in enumerate((3, 1, 2)):
            receiver.do("receive", link, credit, 1, 50_000)
        for link in (1, 2, 3):
            receiver.wait("intact", link, 1)
        sender.do("close", 2)
        assert sender.wait("closed", 2)[2] == "0"
        cross(sender, receiver, 1, 2, MIB)
        cross(sender, receiver, 3, 2, MIB)


def test_receiver_that_is_killed_in_the_middle_fails_the_send() -> None:
    with two_halves(1, LARGE) as (sender, receiver):
        connect(sender, receiver, 1)
        cross(sender, receiver, 1, 1, 1000)
        begin_large(sender, receiver, 1, 2)
        time.sleep(BREAK_OFF_MS / 1e3)
        receiver.kill()
        sender.wait("failed", 1, 2)
        sender.do("send", 1, 0, 3, 1000)
        sender.wait("failed", 1, 3)
        sender.do("close", 1)
        assert sender.wait("closed", 1)[2] == "1"
        assert sender.end() == 0


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL], ids=lambda n: n.name)
@pytest.mark.parametrize("victim", ["sender", "receiver"])
def test_link_to_a_stopped_or_dead_peer_can_be_closed(victim: str, number: signal.Signals) -> None:
    with two_halves(1, LARGE) as (sender, receiver):
        stopped, other = (sender, receiver) if victim == "sender" else (receiver, sender)
        connect(sender, receiver, 1)
        cross(sender, receiver, 1, 1, 1000)
        begin_large(sender, receiver, 1, 2)
        time.sleep(BREAK_OFF_MS / 1e3)
        stopped.signal(number)
        time.sleep(0.1)
        started = time.monotonic()
        other.do("close", 1)
        num_broken = other.wait("closed", 1)[2]
        # A receiver that was slow to begin has nothing under way.
        assert num_broken == "1" or (other is receiver and num_broken == "0")
        assert time.monotonic() - started < 2
        if other is receiver:
            receiver.wait("ended", 1)
        if number is signal.SIGSTOP:
            stopped.signal(signal.SIGCONT)
            connect(sender, receiver, 2)
            cross(sender, receiver, 2, 1, LARGE)
        assert other.end() == 0


@pytest.mark.parametrize("victim", ["sender", "receiver"])
def test_peer_that_dies_while_nothing_is_under_way_costs_no_worker(victim: str) -> None:
    with two_halves() as (sender, receiver):
        killed, other = (sender, receiver) if victim == "sender" else (receiver, sender)
        connect(sender, receiver, 1)
        cross(sender, receiver, 1, 1, MIB)
        killed.kill()
        time.sleep(0.5)  # it is noticed or not
        other.do("close", 1)
        assert other.wait("closed", 1)[2] == "0"
        assert other.end() == 0


def test_payload_that_is_broken_off_ends_neither_process() -> None:
    """The peer is alive and reads on; later links work, and both processes end in order."""
    with two_halves(1, LARGE) as (sender, receiver):
        for link in range(1, NUM_BREAKS + 1):
            connect(sender, receiver, link)
            cross(sender, receiver, link, 1, 1000)
            assert break_off(sender, receiver, link) == link
        connect(sender, receiver, 99)
        cross(sender, receiver, 99, 1, LARGE)
        assert (sender.end(), receiver.end()) == (0, 0)


def test_sender_with_too_many_broken_workers_refuses_further_links() -> None:
    with two_halves(1, MIB) as (sender, receiver):
        for link in range(1, MAX_ABANDONED + 1):
            connect(sender, receiver, link)
            sender.do("send", link, 0, 1, MIB)  # the other side never does its part
            sender.do("close", link)
            assert sender.wait("closed", link)[2] == str(link)
        receiver.do("offer", 99)
        sender.do("outbound", 99, receiver.wait("offer", 99)[2])
        assert "restart" in sender.wait("refused", 99)
        assert sender.end() == 0


def test_receiver_with_too_many_broken_workers_offers_no_further_links() -> None:
    with two_halves(1, LARGE) as (sender, receiver):
        num_broken, link = 0, 0
        while num_broken < MAX_ABANDONED:
            link += 1
            connect(sender, receiver, link)
            cross(sender, receiver, link, 1, 1000)
            begin_large(sender, receiver, link, 2)
            receiver.do("close", link)
            num_broken = int(receiver.wait("closed", link)[2])
        receiver.do("offer", 99)
        assert "restart" in receiver.wait("refused", 99)
        assert receiver.end() == 0


class LatePacking(PendingMove):
    """A packing that ends when a test says so."""

    def __init__(self) -> None:
        super().__init__(None)
        self.has_ended = False

    def poll(self) -> bool:
        return self.has_ended


def transport_here() -> tuple[UcxTransport, Staging]:
    staging = make_staging(3, MIB, torch.device("cpu"))
    return UcxTransport(staging, ucx_settings("127.0.0.1", cuda=False)), staging


def poll_until(condition: Callable[[], bool], *transports: UcxTransport) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        for transport in transports:
            transport.poll()


def test_idle_transport_sleeps_and_its_descriptor_wakes_it() -> None:
    (sender, source), (receiver, target) = transport_here(), transport_here()
    outbound = sender.outbound(1, receiver.offer(1), Silent())
    inbound = receiver.inbound(1, outbound.reply)
    segment = Segment(1, 1, "job", 0, 1, 0, 1, 0, MIB)
    received = inbound.receive(segment, None)
    sent = outbound.send(segment, 0, PendingMove(None))
    poll_until(lambda: sent.poll() and received.poll(), sender, receiver)
    fds = receiver.fds()
    poll_until(lambda: not select.select(fds, [], [], 0)[0] and not receiver.poll(), receiver)
    assert not select.select(fds, [], [], 0.3)[0]

    source.buffers[1].fill_(7)
    late = Segment(0, 1, "job", 0, 1, 0, 1, 0, 1000)
    sent = outbound.send(late, 1, PendingMove(None))
    poll_until(lambda: sent.poll() or bool(select.select(fds, [], [], 0)[0]), sender)
    received = inbound.receive(late, None)
    poll_until(lambda: sent.poll() and received.poll(), sender, receiver)
    assert target.buffers[0][:1000].eq(7).all()

    outbound.close()
    assert inbound.close().poll()
    for transport in (sender, receiver):
        transport.close()
        assert transport.library.num_abandoned == 0


@pytest.mark.parametrize("sends", [False, True])
def test_a_link_may_end_while_payloads_are_announced_and_not_packed(sends: bool) -> None:
    (sender, _), (receiver, _) = transport_here(), transport_here()
    outbound = sender.outbound(1, receiver.offer(1), Silent())
    inbound = receiver.inbound(1, outbound.reply)
    segments = [Segment(credit, 1, "job", 0, 1, 0, 1, 0, MIB) for credit in range(2)]
    packing = LatePacking()
    announced = [outbound.send(segment, segment.credit, packing) for segment in segments]
    received = [inbound.receive(segment, None) for segment in segments]
    if sends:  # another one
        first = Segment(2, 1, "job", 0, 1, 0, 1, 0, MIB)
        received.append(inbound.receive(first, None))
        announced.append(outbound.send(first, 2, PendingMove(None)))
        poll_until(lambda: announced[2].poll() and received[2].poll(), sender, receiver)
    assert not any(pending.poll() for pending in (*announced[:2], *received[:2]))
    outbound.close()
    assert inbound.close().poll()
    # The next link's file descriptors have the numbers of this one's.
    outbound = sender.outbound(2, receiver.offer(2), Silent())
    inbound = receiver.inbound(2, outbound.reply)
    packing.has_ended = True
    for pending in announced[:2]:
        with pytest.raises(TransferError, match="the link has ended"):
            pending.poll()
    sender.poll()
    arriving = inbound.receive(segments[0], None)
    sending = outbound.send(segments[0], 0, packing)
    poll_until(lambda: sending.poll() and arriving.poll(), sender, receiver)
    outbound.close()
    assert inbound.close().poll()
    for transport in (sender, receiver):
        transport.close()
        assert transport.library.num_abandoned == 0


def test_offer_that_is_withdrawn_costs_no_worker() -> None:
    transport, _ = transport_here()
    before = transport.offer(1)
    assert 0 < len(before) <= 64 << 10
    transport.withdraw(1)
    transport.withdraw(1)
    with pytest.raises(TransferError):
        transport.outbound(1, b"", Silent())
    transport.close()
    assert transport.library.num_abandoned == 0
    assert not transport.should_restart
