"""Links open and share the receiver's staging slots."""

from __future__ import annotations

import errno
import re
from unittest.mock import Mock

import msgspec
import pytest

from pagewire.shared.base.errors import TransferError
from pagewire.shared.transfer.endpoint.credits import StagingSlotState
from pagewire.shared.transfer.messages import Grant, Open
from pagewire.tests.support.kv_pair import KvPair, kv_pair
from pagewire.tests.support.kv_raw import raw_sender
from pagewire.tests.support.kv_sides import TIMEOUT_S, TRANSPORTS, hello_of

pytestmark = pytest.mark.timeout(30)
BROKEN = RuntimeError("the device is broken")
PROMPT = [n * n % 7 for n in range(18)]  # 4 full blocks and 2 tokens


def count(pair: KvPair, state: StagingSlotState) -> int:
    return pair.decode.slots.count(state)


def idle(pair: KvPair) -> list[int]:
    """Credits that each link's sender has."""
    return [len(link.sent.credits.idle) for link in pair.links]


# Links open


@TRANSPORTS
def test_a_link_is_tested_before_its_first_job(kind: str) -> None:
    with kv_pair(kind, linked=False) as pair:
        pair.decode.device.has_moved = False
        link = pair.connect(pair.prefill, pair.decode)
        pair.until(lambda: pair.decode.device.moves)
        assert (link.is_tested, link.sent.gb_per_s) == (False, 0)
        pair.clock.now += 1e-6
        pair.decode.device.has_moved = True
        pair.until(lambda: link.sent.gb_per_s)
        assert link.is_tested
        slot_bytes = pair.decode.staging.slot_bytes
        assert link.sent.gb_per_s == pytest.approx(slot_bytes / 1e3, rel=0.01)
        assert pair.decode.receiver.stats.bytes == {("p0", kind): slot_bytes}
        assert pair.decode.receiver.stats.outcomes == {}
        assert (link.sent.peer, link.received.peer) == ("d0", "p0")


@TRANSPORTS
def test_a_transport_that_does_not_bring_what_is_sent_ends_the_link(kind: str) -> None:
    with kv_pair(kind, linked=False) as pair:
        pair.prefill.transport.num_corrupt = 1
        link = pair.connect(pair.prefill, pair.decode)
        pair.until(lambda: pair.prefill.lost)
        assert pair.prefill.lost == [(link.sent, f"{kind} does not bring what is sent")]
        assert (link.is_tested, pair.prefill.sender.stats.lost_links) == (False, 1)
        assert (len(pair.prefill.sender.links), len(pair.decode.receiver.links)) == (0, 0)
        pair.finish()


@TRANSPORTS
def test_a_link_that_opens_while_all_slots_are_in_use_is_tested_later(kind: str) -> None:
    with kv_pair(kind, prefill_slots=1, num_decodes=2, linked=False) as pair:
        pair.open(pair.prefill, pair.decodes[0])
        pair.prefill.device.has_moved = False
        request = pair.ask(PROMPT)
        pair.until(lambda: pair.prefill.device.moves)
        link = pair.connect(pair.prefill, pair.decodes[1])
        pair.until(lambda: link.sent.credits.idle)
        pair.prefill.device.has_moved = True
        pair.until(lambda: link.is_tested)
        pair.finish()
        assert request.is_over


def test_without_a_common_transport_the_error_says_why_for_each() -> None:
    with kv_pair(("loopback", "zmq"), linked=False) as pair:
        del pair.prefill.transports["loopback"]
        pair.prefill.transport.fails = "outbound"
        why = "d0 can be reached by no transport (loopback: this worker does not have it; zmq: the "
        with pytest.raises(TransferError) as raised:
            pair.connect(pair.prefill, pair.decode)
        assert str(raised.value) == why + "wire is cut)"
        assert (len(pair.prefill.sender.links), len(pair.decode.receiver.links)) == (0, 0)
        link = pair.open(pair.prefill, pair.decode)
        assert link.sent.transport == link.received.transport == "zmq"
        pair.ask(PROMPT)
        pair.finish()


def test_a_receiver_without_a_transport_to_offer_says_why_of_each(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(_link: int) -> bytes:
        raise OSError(errno.EMFILE, "Too many open files")

    with kv_pair(("loopback", "zmq"), linked=False) as pair:
        receiver = pair.decode.receiver
        pair.decode.transports["zmq"].fails = "offer"
        tested = "its test failed: a segment arrived corrupt"
        why = f"there is no transport for p0 (loopback: {tested}; zmq: the wire is cut)"
        with pytest.raises(TransferError, match=re.escape(why)):
            receiver.offer("p0", 1, without={"loopback": tested})
        pair.decode.transports["loopback"].offer = fail
        why = "(loopback: OSError(24, 'Too many open files'); zmq: the wire is cut)"
        for _ in range(3):
            pair.decode.transports["zmq"].fails = "offer"
            with pytest.raises(TransferError, match=re.escape(why)):
                receiver.offer("p0", 1)
        assert caplog.text.count("loopback cannot be offered to p0") == 1
        receiver.transports = {}
        with pytest.raises(TransferError, match=r"no transport for p0 \(none is open\)"):
            receiver.offer("p0", 1)
        assert len(receiver.links) == 0


def test_only_what_was_offered_is_accepted() -> None:
    with kv_pair(("loopback", "zmq"), linked=False) as pair:
        for transport in ("loopback", "ucx"):
            with raw_sender(pair, pair.decode, without={"loopback"}) as raw:
                raw.say(Open(transport, b""))
                pair.until(lambda: pair.decode.lost)
                why = f"transport '{transport}' was not offered"
                assert pair.decode.lost == [(raw.link, why)]
                pair.decode.lost.clear()
        with raw_sender(pair, pair.decode, without={"loopback"}) as raw:
            raw.say(Open("zmq", b""))
            assert raw.hear(1) == [Grant([0, 1, 2, 3])]


@pytest.mark.parametrize("endpoint", ["", "somewhere", "udp://127.0.0.1:1", "tcp://127.0.0.1"])
def test_what_is_no_endpoint_is_refused(endpoint: str) -> None:
    with kv_pair("zmq", linked=False) as pair:
        link = pair.decode.receiver.offer("p0", 1)
        hello = msgspec.structs.replace(hello_of(pair.decode, link), endpoint=endpoint)
        with pytest.raises(TransferError, match="cannot connect to"):
            pair.prefill.sender.connect(hello)


def test_only_open_links_are_watched() -> None:
    with kv_pair("zmq", num_decodes=2, linked=False) as pair:
        watched: list[int] = []
        pair.prefill.sender.watch = watched.append
        pair.prefill.sender.unwatch = watched.remove
        links = [pair.open(pair.prefill, decode) for decode in pair.decodes]
        assert watched == [link.sent.socket.fd for link in links]
        pair.end(links[0])
        assert watched == [links[1].sent.socket.fd]


def test_one_link_too_many_is_refused_by_name() -> None:
    with kv_pair("zmq", num_prefills=3, decode_slots=4, linked=False) as pair:
        first = pair.open(pair.prefills[0], pair.decode)
        pair.open(pair.prefills[1], pair.decode)
        with pytest.raises(TransferError, match=r"2 KV links are open.*PAGEWIRE_STAGING_SLOTS"):
            pair.connect(pair.prefills[2], pair.decode)
        pair.end(first)
        pair.open(pair.prefills[2], pair.decode)
        pair.ask(PROMPT)
        pair.finish()


# Credits


@TRANSPORTS
def test_a_link_opened_while_others_are_idle_gets_its_share(kind: str) -> None:
    with kv_pair(kind, num_prefills=4, decode_slots=12, linked=False) as pair:
        for opened, share in enumerate([12, 6, 4, 3], 1):
            pair.open(pair.prefills[opened - 1], pair.decode)
            pair.until(lambda: idle(pair) == [share] * opened)  # noqa: B023
        for n in range(8):
            pair.ask([n % 7, *PROMPT[:8]])
        pair.finish()


@TRANSPORTS
def test_a_link_opened_while_others_send_gets_its_share(kind: str) -> None:
    with kv_pair(
        kind, num_prefills=2, decode_slots=4, blocks_per_slot=1, linked=False,
        decode={"num_blocks": 64},
    ) as pair:  # fmt: skip
        pair.open(pair.prefill, pair.decode)
        pair.decode.device.has_moved = False
        requests = [pair.ask([n, *PROMPT]) for n in range(3)]
        pair.until(lambda: len(pair.link.sent.credits.in_use) == 4)
        joined = pair.connect(pair.prefills[1], pair.decode)
        pair.until(lambda: joined.received.transport)
        assert idle(pair) == [0, 0]
        pair.decode.device.has_moved = True
        pair.until(lambda: joined.is_tested)
        pair.finish()
        assert idle(pair) == [2, 2]
        assert all(request.tried == [pair.link] for request in requests)


@TRANSPORTS
def test_the_credits_of_a_link_that_ends_go_to_the_others(kind: str) -> None:
    with kv_pair(kind, num_prefills=2, decode_slots=7) as pair:
        pair.until(lambda: idle(pair) == [4, 3])
        pair.end(pair.link)
        pair.until(lambda: idle(pair) == [7])
        pair.ask(PROMPT)
        pair.finish()


@TRANSPORTS
def test_slots_that_may_still_be_written_to_are_used_by_nobody(kind: str) -> None:
    with kv_pair(kind, num_prefills=3, decode_slots=6, linked=False) as pair:
        for prefill in pair.prefills[:2]:
            pair.open(prefill, pair.decode)
        pair.until(lambda: idle(pair) == [3, 3])
        pair.decode.transport.holds_slots = True
        pair.end(pair.link)
        pair.open(pair.prefills[2], pair.decode)
        pair.until(lambda: sum(idle(pair)) == 3)
        pair.ask(PROMPT)
        pair.until(lambda: all(request.is_over for request in pair.requests.values()))
        assert count(pair, StagingSlotState.QUARANTINED) == 3
        assert not pair.decode.core.hooks_busy, "an idle worker waits for it"
        pair.decode.transport.holds_slots = False
        pair.until(lambda: idle(pair) == [3, 3])
        pair.finish()


@TRANSPORTS
def test_a_slot_that_is_read_is_used_by_nobody_after_its_link_has_ended(kind: str) -> None:
    with kv_pair(kind) as pair:
        pair.decode.device.has_moved = False
        request = pair.ask(PROMPT)
        pair.until(lambda: pair.decode.device.moves)
        pair.end(pair.link)
        for _ in range(3):
            pair.step()
        assert count(pair, StagingSlotState.QUARANTINED) == 4
        pair.decode.device.has_moved = True
        pair.finish()
        assert request.is_over
        assert count(pair, StagingSlotState.FREE) == 4


@TRANSPORTS
def test_a_link_whose_test_cannot_be_packed_is_lost_at_once(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with kv_pair(kind, linked=False) as pair:
        monkeypatch.setattr(pair.prefill.device, "pack", Mock(side_effect=BROKEN))
        link = pair.connect(pair.prefill, pair.decode)
        pair.until(lambda: pair.prefill.lost)
        reason = "it cannot be tested: its blocks cannot be packed: the device is broken"
        assert pair.prefill.lost == [(link.sent, reason)]
        assert not pair.prefill.failed


@TRANSPORTS
def test_the_time_for_an_acknowledgement_begins_when_the_segment_is_packed(kind: str) -> None:
    with kv_pair(kind, linked=False) as pair:
        pair.prefill.device.has_moved = False
        link = pair.connect(pair.prefill, pair.decode)
        pair.until(lambda: link.sent.credits.in_use)
        for _ in range(3):  # the device is busy
            pair.clock.now += TIMEOUT_S
            pair.step()
        assert not pair.prefill.lost
        pair.clock.now += 2 * TIMEOUT_S  # this thread was busy
        pair.prefill.device.has_moved = True
        pair.until(lambda: link.is_tested)
        assert not pair.prefill.lost


@TRANSPORTS
def test_a_link_whose_segment_cannot_be_sent_is_lost_with_its_credits(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with kv_pair(kind) as pair:
        link = pair.link.sent
        monkeypatch.setattr(link.outbound, "send", Mock(side_effect=BROKEN))
        pair.ask(PROMPT)
        pair.until(lambda: pair.prefill.lost)
        reason = "a KV segment cannot be sent: the device is broken"
        assert pair.prefill.lost == [(link, reason)]
        assert pair.prefill.slots.count(StagingSlotState.FREE) == pair.prefill.staging.num_slots
