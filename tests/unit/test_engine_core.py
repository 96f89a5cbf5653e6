from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from pagewire.shared.engine.core import MAX_FAILED_STEPS, EngineCore, StepOutput
from pagewire.shared.engine.sequence import Sequence
from pagewire.shared.errors import InvalidRequestError
from pagewire.shared.request import FinishReason, RequestStatus
from pagewire.tests.support.fake_device import FakeDevice, generate, make_core, make_sequence

BOTH = pytest.mark.parametrize("overlap", [False, True], ids=["serial", "overlap"])
LIMIT = 64  # tokens of the default pool, and so of a sequence


def drain(core: EngineCore) -> list[StepOutput]:
    """Turn the loop until nothing is left to do."""
    outputs: list[StepOutput] = []
    for _ in range(300):
        more, worked = core.step()
        core.scheduler.check_integrity()
        outputs += more
        if not worked and not core.has_work:
            return outputs
    pytest.fail("not done within 300 steps")


def tokens_of(outputs: list[StepOutput], request_id: str) -> list[int]:
    return [token for o in outputs if o.request_id == request_id for token in o.token_ids]


def ends_of(outputs: list[StepOutput]) -> dict[str, str]:
    return {o.request_id: o.finish_reason for o in outputs if o.finish_reason is not None}


def assert_idle(core: EngineCore) -> None:
    assert not core.has_work
    assert core.scheduler.pool.counts().used == 0
    assert list(core.scheduler.holders()) == []


def reserve(
    core: EngineCore, length: int = 9, max_tokens: int = 4, stop: frozenset[int] = frozenset()
) -> Sequence:
    """A sequence whose blocks wait for another worker's KV."""
    sequence = make_sequence(
        "remote", [1] * length, remote_prefill=True, max_tokens=max_tokens, stop=stop
    )
    core.add(sequence)
    core.step()
    assert sequence.status is RequestStatus.RESERVED
    return sequence


# Steps that fail


@BOTH
@pytest.mark.parametrize("where", ["fail_execute", "fail_wait"])
def test_failed_step_fails_its_requests_and_no_others(
    overlap: bool, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    core, device = make_core(max_num_seqs=2, overlap=overlap)
    survivor = make_sequence("waits", [1] * 5)
    expected = generate(survivor, LIMIT)
    for sequence in (make_sequence("a", [0] * 3), make_sequence("b", [0] * 3), survivor):
        core.add(sequence)
    core.step()
    setattr(device, where, RuntimeError("device on fire"))
    outputs = drain(core)
    assert [
        (o.request_id, o.token_ids, o.error) for o in outputs if o.finish_reason == "error"
    ] == [
        ("a", [], "the model step failed"),
        ("b", [], "the model step failed"),
    ]
    assert tokens_of(outputs, "waits") == expected
    assert "device on fire" in caplog.text
    assert_idle(core)


def test_failed_result_spares_those_of_the_step_behind_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    core, device = make_core(overlap=True)
    device.fail_wait = RuntimeError("device on fire")
    core.add(make_sequence("fails", [0] * 3))
    core.step()
    later = make_sequence("later", [1] * 5)
    expected = generate(later, LIMIT)
    core.add(later)
    outputs = drain(core)
    assert ends_of(outputs) == {"fails": "error", "later": "length"}
    assert tokens_of(outputs, "later") == expected
    assert "device on fire" in caplog.text
    assert_idle(core)


def test_late_failure_does_not_hit_a_namesake(caplog: pytest.LogCaptureFixture) -> None:
    core, device = make_core(overlap=True)
    device.fail_wait = RuntimeError("device on fire")
    core.add(make_sequence("a", [0] * 3))
    core.step()
    core.abort("a")
    namesake = make_sequence("a", [1] * 5)
    expected = generate(namesake, LIMIT)
    core.add(namesake)
    outputs = drain(core)
    assert ends_of(outputs) == {"a": "length"}
    assert tokens_of(outputs, "a") == expected
    assert "device on fire" in caplog.text
    assert_idle(core)


@BOTH
@pytest.mark.parametrize("where", ["fail_execute", "fail_wait"])
def test_device_that_fails_every_step_ends_the_loop(
    overlap: bool, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    core, device = make_core(overlap=overlap)
    for number in range(20):
        core.add(make_sequence(f"r{number}", [1]))
    failed: list[str] = []
    with pytest.raises(RuntimeError, match="device lost"):
        while core.has_work:
            setattr(device, where, RuntimeError("device lost"))
            outputs, _ = core.step()
            failed += ends_of(outputs)
    assert len(device.batches) == MAX_FAILED_STEPS + (overlap and where == "fail_wait")
    assert len(failed) < 20


@BOTH
def test_failures_with_good_steps_between_them_do_not_end_the_loop(
    overlap: bool, caplog: pytest.LogCaptureFixture
) -> None:
    core, device = make_core(overlap=overlap)
    for number in range(2 * MAX_FAILED_STEPS):
        core.add(make_sequence(f"good{number}", [1]))
        assert ends_of(drain(core)) == {f"good{number}": "length"}
        core.add(make_sequence(f"bad{number}", [1]))
        device.fail_execute = RuntimeError("out of memory")
        assert ends_of(drain(core)) == {f"bad{number}": "error"}
    assert_idle(core)


# Names


def test_name_in_use_is_refused() -> None:
    core, _ = make_core()
    first = make_sequence("a", [1] * 3)
    core.add(first)
    with pytest.raises(InvalidRequestError, match="already") as caught:
        core.add(make_sequence("a", [2]))
    assert caught.value.param == "request_id"
    assert core.get("a") is first
    assert len(tokens_of(drain(core), "a")) == 4


def test_name_of_a_held_prefill_job_is_refused_until_it_is_forgotten() -> None:
    core, _ = make_core()
    core.add(make_sequence("job", [1] * 9, prefill_only=True))
    assert ends_of(drain(core)) == {"job": "length"}
    assert core.scheduler.pool.counts().used == 3
    with pytest.raises(InvalidRequestError, match="already"):
        core.add(make_sequence("job", [1]))
    core.abort("job")
    assert_idle(core)
    core.add(make_sequence("job", [1]))


# Abort


def abort_waiting(core: EngineCore) -> None:
    core.add(make_sequence("a", [1]))


def abort_running(core: EngineCore) -> None:
    core.add(make_sequence("a", [1] * 9))
    core.step()


def abort_in_mid_prompt(core: EngineCore) -> None:
    core.add(make_sequence("a", [1] * 40))
    core.step()


def abort_reserved(core: EngineCore) -> None:
    core.add(make_sequence("a", [1] * 9, remote_prefill=True))
    core.step()


def abort_fallen_back(core: EngineCore) -> None:
    abort_reserved(core)
    sequence = core.get("a")
    assert sequence is not None
    core.fall_back(sequence, 3)


def abort_held(core: EngineCore) -> None:
    core.add(make_sequence("a", [1] * 9, prefill_only=True))
    drain(core)


@BOTH
@pytest.mark.parametrize(
    "bring",
    [
        abort_waiting,
        abort_running,
        abort_in_mid_prompt,
        abort_reserved,
        abort_fallen_back,
        abort_held,
    ],
)
def test_abort_frees_everything_and_says_nothing(
    overlap: bool, bring: Callable[[EngineCore], None]
) -> None:
    core, _ = make_core(overlap=overlap)
    bring(core)
    core.abort("a")
    assert core.get("a") is None
    assert core.scheduler.pool.counts().used == 0
    assert drain(core) == []
    assert_idle(core)
    core.abort("a")


# Blocks from another worker


@pytest.mark.parametrize(
    ("length", "max_tokens", "stop", "reason"),
    [
        (9, 1, frozenset[int](), "length"),
        (9, 8, frozenset({3}), "stop"),
        (LIMIT - 1, 8, frozenset[int](), "length"),
    ],
    ids=["max-tokens-1", "stop-token", "longest-sequence"],
)
@pytest.mark.parametrize("arrived", [True, False], ids=["activate", "fall-back"])
def test_first_token_of_another_worker_may_be_the_last(
    length: int, max_tokens: int, stop: frozenset[int], reason: FinishReason, arrived: bool
) -> None:
    core, _ = make_core()
    sequence = reserve(core, length, max_tokens, stop)
    if arrived:
        core.activate(sequence, 3)
    else:
        core.fall_back(sequence, 3)
    assert core.has_work
    assert drain(core) == [StepOutput("remote", [], reason)]
    assert_idle(core)


@BOTH
def test_activated_sequence_runs_on_from_its_first_token(overlap: bool) -> None:
    core, device = make_core(overlap=overlap)
    sequence = reserve(core)
    expected = generate(sequence, LIMIT)
    device.write_prompt(sequence)
    core.activate(sequence, expected[0])
    outputs = drain(core)
    assert tokens_of(outputs, "remote") == expected[1:]
    assert all(o.cached_tokens is None for o in outputs)
    assert device.batches[0] == (1, 1)  # none of the prompt was computed again
    assert device.num_decode_rows == len(device.batches)  # for which there are CUDA graphs
    assert_idle(core)


def test_blocks_that_arrived_are_found_by_the_next_request() -> None:
    core, device = make_core()
    sequence = reserve(core)
    device.write_prompt(sequence)
    core.activate(sequence, generate(sequence, LIMIT)[0])
    second = make_sequence("second", [1] * 9)
    core.add(second)
    drain(core)
    assert second.num_cached_tokens == 8


@BOTH
@pytest.mark.parametrize("knows_first", [True, False], ids=["behind-first-token", "from-scratch"])
def test_fallen_back_sequence_delivers_what_was_not_delivered(
    overlap: bool, knows_first: bool
) -> None:
    core, _ = make_core(overlap=overlap)
    sequence = reserve(core)
    expected = generate(sequence, LIMIT)
    core.fall_back(sequence, expected[0] if knows_first else None)
    outputs = drain(core)
    assert tokens_of(outputs, "remote") == expected[int(knows_first) :]
    assert [o.cached_tokens for o in outputs] == [0] + [None] * (len(outputs) - 1)
    assert_idle(core)


def test_fallen_back_sequence_is_next_in_line() -> None:
    core, _ = make_core(num_blocks=16, max_num_seqs=1)
    sequence = reserve(core)
    core.add(make_sequence("queues", [0] * 3))
    core.fall_back(sequence, None)
    core.step()
    assert core.scheduler.running == [sequence]
    drain(core)


# What outputs tell


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@BOTH
def test_first_output_alone_tells_of_cache_and_times(overlap: bool) -> None:
    core, _ = make_core(max_num_batched_tokens=4, overlap=overlap)
    clock = core.clock = Clock()
    core.add(make_sequence("warms", [1] * 9))
    drain(core)
    core.add(make_sequence("a", [1] * 15))
    clock.now = 102.0  # waited for 2 s
    core.step()
    clock.now = 107.0
    outputs = drain(core)
    told = [(o.cached_tokens, o.queue_s, o.prefill_s) for o in outputs]
    assert told == [(8, 2.0, 5.0)] + [(None, 0.0, 0.0)] * 3


def test_resumed_sequence_delivers_only_what_is_new() -> None:
    core, _ = make_core()
    plain = make_sequence("a", [1] * 5, max_tokens=6)
    tokens = generate(plain, LIMIT)
    core.add(make_sequence("a", [1] * 5, resumed=tokens[:4], max_tokens=6))
    outputs = drain(core)
    assert [(o.token_ids, o.cached_tokens) for o in outputs] == [
        ([tokens[4]], 0),
        ([tokens[5]], None),
    ]


def test_cached_tokens_are_of_the_prompt_only() -> None:
    core, _ = make_core()
    plain = make_sequence("a", [1] * 5, max_tokens=12)
    tokens = generate(plain, LIMIT)
    core.add(plain)
    drain(core)
    core.add(make_sequence("b", [1] * 5, resumed=tokens[:10], max_tokens=12))
    outputs = drain(core)
    assert outputs[0].cached_tokens == 5
    assert tokens_of(outputs, "b") == tokens[10:]


@BOTH
def test_counters_count_each_token_once(overlap: bool) -> None:
    core, device = make_core(overlap=overlap)
    core.add(make_sequence("a", [1] * 9, max_tokens=5))
    drain(core)
    core.add(make_sequence("b", [1] * 9, max_tokens=5))
    drain(core)
    stats = core.stats
    assert (stats.prompt_tokens_computed, stats.tokens_generated) == (9 + 1, 10)
    assert (stats.prefix_queries, stats.prefix_hits) == (18, 8)
    assert stats.steps == len(device.batches) == 10


# The order of a turn


@dataclass
class Hook:
    """Notes when it was called."""

    device: FakeDevice
    core: EngineCore
    busy: bool = False
    seen: list[tuple[int, int]] = field(default_factory=list)

    def after_launch(self) -> bool:
        self.seen.append((len(self.device.batches), self.core.stats.tokens_generated))
        return self.busy


@pytest.mark.parametrize(
    ("overlap", "read"), [(False, [0, 1, 2]), (True, [0, 0, 1])], ids=["serial", "overlap"]
)
def test_hooks_run_behind_a_launch_and_before_results_are_read(
    overlap: bool, read: list[int]
) -> None:
    core, device = make_core(overlap=overlap)
    hooks = [Hook(device, core), Hook(device, core)]
    core.hooks.extend(hooks)
    core.add(make_sequence("a", [1] * 3))
    for _ in range(3):
        core.step()
    assert hooks[0].seen == hooks[1].seen == list(zip([1, 2, 3], read, strict=True))


def test_hooks_run_without_a_step_and_keep_the_loop_awake() -> None:
    core, device = make_core()
    idle, busy = Hook(device, core), Hook(device, core, busy=True)
    core.hooks.extend([busy, idle])
    assert core.step() == ([], False)
    assert idle.seen and busy.seen and core.hooks_busy
    busy.busy = False
    core.step()
    assert not core.hooks_busy


# Turns that do not wait


def turn(core: EngineCore) -> bool:
    """A turn as the engine's thread makes it."""
    _outputs, worked = core.step(wait=False)
    core.scheduler.check_integrity()
    return worked


@pytest.mark.parametrize(("overlap", "depth"), [(False, 1), (True, 2)], ids=["serial", "overlap"])
def test_turns_go_on_while_the_device_runs_but_launch_no_more_steps(
    overlap: bool, depth: int
) -> None:
    core, device = make_core(overlap=overlap)
    hook = Hook(device, core)
    core.hooks.append(hook)
    sequence = make_sequence("a", [1] * 5)
    expected = generate(sequence, LIMIT)
    core.add(sequence)
    device.has_run = False
    worked = [turn(core) for _ in range(6)]
    assert worked == [True] * depth + [False] * (6 - depth)
    assert len(device.batches) == depth
    assert (core.awaits_device, len(hook.seen)) == (True, 6)
    assert sequence.token_ids == [1] * 5
    device.has_run = True
    while core.has_work:
        assert turn(core)
    assert sequence.token_ids[5:] == expected
    assert not core.awaits_device


@pytest.mark.parametrize(("overlap", "depth"), [(False, 1), (True, 2)], ids=["serial", "overlap"])
def test_chunks_that_sample_nothing_do_not_run_ahead_of_the_device(
    overlap: bool, depth: int
) -> None:
    core, device = make_core(max_num_batched_tokens=4, overlap=overlap)
    core.add(make_sequence("a", [1] * 40))
    device.has_run = False
    for _ in range(6):
        turn(core)
    assert len(device.batches) == depth


@BOTH
def test_request_that_is_aborted_while_the_device_runs_leaves_nothing(overlap: bool) -> None:
    core, device = make_core(overlap=overlap)
    core.add(make_sequence("a", [1] * 5))
    device.has_run = False
    for _ in range(3):
        turn(core)
    core.abort("a")
    assert core.scheduler.pool.counts().used == 0
    turn(core)
    device.has_run = True
    assert drain(core) == []
    assert_idle(core)


@BOTH
def test_last_token_behind_a_cached_prefix_is_a_decode_row(overlap: bool) -> None:
    core, device = make_core(overlap=overlap)
    prompt = [1] * 9  # two full blocks and one token
    core.add(make_sequence("first", prompt, max_tokens=1))
    drain(core)
    computed, rows = core.stats.prompt_tokens_computed, device.num_decode_rows
    second = make_sequence("second", prompt, max_tokens=1)
    core.add(second)
    drain(core)
    assert second.num_cached_tokens == 8
    assert device.num_decode_rows == rows + 1
    assert core.stats.prompt_tokens_computed == computed + 1
