"""Blocks cross from a prefill engine to a decode engine, and nothing goes wrong."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewire.shared.engine.scheduling.sequence import Sequence
from pagewire.shared.engine.scheduling.status import RequestStatus
from pagewire.shared.engine.scheduling.step import StepPlan, Withdraw
from pagewire.shared.kv.packing import packed_bytes
from pagewire.shared.transfer.endpoint.receiver_link import ReceiverLink
from pagewire.shared.transfer.endpoint.sender import DIVIDED_BYTES
from pagewire.tests.support.fake_device import FakeDevice
from pagewire.tests.support.kv_pair import KvPair, kv_pair
from pagewire.tests.support.kv_sides import BLOCK_SIZE, KINDS, LAYOUT, TRANSPORTS

pytestmark = pytest.mark.timeout(30)
PROMPT = [n * n % 7 for n in range(18)]  # 4 full blocks and 2 tokens
LONG = [n * n % 7 for n in range(70)]  # 18 blocks
LARGE = {"num_blocks": 64, "max_num_batched_tokens": 64}


def packed(pair: KvPair) -> list[tuple[int, list[int]]]:
    """How many blocks were packed each time, and which layer groups of them."""
    return [(len(blocks), list(groups)) for blocks, groups, _ in pair.prefill.device.moved]


def warm(pair: KvPair, request: str, prompt: list[int]) -> None:
    """Let both engines have a prompt in their caches."""
    for side in (pair.prefill, pair.decode):
        sequence = side.add(request, prompt, max_tokens=1)
        pair.until(lambda sequence=sequence: sequence.is_finished)


@TRANSPORTS
@pytest.mark.parametrize("overlap", [False, True], ids=["serial", "overlap"])
def test_a_prompt_crosses_and_the_sequence_ends_with_its_tokens(kind: str, overlap: bool) -> None:
    with kv_pair(kind, prefill={"overlap": overlap}, decode={"overlap": overlap}) as pair:
        request = pair.ask(PROMPT)
        pair.finish()
        assert [link.prefill.name for link in request.tried] == ["p0"]
        assert pair.prefill.sender.stats.outcomes == {"ok": 3}
        assert pair.decode.receiver.stats.outcomes == {"ok": 3}
        assert pair.decode.device.batches[0] == (1, 1), "the prompt was computed twice"
        nbytes = pair.decode.receiver.stats.bytes["p0", kind]
        assert nbytes == pair.prefill.sender.stats.bytes["d0", kind] > packed_bytes(LAYOUT, 5)


@TRANSPORTS
def test_blocks_leave_while_later_chunks_compute(kind: str) -> None:
    with kv_pair(kind, prefill={"max_num_batched_tokens": 6}) as pair:
        request = pair.ask(PROMPT)
        pair.until(lambda: request.tried)
        seen = []
        for _ in range(3):
            pair.step(pair.prefill)
            seen.append(packed(pair)[-1])
        assert seen == [(1, [0, 1]), (2, [0, 1]), (2, [0, 1])]
        pair.finish()


@TRANSPORTS
@pytest.mark.parametrize("num_cached", [4, 11, 17])
def test_blocks_that_are_there_do_not_cross(kind: str, num_cached: int) -> None:
    with kv_pair(kind) as pair:
        warm(pair, "warms", PROMPT[:num_cached])
        pair.prefill.core.scheduler.pool.drop_cache()
        request = pair.ask(PROMPT)
        pair.finish()
        assert request.positions == range(num_cached // BLOCK_SIZE, 5)
        assert sum(count for count, _ in packed(pair)) == len(request.positions)


@TRANSPORTS
def test_cached_blocks_of_the_prefill_side_leave_with_its_first_step(kind: str) -> None:
    with kv_pair(kind, blocks_per_slot=8, prefill={"max_num_batched_tokens": 4}) as pair:
        warm(pair, "warms", PROMPT[:12])
        pair.decode.core.scheduler.pool.drop_cache()
        request = pair.ask(PROMPT)
        pair.until(lambda: request.tried)
        pair.step(pair.prefill)
        assert packed(pair) == [(4, [0, 1])]
        pair.finish()


@TRANSPORTS
@pytest.mark.parametrize("later", [False, True], ids=["token-last", "token-first"])
def test_first_token_and_blocks_come_in_either_order(kind: str, later: bool) -> None:
    with kv_pair(kind) as pair:
        pair.decode.device.has_moved = not later
        request = pair.ask(PROMPT)
        pair.until(lambda: request.tokens or not later)
        pair.decode.device.has_moved = True
        pair.finish()


@TRANSPORTS
def test_the_loop_goes_on_at_once_after_the_last_segment(kind: str) -> None:
    with kv_pair(kind, blocks_per_slot=8, prefill=LARGE) as pair:
        pair.decode.device.has_moved = False
        request = pair.ask(PROMPT)
        pair.until(lambda: request.tokens and pair.decode.is_receiving)
        assert not pair.decode.core.poll()
        pair.decode.device.has_moved = True
        assert pair.decode.core.poll()
        pair.step(pair.decode)
        assert (pair.decode.worked, request.sequence.status) == (True, RequestStatus.RUNNING)
        pair.finish()


# By layer group


@TRANSPORTS
def test_the_last_chunk_leaves_by_layer_group(kind: str) -> None:
    engine = {"max_num_batched_tokens": 8}
    with kv_pair(kind, divided_bytes=0, prefill_slots=8, prefill=engine) as pair:
        pair.ask(PROMPT)
        pair.finish()
        assert packed(pair) == [(2, [0, 1]), (2, [0, 1]), (1, [0]), (1, [1])]


@TRANSPORTS
def test_a_group_of_more_blocks_than_fit_a_slot_fills_whole_slots(kind: str) -> None:
    with kv_pair(kind, divided_bytes=0, prefill_slots=8, prefill=LARGE) as pair:
        pair.ask(PROMPT)
        pair.finish()
        assert packed(pair) == [(4, [0]), (1, [0]), (4, [1]), (1, [1])]


@pytest.mark.parametrize(("bound", "groups"), [(4, [[0], [1]]), (5, [[0, 1]])])
def test_only_a_last_chunk_above_the_bound_is_divided(bound: int, groups: list[list[int]]) -> None:
    divided = bound * LAYOUT.block_bytes
    with kv_pair("zmq", blocks_per_slot=8, divided_bytes=divided, prefill=LARGE) as pair:
        pair.ask(PROMPT)
        pair.finish()
        assert packed(pair) == [(5, group) for group in groups]


def test_blocks_of_a_step_of_which_only_the_end_is_known_leave_whole() -> None:
    with kv_pair("zmq", divided_bytes=0, prefill=LARGE) as pair:
        pair.prefill.device.replays = True
        pair.ask(PROMPT)
        pair.finish()
        assert packed(pair) == [(2, [0, 1]), (2, [0, 1]), (1, [0, 1])]


# Staging slots and credits


@TRANSPORTS
@pytest.mark.parametrize(("ours", "theirs"), [(1, 2), (1, 8), (8, 2)])
@pytest.mark.parametrize("divided_bytes", [0, DIVIDED_BYTES], ids=["divided", "whole"])
def test_a_long_prompt_crosses_few_slots(
    kind: str, ours: int, theirs: int, divided_bytes: int
) -> None:
    slots = {"prefill_slots": ours, "decode_slots": theirs, "divided_bytes": divided_bytes}
    with kv_pair(kind, **slots, blocks_per_slot=1, prefill=LARGE, decode=LARGE) as pair:
        pair.ask(LONG)
        pair.finish()


@TRANSPORTS
def test_segments_fit_the_smaller_slots_of_both_sides(kind: str) -> None:
    with kv_pair(kind, blocks_per_slot=4, linked=False) as pair:
        pair.decode.staging.slot_bytes = packed_bytes(LAYOUT, 2) + 7
        pair.open(pair.prefill, pair.decode)
        pair.ask(PROMPT)
        pair.finish()
        assert [count for count, _ in packed(pair)] == [2, 2, 1]


@TRANSPORTS
def test_more_jobs_than_slots_and_credits(kind: str) -> None:
    few = {"prefill_slots": 2, "decode_slots": 2, "blocks_per_slot": 1}
    with kv_pair(kind, **few, prefill=LARGE, decode={"num_blocks": 64}) as pair:
        for n in range(9):
            pair.ask([n % 7, *PROMPT])
        pair.finish()


@TRANSPORTS
def test_a_job_that_has_no_slot_does_not_make_the_loop_poll(kind: str) -> None:
    with kv_pair(kind, prefill_slots=1, blocks_per_slot=1) as pair:
        pair.decode.device.has_moved = False
        pair.ask(LONG[:60])
        # All credits are in use, and none comes back.
        pair.until(
            lambda: len(pair.link.sent.credits.in_use) == 4 and not pair.prefill.core.has_work
        )
        pair.until(lambda: not pair.prefill.core.hooks_busy, pair.prefill)
        assert pair.prefill.held()
        pair.decode.device.has_moved = True
        pair.finish()


@TRANSPORTS
def test_jobs_of_several_links_share_the_slots(kind: str) -> None:
    few = {"prefill_slots": 2, "decode_slots": 4, "blocks_per_slot": 1}
    large = {"prefill": LARGE, "decode": {"num_blocks": 64}}
    with kv_pair(kind, num_prefills=2, num_decodes=2, **few, **large) as pair:
        requests = [pair.ask([n % 7, *LONG[:40]], pair.decodes[n % 2]) for n in range(6)]
        pair.finish()
        assert not any(request.sequence.spec.seed for request in requests)
        assert {link.prefill.name for r in requests for link in r.tried} == {"p0"}


@TRANSPORTS
def test_a_receiver_that_does_not_answer_takes_nothing_from_others(kind: str) -> None:
    few = {"prefill_slots": 2, "decode_slots": 8, "blocks_per_slot": 1}
    large = {"prefill": LARGE, "decode": {"num_blocks": 64}}
    with kv_pair(kind, num_decodes=2, **few, **large) as pair:
        frozen, other = pair.decodes
        stuck = pair.ask(LONG[:40], frozen)
        pair.until(lambda: stuck.tried)
        going = pair.ask(LONG, other)
        pair.until(lambda: going.is_over, pair.prefill, other)
        assert not stuck.is_over
        pair.finish()


def test_a_write_that_does_not_end_leaves_slots_to_other_links() -> None:
    with kv_pair("zmq", num_decodes=2, prefill_slots=3, decode_slots=8, blocks_per_slot=1) as pair:
        transport = pair.prefill.transport
        transport.holds_writes = True
        stuck = pair.ask(PROMPT, pair.decodes[0])
        pair.until(lambda: pair.decodes[0].receiver.stats.outcomes["ok"])
        pair.until(lambda: not pair.prefill.sender.poll())
        assert pair.prefill.slots.num_idle == 1
        going = pair.ask(PROMPT, pair.decodes[1])
        pair.until(lambda: pair.decodes[1].receiver.stats.outcomes["ok"])
        assert not stuck.is_over and not going.is_over
        transport.holds_writes = False
        pair.finish()


def test_a_slot_that_is_free_again_is_noticed_at_once() -> None:
    with kv_pair("zmq", prefill_slots=1) as pair:
        pair.prefill.transport.holds_writes = True
        pair.ask(PROMPT)
        pair.until(lambda: pair.decode.receiver.stats.outcomes["ok"])
        pair.until(lambda: not pair.prefill.core.poll())
        assert pair.prefill.core.hooks_busy
        pair.prefill.transport.holds_writes = False
        assert pair.prefill.core.poll()
        pair.finish()


# Preemption


def start_alongside(pair: KvPair, num_tokens: int, num_steps: int) -> Sequence:
    """Start a job alongside a sequence that is going to take its blocks."""
    pair.starts_jobs = False
    request = pair.ask(PROMPT)
    pair.until(lambda: request.job)
    pair.prefill.add("talks", [1] * 7, max_tokens=num_tokens)
    for _ in range(num_steps):
        pair.step(pair.prefill)
    return pair.start(request, request.job, pair.link)


@TRANSPORTS
def test_a_preempted_job_sends_no_block_twice(kind: str) -> None:
    engine = {"num_blocks": 7, "max_num_batched_tokens": 5}
    with kv_pair(kind, prefill=engine) as pair:
        start_alongside(pair, 6, 2)
        pair.finish()
        assert pair.prefill.core.scheduler.table.num_preemptions == 1
        nbytes = pair.prefill.sender.stats.bytes["d0", kind] - packed_bytes(LAYOUT, 2)  # the test
        assert nbytes == packed_bytes(LAYOUT, 5)
        assert set(pair.decode.receiver.stats.outcomes) == {"ok"}


@TRANSPORTS
@pytest.mark.parametrize("divided_bytes", [0, DIVIDED_BYTES], ids=["divided", "whole"])
def test_blocks_that_are_lost_while_they_are_packed_arrive_as_they_were(
    kind: str, divided_bytes: int
) -> None:
    engine = {"num_blocks": 7, "max_num_batched_tokens": 5, "caching": False}
    with kv_pair(kind, prefill=engine, divided_bytes=divided_bytes) as pair:
        pair.prefill.device.has_moved = False
        start_alongside(pair, 6, 2)
        pair.until(lambda: pair.prefill.core.scheduler.table.num_preemptions)
        pair.prefill.device.has_moved = True
        pair.finish()
        nbytes = pair.prefill.sender.stats.bytes["d0", kind] - packed_bytes(LAYOUT, 2)  # the test
        assert nbytes == packed_bytes(LAYOUT, 5)
        assert set(pair.decode.receiver.stats.outcomes) == {"ok"}


class FailsToWithdraw:
    """A step hook: the first plan that takes blocks away cannot be launched."""

    def __init__(self, device: FakeDevice) -> None:
        self.device, self.num_packed = device, -1

    def before_launch(self, plan: StepPlan) -> None:
        if self.num_packed < 0 and any(isinstance(work, Withdraw) for work in plan.kv):
            self.num_packed = len(self.device.moved)
            self.device.fail_execute = RuntimeError("the device is broken")
            self.device.has_moved = True  # so there is a free staging slot

    def after_launch(self, plan: StepPlan | None) -> bool:
        return False

    def poll(self) -> bool:
        return False


@TRANSPORTS
def test_lost_blocks_are_not_packed_after_a_plan_that_was_not_launched(kind: str) -> None:
    engine = {"num_blocks": 7, "max_num_batched_tokens": 9, "caching": False}
    sizes = {"prefill_slots": 1, "blocks_per_slot": 1}
    with kv_pair(kind, prefill=engine, more_hooks=[FailsToWithdraw], **sizes) as pair:
        device, hook = pair.prefill.device, pair.prefill.core.hooks[1]
        assert isinstance(hook, FailsToWithdraw)
        device.has_moved = False  # the job's second block waits for a staging slot
        start_alongside(pair, 9, 1)
        pair.until(lambda: hook.num_packed >= 0)
        last_plan = max(after for _, _, after in device.moved[: hook.num_packed])
        pair.finish()
        assert all(after > last_plan for _, _, after in device.moved[hook.num_packed :])


@TRANSPORTS
def test_a_credit_is_in_use_until_the_payload_of_an_ended_job_has_come(kind: str) -> None:
    with kv_pair(kind) as pair:
        pair.prefill.device.has_moved = False
        request = pair.ask(PROMPT)
        pair.until(lambda: packed(pair))
        pair.decode.transport.holds_payloads = True
        credits = pair.link.sent.credits
        pair.abort(request)
        pair.until(lambda: not pair.prefill.sender.num_jobs)
        pair.prefill.device.has_moved = True
        for _ in range(10):
            pair.step()
        assert credits.in_use
        pair.decode.transport.holds_payloads = False
        pair.until(lambda: not credits.in_use)
        assert set(pair.decode.receiver.stats.outcomes) == {"dropped"}


@TRANSPORTS
def test_a_transport_that_cannot_be_opened_by_the_receiver_is_known(kind: str) -> None:
    with kv_pair(kind, linked=False) as pair:
        pair.decode.transport.fails = "inbound"
        pair.connect(pair.prefill, pair.decode)
        pair.until(lambda: pair.decode.lost)
        ((link, reason),) = pair.decode.lost
        assert isinstance(link, ReceiverLink)
        assert (link.transport, reason) == (kind, "the wire is cut")


@TRANSPORTS
@pytest.mark.parametrize("replays", [False, True], ids=["launched", "replayed"])
@pytest.mark.parametrize("num_sent", [1, 2, 3])
def test_a_job_preempted_between_its_groups_sends_the_rest(
    kind: str, num_sent: int, replays: bool
) -> None:
    engine = {"num_blocks": 7, "max_num_batched_tokens": 32, "overlap": True}
    with kv_pair(kind, prefill=engine, prefill_slots=1, divided_bytes=0) as pair:
        sequence = start_alongside(pair, 3, 1)
        pair.step(pair.prefill)  # launched, and not read yet
        send = pair.prefill.endpoint.after_launch
        pair.until(lambda: send(None) or len(packed(pair)) >= num_sent, pair.decode)
        pair.prefill.device.replays = replays
        pair.until(lambda: sequence.is_finished)
        pair.finish()
        assert set(pair.decode.receiver.stats.outcomes) == {"ok"}


# Everything at once


@pytest.mark.timeout(600)  # for a thousand examples
@given(
    kind=st.sampled_from(KINDS),
    slots=st.tuples(st.integers(1, 3), st.integers(2, 5), st.integers(1, 3)),
    chunk=st.integers(1, 9),
    overlap=st.booleans(),
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=5),
    num_cached=st.integers(0, 20),
    divided_bytes=st.sampled_from([0, 3 * LAYOUT.block_bytes, DIVIDED_BYTES]),
)
def test_every_block_comes_once_however_scarce_slots_are(
    kind: str,
    slots: tuple[int, int, int],
    chunk: int,
    overlap: bool,
    lengths: list[int],
    num_cached: int,
    divided_bytes: int,
) -> None:
    ours, theirs, blocks_per_slot = slots
    with kv_pair(
        kind,
        prefill_slots=ours,
        decode_slots=theirs,
        blocks_per_slot=blocks_per_slot,
        divided_bytes=divided_bytes,
        prefill={"num_blocks": 12, "max_num_batched_tokens": chunk, "overlap": overlap},
        decode={"num_blocks": 24, "overlap": overlap},
    ) as pair:
        warm(pair, "warms", [0, *LONG[: min(num_cached, 20)]])
        requests = [pair.ask([n % 2, *LONG[:length]]) for n, length in enumerate(lengths)]
        pair.finish()
        assert set(pair.decode.receiver.stats.outcomes) == {"ok"}
        assert all(len(request.tried) == 1 for request in requests)
        wanted = sum(len(request.positions) for request in requests)
        of_test = packed_bytes(LAYOUT, blocks_per_slot)
        nbytes = pair.decode.receiver.stats.bytes["p0", kind] - of_test
        assert nbytes == packed_bytes(LAYOUT, wanted)
