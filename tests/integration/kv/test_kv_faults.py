"""What goes wrong with the blocks of one job, and who notices."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pagewire.shared.engine.scheduling.status import RequestStatus
from pagewire.tests.support.kv_pair import KvPair, Request, kv_pair
from pagewire.tests.support.kv_sides import TRANSPORTS

pytestmark = pytest.mark.timeout(30)
PROMPT = [n * n % 7 for n in range(18)]  # 4 full blocks and 2 tokens
LARGE = {"num_blocks": 64, "max_num_batched_tokens": 64}


# Corrupt payloads


@TRANSPORTS
@pytest.mark.parametrize("divided_bytes", [0, 1 << 20], ids=["divided", "whole"])
@pytest.mark.parametrize("num_corrupt", [1, 2])  # a segment that is corrupt a third time fails
def test_a_corrupt_segment_is_sent_again(kind: str, divided_bytes: int, num_corrupt: int) -> None:
    with kv_pair(kind, divided_bytes=divided_bytes, prefill_slots=8, prefill=LARGE) as pair:
        pair.prefill.transport.num_corrupt = num_corrupt
        request = pair.ask(PROMPT)
        pair.finish()
        assert len(request.tried) == 1
        assert pair.decode.receiver.stats.outcomes["corrupt"] == num_corrupt
        assert pair.prefill.sender.stats.outcomes["corrupt"] == num_corrupt
        assert pair.prefill.sender.stats.resends == num_corrupt


@TRANSPORTS
def test_a_job_whose_segment_is_always_corrupt_fails_and_another_one_succeeds(kind: str) -> None:
    with kv_pair(kind, num_prefills=2) as pair:
        pair.prefill.transport.num_corrupt = 1 << 30
        request = pair.ask(PROMPT)
        pair.finish()
        assert [link.prefill.name for link in request.tried] == ["p0", "p1"]
        (reason,) = pair.prefill.failed.values()
        assert reason == "a KV segment arrived corrupt 3 times"
        assert pair.decode.device.batches[0] == (1, 1), "it was computed here"


@TRANSPORTS
def test_without_another_worker_the_decode_worker_computes_it(kind: str) -> None:
    with kv_pair(kind) as pair:
        pair.prefill.transport.num_corrupt = 1 << 30
        pair.ask(PROMPT)
        pair.finish()
        assert pair.decode.device.batches[0] != (1, 1)
        pair.prefill.transport.num_corrupt = 0
        request = pair.ask(PROMPT[::-1])
        pair.finish()
        assert len(request.tried) == 1


# Packing and unpacking that fail


@TRANSPORTS
def test_packing_that_fails_fails_its_job_and_no_other(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    with kv_pair(kind, blocks_per_slot=1) as pair:
        pair.starts_jobs = False
        request, other = pair.ask(PROMPT), pair.ask(PROMPT[::-1])
        pair.until(lambda: other.job)
        pair.prefill.device.fails_to_move = RuntimeError("device on fire")
        for each in (request, other):
            pair.start(each, each.job, pair.link)
        failed = request.job
        pair.step(pair.prefill)
        assert "device on fire" in caplog.text
        assert pair.prefill.failed == {failed: "its blocks cannot be packed: device on fire"}
        pair.until(lambda: other.is_over)
        assert len(pair.prefill.device.moved) == 5  # nothing more of the failed job
        pair.starts_jobs = True
        pair.retry(request)
        pair.finish()


@TRANSPORTS
def test_unpacking_that_fails_costs_a_resend(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    with kv_pair(kind) as pair:
        pair.decode.device.fails_to_move = RuntimeError("device on fire")
        request = pair.ask(PROMPT)
        pair.finish()
        assert "device on fire" in caplog.text
        assert (len(request.tried), pair.prefill.sender.stats.resends) == (1, 1)


@TRANSPORTS
@pytest.mark.parametrize("where", ["fail_execute", "fail_wait"])
def test_a_job_whose_step_failed_is_computed_elsewhere(
    kind: str, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    with kv_pair(kind, num_prefills=2, prefill={"max_num_batched_tokens": 8}) as pair:
        request = pair.ask(PROMPT)
        pair.until(lambda: pair.prefill.device.moved)
        setattr(pair.prefill.device, where, RuntimeError("device on fire"))
        pair.finish()
        assert [link.prefill.name for link in request.tried] == ["p0", "p1"]


# Requests that end


def while_queued(pair: KvPair, request: Request) -> bool:
    return bool(request.tried)


def while_packed(pair: KvPair, request: Request) -> bool:
    pair.prefill.device.has_moved = False
    return bool(pair.prefill.device.moves)


def while_written(pair: KvPair, request: Request) -> bool:
    pair.prefill.transport.holds_writes = True
    return pair.decode.receiver.stats.outcomes["ok"] > 0


def while_announced(pair: KvPair, request: Request) -> bool:
    pair.decode.transport.holds_payloads = True
    return pair.decode.is_receiving


def while_unpacked(pair: KvPair, request: Request) -> bool:
    pair.decode.device.has_moved = False
    return bool(pair.decode.device.moves)


def while_corrupt(pair: KvPair, request: Request) -> bool:
    pair.prefill.transport.num_corrupt = 1
    return pair.decode.receiver.stats.outcomes["corrupt"] > 0


def while_waiting_for_credits(pair: KvPair, request: Request) -> bool:
    pair.decode.device.has_moved = False
    return not pair.link.sent.credits.idle


def when_all_is_sent(pair: KvPair, request: Request) -> bool:
    return bool(request.tokens)


POINTS = [
    while_queued,
    while_packed,
    while_written,
    while_announced,
    while_unpacked,
    while_corrupt,
    while_waiting_for_credits,
    when_all_is_sent,
]


@TRANSPORTS
@pytest.mark.parametrize("reach", POINTS)
@pytest.mark.parametrize("divided_bytes", [0, 1 << 20], ids=["divided", "whole"])
def test_a_request_aborted_at_any_point_leaves_nothing(
    kind: str, reach: Callable[[KvPair, Request], bool], divided_bytes: int
) -> None:
    with kv_pair(kind, blocks_per_slot=1, divided_bytes=divided_bytes) as pair:
        request = pair.ask(PROMPT)
        pair.until(lambda: reach(pair, request))
        pair.abort(request)
        heir = pair.ask([5] * 40, max_tokens=20)
        for _ in range(3):
            pair.step()
        pair.let_go()
        pair.finish()
        assert len(heir.tried) == 1


@TRANSPORTS
def test_blocks_of_a_request_that_ends_stay_pinned_while_they_are_written(kind: str) -> None:
    with kv_pair(kind, blocks_per_slot=8, prefill=LARGE) as pair:
        pair.decode.device.has_moved = False
        request = pair.ask(PROMPT)
        pair.until(lambda: pair.decode.device.moves)
        pair.abort(request)
        heir = pair.decode.add("heir", [5] * 40, max_tokens=20)
        pair.step(pair.decode)
        assert heir.status is RequestStatus.RUNNING
        assert pair.decode.core.scheduler.pool.counts().used == 5 + 10
        pair.step(pair.decode)
        pair.decode.device.has_moved = True
        pair.until(lambda: heir.is_finished)
        pair.finish()
        assert heir.token_ids[40:] == heir.token_ids[40:][:20]


def end_by_abort(pair: KvPair, request: Request) -> None:
    pair.abort(request)


def end_by_local_prefill(pair: KvPair, request: Request) -> None:
    pair.decode.core.sequences.recompute_locally(request.sequence, next(iter(request.tokens), None))


@TRANSPORTS
@pytest.mark.parametrize("end", [end_by_abort, end_by_local_prefill])
@pytest.mark.parametrize("has_stepped", [False, True])
def test_late_segments_of_a_request_that_has_ended_are_dropped(
    kind: str, end: Callable[[KvPair, Request], None], has_stepped: bool
) -> None:
    with kv_pair(kind) as pair:
        pair.starts_jobs = False
        request = pair.ask(PROMPT)
        pair.until(lambda: request.job)
        pair.start(request, request.job, pair.link)
        pair.until(lambda: pair.link.sent.sent, pair.prefill)
        request.job = ""
        end(pair, request)
        if has_stepped:
            pair.step(pair.decode)
        pair.until(lambda: pair.decode.receiver.stats.outcomes["dropped"] == 3)
        pair.finish()
        assert pair.prefill.sender.stats.outcomes == {"dropped": 3}


@TRANSPORTS
@pytest.mark.parametrize("has_moved", [False, True], ids=["unpacking", "unpacked"])
def test_segments_of_an_earlier_job_do_not_count(kind: str, has_moved: bool) -> None:
    with kv_pair(kind, num_prefills=2, blocks_per_slot=1) as pair:
        first, second = pair.links
        pair.starts_jobs = False
        request = pair.ask(PROMPT)
        pair.until(lambda: request.job)
        pair.start(request, request.job, first)
        pair.decode.device.has_moved = has_moved
        pair.until(lambda: pair.decode.device.moves or pair.decode.receiver.stats.outcomes["ok"])
        request.job = ""  # the first worker's token comes to nothing, and it goes on sending
        assert request.blocks is not None
        request.blocks = pair.decode.receiver.jobs.retry(request.blocks)
        sending = first.prefill.core.scheduler.table.awaiting_send
        pair.until(lambda: len(sending) == 1 or not first.prefill.held())
        pair.start(request, request.blocks.name, second)
        pair.decode.device.has_moved = True
        pair.until(lambda: request.is_over)
        pair.finish()
        outcomes = pair.decode.receiver.stats.outcomes
        assert outcomes["ok"] + outcomes["dropped"] == 10 and outcomes["ok"] >= 5


@TRANSPORTS
def test_a_job_is_silent_until_something_of_it_comes(kind: str) -> None:
    with kv_pair(kind, blocks_per_slot=1) as pair:
        jobs = pair.decode.receiver.jobs
        assert not jobs.any_active_since(pair.clock.now)
        pair.starts_jobs = False
        request = pair.ask(PROMPT)
        pair.until(lambda: request.job)
        reserved_s = pair.clock.now
        pair.clock.now += 1
        pair.step()
        assert jobs.any_active_since(reserved_s)
        assert not jobs.any_active_since(reserved_s + 0.5)
        pair.decode.device.has_moved = False
        pair.start(request, request.job, pair.link)
        pair.until(lambda: pair.decode.device.moves)
        assert jobs.any_active_since(pair.clock.now)
        pair.decode.device.has_moved = True
        pair.finish()
        assert not jobs.any_active_since(0)
