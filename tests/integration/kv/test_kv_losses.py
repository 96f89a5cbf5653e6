"""Links end: by themselves, from either side, at any point."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pagewire.shared.transfer.endpoint.credits import StagingSlotState
from pagewire.tests.support.fake_engine import make_sequence
from pagewire.tests.support.kv_pair import KvPair, Request, kv_pair
from pagewire.tests.support.kv_sides import TIMEOUT_S, TRANSPORTS

pytestmark = pytest.mark.timeout(30)
PROMPT = [n * n % 7 for n in range(18)]  # 4 full blocks and 2 tokens


def begin(pair: KvPair, request: Request) -> None:
    """Start a job over a link that is tested."""
    pair.until(lambda: pair.link.is_tested and not pair.link.sent.credits.in_use)
    pair.start(request, request.job, pair.link)


# Where a link may be


def before_the_grant(pair: KvPair, request: Request) -> None:
    pass


def while_the_test_is_packed(pair: KvPair, request: Request) -> None:
    pair.prefill.device.has_moved = False
    pair.until(lambda: pair.prefill.device.moves)


def while_the_test_is_read(pair: KvPair, request: Request) -> None:
    pair.decode.device.has_moved = False
    pair.until(lambda: pair.decode.device.moves)


def while_idle(pair: KvPair, request: Request) -> None:
    pair.until(lambda: pair.link.is_tested and not pair.link.sent.credits.in_use)


def while_computing(pair: KvPair, request: Request) -> None:
    begin(pair, request)


def while_packing(pair: KvPair, request: Request) -> None:
    begin(pair, request)
    pair.prefill.device.has_moved = False
    pair.until(lambda: pair.prefill.device.moves)


def while_writing(pair: KvPair, request: Request) -> None:
    begin(pair, request)
    pair.prefill.transport.holds_writes = True
    pair.until(lambda: pair.decode.receiver.stats.outcomes["ok"])


def while_announced(pair: KvPair, request: Request) -> None:
    begin(pair, request)
    pair.until(lambda: pair.link.sent.sent, pair.prefill)


def while_a_payload_is_awaited(pair: KvPair, request: Request) -> None:
    begin(pair, request)
    pair.decode.transport.holds_payloads = True
    pair.until(lambda: pair.decode.is_receiving)


def while_unpacking(pair: KvPair, request: Request) -> None:
    begin(pair, request)
    pair.decode.device.has_moved = False
    pair.until(lambda: pair.decode.device.moves)


def while_acknowledged(pair: KvPair, request: Request) -> None:
    while_announced(pair, request)
    pair.until(lambda: pair.decode.receiver.stats.outcomes["ok"], pair.decode)


def while_sending_again(pair: KvPair, request: Request) -> None:
    begin(pair, request)
    pair.prefill.transport.num_corrupt = 2
    pair.until(lambda: pair.prefill.sender.stats.resends)


def while_the_sequence_runs(pair: KvPair, request: Request) -> None:
    begin(pair, request)
    pair.until(lambda: len(request.tokens) > 1)


POINTS = [
    before_the_grant,
    while_the_test_is_packed,
    while_the_test_is_read,
    while_idle,
    while_computing,
    while_packing,
    while_writing,
    while_announced,
    while_a_payload_is_awaited,
    while_unpacking,
    while_acknowledged,
    while_sending_again,
    while_the_sequence_runs,
]
Point = Callable[[KvPair, Request], None]


def sender_closes(pair: KvPair) -> None:
    pair.prefill.sender.close(pair.link.sent)


def receiver_closes(pair: KvPair) -> None:
    pair.decode.receiver.close(pair.link.received)


def sender_dies(pair: KvPair) -> None:
    pair.prefill.close()


def receiver_dies(pair: KvPair) -> None:
    pair.decode.close()


@TRANSPORTS
@pytest.mark.parametrize("reach", POINTS)
@pytest.mark.parametrize("end", [sender_closes, receiver_closes, sender_dies, receiver_dies])
def test_a_link_lost_at_any_point_leaves_nothing(
    kind: str, reach: Point, end: Callable[[KvPair], None]
) -> None:
    with kv_pair(kind, blocks_per_slot=1, linked=False, prefill={"num_blocks": 24}) as pair:
        request = pair.ask(PROMPT)
        pair.starts_jobs = False
        pair.until(lambda: request.job)
        link = pair.connect(pair.prefill, pair.decode)
        reach(pair, request)
        pair.reports_losses = False
        end(pair)
        # The other side does not know.
        for _ in range(3):
            pair.step()
        pair.let_go()
        pair.step()
        if end is sender_closes:
            pair.until(lambda: not pair.prefill.held(), pair.prefill)
        if end is receiver_closes:
            pair.until(lambda: pair.decode.slots.count(StagingSlotState.FREE) == 4)
        pair.clock.now += TIMEOUT_S + 1
        pair.step()
        if end in (receiver_closes, receiver_dies) and link.sent.sent:
            pair.until(lambda: _is_lost_by(pair))
        # Now it does.
        pair.reports_losses = pair.starts_jobs = True
        pair.end(link)
        if not request.tried:
            pair.retry(request)
        if end is receiver_dies:
            pair.until(lambda: not pair.prefill.held())
        else:
            pair.finish()
            assert pair.decode.slots.count(StagingSlotState.FREE) == 4
        assert [side.transport.num_open for side in pair.sides] == [0, 0]


def _is_lost_by(pair: KvPair) -> bool:
    pair.clock.now += TIMEOUT_S / 2  # segments that were sent meanwhile have their time, too
    return not len(pair.prefill.sender.links)


@TRANSPORTS
def test_a_sender_that_is_gone_is_noticed_by_what_is_sent_to_it(kind: str) -> None:
    with kv_pair(kind, num_prefills=2, linked=False) as pair:
        gone = pair.open(pair.prefill, pair.decode)
        pair.reports_losses = False
        pair.prefill.close()
        for _ in range(100):  # what is sent before the connection's end is seen is lost
            other = pair.connect(pair.prefills[1], pair.decode)  # takes credits from the first one
            pair.until(lambda: other.received.transport)  # noqa: B023
            pair.end(other)
            if pair.decode.lost:
                break
        ((link, reason),) = pair.decode.lost
        assert link is gone.received
        assert reason.startswith("the sender cannot be reached: ")


@TRANSPORTS
def test_a_receiver_that_is_silent_is_lost_in_its_time_and_not_before(kind: str) -> None:
    with kv_pair(kind) as pair:
        request = pair.ask(PROMPT)
        pair.starts_jobs = False
        pair.until(lambda: request.job)
        pair.start(request, request.job, pair.link)
        pair.clock.now += 100 * TIMEOUT_S  # nothing was sent so far
        pair.until(lambda: len(pair.link.sent.sent) == 3, pair.prefill)
        link = pair.link
        pair.clock.now += TIMEOUT_S - 0.2
        pair.step(pair.prefill)
        assert pair.prefill.lost == []
        pair.clock.now += 0.4
        pair.step(pair.prefill)
        reason = f"a KV segment was not acknowledged in {TIMEOUT_S:g} s"
        assert pair.prefill.lost == [(link.sent, reason)]
        assert list(pair.prefill.failed.values()) == ["the KV link is gone"]
        assert pair.prefill.sender.stats.outcomes["lost"] == 3
        assert pair.prefill.sender.stats.lost_links == 1
        pair.starts_jobs = True
        pair.finish()


@TRANSPORTS
def test_payloads_of_a_link_that_has_ended_are_not_awaited(kind: str) -> None:
    with kv_pair(kind) as pair:
        pair.decode.transport.holds_payloads = True
        pair.ask(PROMPT)
        pair.until(lambda: pair.decode.is_receiving)
        pair.decode.receiver.close(pair.link.received)
        pair.step(pair.decode)
        assert not pair.decode.is_receiving
        pair.end(pair.link)
        pair.finish()


@TRANSPORTS
@pytest.mark.parametrize("where", ["send", "sent", "receive"])
def test_a_transport_that_fails_ends_its_link_and_no_other(kind: str, where: str) -> None:
    with kv_pair(kind, num_prefills=2) as pair:
        side = pair.decode if where == "receive" else pair.prefill
        side.transport.fails = where
        request = pair.ask(PROMPT)
        pair.finish()
        ((_, reason),) = side.lost
        assert reason.endswith("the wire is cut")
        assert [link.prefill.name for link in request.tried] == ["p0", "p1"]
        assert [link.prefill.name for link in pair.links] == ["p1"]
        pair.open(pair.prefill, pair.decode)
        pair.ask(PROMPT[::-1])
        pair.finish()


@TRANSPORTS
def test_a_worker_that_restarts_is_linked_again(kind: str) -> None:
    with kv_pair(kind, num_prefills=2) as pair:
        pair.decode.device.has_moved = False
        request = pair.ask(PROMPT)
        pair.until(lambda: pair.decode.device.moves)
        pair.kill(pair.prefill)
        pair.decode.device.has_moved = True
        pair.finish()
        assert [link.prefill.name for link in request.tried] == ["p0", "p1"]


@pytest.mark.parametrize("end", ["cancelled", "link closed"])
def test_a_job_whose_receiver_has_all_blocks_ends_before_its_first_token(end: str) -> None:
    with kv_pair("loopback") as pair:
        sender, core, link = pair.prefill.sender, pair.prefill.core, pair.link.sent
        core.sequences.add(make_sequence("job", list(range(12)), prefill_only=True))
        sender.export("job", link, first_block=3, num_blocks=3)
        pair.prefill.endpoint.after_launch(None)
        assert (sender.num_jobs, core.sequences.get("job") is None) == (1, False)
        if end == "cancelled":
            sender.cancel("job", link)
        else:
            sender.close(link)
        assert (sender.num_jobs, core.sequences.get("job")) == (0, None)
