"""Scheduling decisions, each of which once went wrong or looks as if it could."""

from __future__ import annotations

import pytest

from pagewire.shared.base.errors import ConfigError, InvalidRequestError, OverloadedError
from pagewire.shared.costs.step_prices import StepPrices
from pagewire.shared.engine.core import EngineCore
from pagewire.shared.engine.scheduling.schedule import SchedulerLimits
from pagewire.shared.engine.scheduling.scheduler import Scheduler
from pagewire.shared.engine.scheduling.sequence import Sequence
from pagewire.shared.engine.scheduling.status import RequestStatus
from pagewire.shared.kv.block_hash import BlockHasher
from pagewire.shared.kv.block_pool import BlockPool
from pagewire.tests.support.fake_device import FakeDevice
from pagewire.tests.support.fake_engine import FixedCosts, generate, make_core, make_sequence
from pagewire.tests.support.kv_layouts import kv_layout, model_identity

pytestmark = pytest.mark.usefixtures("each_executor")


def drain(core: EngineCore, iterations: int = 400) -> dict[str, list[int]]:
    """Run the loop until nothing is left to do; returns all tokens by request."""
    tokens: dict[str, list[int]] = {}
    for _ in range(iterations):
        outputs, worked = core.step()
        core.scheduler.table.check_integrity()
        for output in outputs:
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
        if not worked and not core.has_work:
            return tokens
    pytest.fail(f"not done within {iterations} steps")


def step(core: EngineCore, times: int = 1) -> None:
    for _ in range(times):
        core.step()
        core.scheduler.table.check_integrity()


def running(core: EngineCore) -> list[str]:
    return [sequence.request_id for sequence in core.scheduler.table.running]


def fill_reservation(device: FakeDevice, core: EngineCore, sequence: Sequence) -> None:
    """Let a reserved sequence's KV and first token arrive."""
    device.write_prompt(sequence)
    core.sequences.activate(sequence, generate(sequence, core.scheduler.limits.max_model_len)[0])


BOTH = pytest.mark.parametrize("overlap", [False, True], ids=["serial", "overlap"])


@pytest.mark.parametrize("length", [0, 32, 33])
def test_prompt_that_can_never_run_is_refused(length: int) -> None:
    core, _ = make_core(num_blocks=8, block_size=4)
    with pytest.raises(InvalidRequestError, match=f"{length} tokens does not fit") as caught:
        core.sequences.add(make_sequence("a", [1] * length))
    assert caught.value.param == "prompt"
    assert not core.has_work and core.sequences.get("a") is None


def test_full_queue_is_overload() -> None:
    core, _ = make_core(max_waiting=2)
    for name in "ab":
        core.sequences.add(make_sequence(name, [1]))
    with pytest.raises(OverloadedError):
        core.sequences.add(make_sequence("c", [1]))
    assert core.sequences.get("c") is None
    assert set(drain(core)) == {"a", "b"}


def test_sequences_longer_than_the_pool_are_ruled_out() -> None:
    pool = BlockPool(8, kv_layout(block_size=4))
    hasher = BlockHasher("secret", model_identity(block_size=4))
    limits = SchedulerLimits(
        max_num_seqs=1, max_num_batched_tokens=8, max_model_len=33, max_waiting=1
    )
    with pytest.raises(ConfigError, match="33 tokens"):
        Scheduler(limits, pool, hasher)


@BOTH
@pytest.mark.parametrize("max_model_len", [32, 30], ids=["whole-pool", "less"])
def test_sequence_that_outgrows_everything_ends_by_length(
    overlap: bool, max_model_len: int
) -> None:
    core, device = make_core(
        num_blocks=8, block_size=4, max_model_len=max_model_len, overlap=overlap
    )
    sequence = make_sequence("a", [1] * 5, max_tokens=1000)
    expected = generate(sequence, max_model_len)
    core.sequences.add(sequence)
    assert drain(core)["a"] == expected
    assert len(sequence.token_ids) == max_model_len
    assert sequence.status is RequestStatus.FINISHED_LENGTH
    assert sum(tokens for tokens, _ in device.batches) == max_model_len - 1  # and no step more


@BOTH
def test_watermark_never_keeps_a_lone_sequence_out(overlap: bool) -> None:
    core, _ = make_core(num_blocks=8, block_size=4, watermark_blocks=8, overlap=overlap)
    for name in "abc":
        core.sequences.add(make_sequence(name, [1] * 31, max_tokens=5))
    assert {name: len(tokens) for name, tokens in drain(core).items()} == dict.fromkeys("abc", 1)


def test_watermark_holds_blocks_back_for_those_running() -> None:
    core, _ = make_core(num_blocks=8, watermark_blocks=2, max_num_batched_tokens=64)
    core.sequences.add(make_sequence("a", [1] * 16))
    core.sequences.add(make_sequence("b", [0] * 12))
    core.sequences.add(make_sequence("c", [0] * 4))  # would fit, but does not overtake
    step(core)
    assert running(core) == ["a"]
    drain(core)
    core.sequences.add(make_sequence("a", [1] * 16))
    core.sequences.add(make_sequence("b", [0] * 8))
    step(core)
    assert running(core) == ["a", "b"]


def test_decode_rows_come_before_chunks_and_chunks_take_what_is_left() -> None:
    core, device = make_core(num_blocks=32, max_num_batched_tokens=8)
    core.sequences.add(make_sequence("talks", [1] * 3, max_tokens=20))
    step(core)
    core.sequences.add(make_sequence("long", [0] * 20))
    step(core, 3)
    assert device.batches == [(3, 1), (8, 2), (8, 2), (7, 2)]


@pytest.mark.parametrize("max_tokens", [1, 4, 5], ids=["at-once", "at-border", "after-border"])
@BOTH
def test_blocks_are_taken_only_when_a_token_needs_them(overlap: bool, max_tokens: int) -> None:
    core, device = make_core(overlap=overlap)
    core.sequences.add(make_sequence("a", [1] * 8, max_tokens=max_tokens))
    drain(core)
    assert device.longest_table == 2 + (max_tokens > 1)


@BOTH
def test_stop_token_is_seen_late_and_the_token_too_many_dropped(overlap: bool) -> None:
    core, device = make_core(overlap=overlap)
    plain = make_sequence("a", [1, 2, 3], max_tokens=40)
    tokens = generate(plain, 1000)
    stop = tokens[5]
    until = tokens[: tokens.index(stop) + 1]
    sequence = make_sequence("a", [1, 2, 3], max_tokens=40, stop=frozenset({stop}))
    core.sequences.add(sequence)
    assert drain(core)["a"] == until
    assert sequence.token_ids == [1, 2, 3, *until]
    assert sequence.status is RequestStatus.FINISHED_STOPPED
    assert len(device.batches) == len(until) + overlap


def test_preempted_sequence_keeps_the_token_in_flight() -> None:
    core, _ = make_core(num_blocks=6, block_size=4, overlap=True, caching=False)
    old, young = make_sequence("old", [1] * 7, max_tokens=14), make_sequence("young", [0] * 11)
    expected = generate(old, 24), generate(young, 24)
    core.sequences.add(old)
    core.sequences.add(young)
    while young.status is not RequestStatus.PREEMPTED:
        in_flight, known = young.num_in_flight_tokens, list(young.token_ids)
        outputs, _ = core.step()
    assert in_flight == 1
    assert len(young.token_ids) == len(known) + 1
    assert young.token_ids[-1] in [token for o in outputs for token in o.token_ids]
    rest = drain(core)
    assert (old.token_ids[7:], young.token_ids[11:]) == expected
    assert rest["young"] == expected[1][-len(rest["young"]) :]


def test_preempted_sequences_come_back_oldest_first() -> None:
    core, _ = make_core(num_blocks=7, block_size=1, caching=False)
    core.sequences.add(make_sequence("a", [1] * 3))
    core.sequences.add(make_sequence("b", [1] * 2))
    core.sequences.add(make_sequence("c", [1] * 2))
    core.sequences.add(make_sequence("d", [1]))
    step(core, 3)
    assert running(core) == ["a"]
    assert [sequence.request_id for sequence in core.scheduler.table.waiting] == ["b", "c", "d"]
    assert core.scheduler.table.num_preemptions == 2
    assert set(drain(core)) == set("abcd")


@BOTH
def test_activated_sequence_can_be_preempted_and_is_computed_here(overlap: bool) -> None:
    core, device = make_core(num_blocks=6, block_size=4, overlap=overlap, caching=False)
    local = make_sequence("local", [1] * 7, max_tokens=14)
    remote = make_sequence("remote", [0] * 11, max_tokens=5, remote_prefill=True)
    expected = generate(local, 24), generate(remote, 24)
    core.sequences.add(local)
    core.sequences.add(remote)
    step(core)
    assert remote.status is RequestStatus.RESERVED
    fill_reservation(device, core, remote)
    drain(core)
    assert core.scheduler.table.num_preemptions >= 1
    assert (local.token_ids[7:], remote.token_ids[11:]) == expected


@BOTH
def test_reservations_that_hold_everything_only_delay_those_running(overlap: bool) -> None:
    core, device = make_core(num_blocks=6, block_size=4, overlap=overlap)
    local = make_sequence("local", [1] * 4, max_tokens=12)
    remote = make_sequence("remote", [0] * 19, max_tokens=2, remote_prefill=True)
    expected = generate(local, 24)
    core.sequences.add(local)
    core.sequences.add(remote)
    step(core, 10)
    assert local.status is RequestStatus.PREEMPTED
    fill_reservation(device, core, remote)
    drain(core)
    assert local.token_ids[4:] == expected


def test_prefill_job_preempted_after_its_step_does_not_end_without_blocks() -> None:
    core, device = make_core(num_blocks=6, block_size=4, overlap=True, caching=False)
    core.sequences.add(make_sequence("talks", [1] * 7, max_tokens=4))
    step(core)
    job = make_sequence("job", [0] * 15, prefill_only=True)
    core.sequences.add(job)
    drain(core)
    assert core.scheduler.table.num_preemptions == 1
    assert job.status is RequestStatus.FINISHED_LENGTH
    assert device.content(job) == job.token_ids[:15]
    assert core.scheduler.pool.counts().used == 4
    core.sequences.abort("job")
    assert core.scheduler.pool.counts().used == 0


@BOTH
def test_slot_and_blocks_of_an_aborted_sequence_go_to_the_next(overlap: bool) -> None:
    core, _ = make_core(num_blocks=3, block_size=4, max_num_seqs=1, overlap=overlap)
    first = make_sequence("a", [1] * 8, max_tokens=4)
    second = make_sequence("b", [0] * 8, max_tokens=4)
    expected = generate(second, 12)
    core.sequences.add(first)
    core.sequences.add(second)
    step(core, 2)
    core.sequences.abort("a")
    assert drain(core) == {"b": expected}
    assert first.num_in_flight_tokens == 0


@pytest.mark.parametrize(("length", "cached"), [(12, 8), (13, 12), (3, 0), (4, 0), (5, 4)])
@BOTH
def test_all_of_a_known_prompt_is_cached_but_its_last_token(
    overlap: bool, length: int, cached: int
) -> None:
    core, device = make_core(overlap=overlap)
    first, second = (make_sequence(name, [1] * length) for name in "ab")
    core.sequences.add(first)
    drain(core)
    num_before = len(device.batches)
    core.sequences.add(second)
    drain(core)
    assert second.num_cached_tokens == cached
    assert device.batches[num_before] == (length - cached, 1)
    assert second.token_ids == first.token_ids


def test_blocks_of_a_running_sequence_are_found_as_soon_as_they_are_written() -> None:
    core, _ = make_core(num_blocks=16, block_size=4, max_num_batched_tokens=8)
    core.sequences.add(make_sequence("a", [1] * 20))
    step(core)
    shares = make_sequence("b", [1] * 20)
    core.sequences.add(shares)
    while shares.num_cached_tokens is None:
        step(core)
    assert shares.num_cached_tokens == 16
    drain(core)


@pytest.mark.parametrize(
    ("num_blocks", "max_num_seqs", "is_reserved"),
    [(64, 8, True), (21, 8, False), (22, 8, True), (64, 2, False), (64, 3, True)],
    ids=["room", "too few blocks", "enough blocks", "too few slots", "enough slots"],
)
def test_prompts_of_prefill_workers_pass_those_that_wait_for_a_step(
    num_blocks: int, max_num_seqs: int, is_reserved: bool
) -> None:
    core, device = make_core(
        num_blocks=num_blocks, block_size=4, max_num_batched_tokens=8, max_num_seqs=max_num_seqs
    )
    remote = make_sequence("remote", [0] * 28, max_tokens=4, remote_prefill=True)
    sequences = [make_sequence("first", [1] * 40), make_sequence("second", [2] * 20), remote]
    expected = [generate(each, 64) for each in sequences]
    for each in sequences:
        core.sequences.add(each)
    step(core)
    assert running(core) == ["first"]
    assert list(core.scheduler.table.reserved) == ["remote"] * is_reserved
    while remote.status is not RequestStatus.RESERVED:
        step(core)
    fill_reservation(device, core, remote)
    drain(core)
    assert [each.token_ids[each.num_prompt_tokens :] for each in sequences] == expected


def test_prompts_that_turn_out_to_be_cached_do_not_pass_those_that_wait_for_a_step() -> None:
    core, _ = make_core(
        num_blocks=64, max_num_batched_tokens=8, max_num_seqs=8, local_prefill_tokens=8
    )
    core.sequences.add(make_sequence("known", [0] * 24, max_tokens=1))
    drain(core)
    core.sequences.add(make_sequence("first", [1] * 40))
    core.sequences.add(make_sequence("second", [2] * 20, max_tokens=1))
    for number in range(20):  # a step's tokens each
        prompt = [0] * 24 + [number] * 8
        core.sequences.add(make_sequence(f"{number}", prompt, max_tokens=1, remote_prefill=True))
    step(core)
    assert running(core) == ["first"]
    assert list(drain(core))[:2] == ["first", "second"]


def test_prompts_of_prefill_workers_leave_other_owners_their_share_of_device_slots() -> None:
    core, _ = make_core(num_blocks=256, block_size=4, max_num_batched_tokens=8, max_num_seqs=8)
    for number in range(8):
        core.sequences.add(make_sequence(f"a{number}", [number] * 40, owner="a"))
        remote = make_sequence(f"b{number}", [number] * 40, owner="b", remote_prefill=True)
        core.sequences.add(remote)
    step(core)
    assert running(core) == ["a0"]
    assert list(core.scheduler.table.reserved) == ["b0", "b1", "b2", "b3"]


def test_a_suspected_prompt_of_a_prefill_worker_does_not_pass_another_suspect() -> None:
    core, _ = make_core(num_blocks=64, block_size=4, max_num_batched_tokens=8, max_num_seqs=8)
    core.sequences.add(make_sequence("first", [1] * 40, max_tokens=1))
    suspect = make_sequence("suspect", [2] * 20, max_tokens=1)
    passes = make_sequence("passes", [3] * 20, remote_prefill=True)
    suspect.strikes = passes.strikes = 1
    core.sequences.add(suspect)
    core.sequences.add(passes)
    step(core, 20)  # no KV arrives
    assert suspect.is_finished
    assert list(core.scheduler.table.reserved) == ["passes"]


def test_short_rest_of_a_prompt_is_not_sent_away() -> None:
    core, _ = make_core(block_size=4, local_prefill_tokens=4)
    core.sequences.add(make_sequence("a", [1] * 13))
    drain(core)
    short = make_sequence("short", [1] * 16, remote_prefill=True)
    long = make_sequence("long", [1] * 17, remote_prefill=True)
    core.sequences.add(short)
    core.sequences.add(long)
    step(core)
    assert short.num_cached_tokens == long.num_cached_tokens == 12
    assert running(core) == ["short"]
    assert list(core.scheduler.table.reserved) == ["long"]


@BOTH
def test_batch_has_no_more_rows_than_a_step_has_tokens(overlap: bool) -> None:
    core, device = make_core(max_num_seqs=4, max_num_batched_tokens=2, overlap=overlap)
    sequences = [make_sequence(name, [1]) for name in "abcd"]
    expected = [generate(sequence, 64) for sequence in sequences]
    for sequence in sequences:
        core.sequences.add(sequence)
    step(core, 3)
    assert running(core) == ["a", "b"]
    drain(core)
    assert [sequence.token_ids[1:] for sequence in sequences] == expected
    assert max(tokens for tokens, _ in device.batches) == 2


@BOTH
def test_rows_get_their_blocks_together(overlap: bool) -> None:
    core, _ = make_core(num_blocks=32, block_size=16, max_model_len=200, overlap=overlap)
    for name, length in zip("abcd", (1, 4, 7, 10), strict=True):
        core.sequences.add(make_sequence(name, [1] * length, max_tokens=100))
    used = []
    for _ in range(60):
        step(core)
        used.append(core.scheduler.pool.counts().used)
    grown = [i for i in range(1, len(used)) if used[i] > used[i - 1]]
    assert 3 <= len(grown) < 3 * 4  # one by one there would be a step for each row and block
    assert len({i % 4 for i in grown}) == 1


def test_queued_tokens_are_those_that_nobody_has_prefilled() -> None:
    core, _ = make_core(max_num_seqs=1, max_num_batched_tokens=4)
    core.sequences.add(make_sequence("a", [1] * 10))
    core.sequences.add(make_sequence("b", [1] * 6))
    assert core.scheduler.meter.num_queued_tokens == 16
    step(core)
    assert core.scheduler.meter.num_queued_tokens == 12
    step(core, 2)
    assert core.scheduler.meter.num_queued_tokens == 6


def test_the_queue_in_seconds_is_what_computing_it_takes() -> None:
    costs = FixedCosts(StepPrices(fixed=1.0, per_product=0.01))
    core, _ = make_core(num_blocks=64, max_num_seqs=1, max_num_batched_tokens=4, costs=costs)
    core.sequences.add(make_sequence("a", [1] * 10))
    core.sequences.add(make_sequence("b", [1] * 6))
    core.sequences.add(make_sequence("c", [1] * 30, remote_prefill=True))
    assert core.scheduler.meter.queued_s == pytest.approx(4 + 0.01 * (55 + 21))
    assert core.scheduler.meter.num_queued_tokens == 46
    step(core)
    assert core.scheduler.meter.queued_s == pytest.approx(3 + 0.01 * (55 - 10 + 21))
    core.sequences.abort("b")
    assert core.scheduler.meter.queued_s == pytest.approx(2 + 0.01 * (55 - 10))
    step(core, 2)
    assert core.scheduler.meter.queued_s == 0


def test_waiting_prompts_count_without_what_is_cached_of_them() -> None:
    costs = FixedCosts(StepPrices(fixed=1.0, per_product=0.01))
    core, _ = make_core(num_blocks=64, max_num_seqs=1, max_num_batched_tokens=4, costs=costs)
    core.sequences.add(make_sequence("known", [1] * 12, max_tokens=1))
    drain(core)
    core.sequences.add(make_sequence("long", [2] * 20))
    step(core)
    core.sequences.add(make_sequence("turn", [1] * 12 + [3] * 4))
    assert core.scheduler.meter.num_queued_tokens == 16 + 16
    step(core)
    assert core.scheduler.meter.num_queued_tokens == 12 + 4
    products = (12 * 8 + 78) + (4 * 12 + 10)
    assert core.scheduler.meter.queued_s == pytest.approx(4 + 0.01 * products)
    core.sequences.abort("turn")
    assert core.scheduler.meter.num_queued_tokens == 12


def test_a_step_does_not_wait_until_all_of_a_crowd_are_hashed() -> None:
    core, _ = make_core(
        num_blocks=256,
        block_size=256,
        max_num_seqs=1,
        max_num_batched_tokens=512,
        max_model_len=20_000,
    )
    known = [1] * 10_240
    core.sequences.add(make_sequence("known", known, max_tokens=1))
    drain(core)
    core.sequences.add(make_sequence("long", [2] * 1500))
    for name in "abc":
        core.sequences.add(make_sequence(name, [*known, 3]))
    step(core)
    queued = [core.scheduler.meter.num_queued_tokens]
    step(core)
    queued.append(core.scheduler.meter.num_queued_tokens)
    assert queued == [988 + 2 * 1 + 10_241, 476 + 3 * 1]
