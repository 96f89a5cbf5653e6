"""Blocks from another worker, what outputs report, and a step that waits for masks."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from pagewire.shared.control.protocol import FinishReason
from pagewire.shared.engine.scheduling.step import (
    GrammarMasks,
    NewDeviceSlot,
    PrefillChunk,
    StepPlan,
    TableEntries,
)
from pagewire.shared.engine.step_output import StepOutput
from pagewire.shared.request.sampling import RequestSpec
from pagewire.tests.support.engine_iterations import (
    BOTH,
    LIMIT,
    assert_idle,
    drain,
    reserve,
    tokens_of,
)
from pagewire.tests.support.fake_device import VOCAB
from pagewire.tests.support.fake_engine import generate, make_core, make_sequence

pytestmark = pytest.mark.usefixtures("each_executor")

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
@pytest.mark.parametrize("arrived", [True, False], ids=["activate", "local"])
def test_first_token_of_another_worker_may_be_the_last(
    length: int, max_tokens: int, stop: frozenset[int], reason: FinishReason, arrived: bool
) -> None:
    core, _ = make_core()
    sequence = reserve(core, length, max_tokens, stop)
    if arrived:
        core.sequences.activate(sequence, 3)
    else:
        core.sequences.recompute_locally(sequence, 3)
    assert core.has_work
    assert drain(core) == [StepOutput("remote", [], reason)]
    assert_idle(core)


@BOTH
def test_activated_sequence_runs_on_from_its_first_token(overlap: bool) -> None:
    core, device = make_core(overlap=overlap)
    sequence = reserve(core)
    expected = generate(sequence, LIMIT)
    device.write_prompt(sequence)
    core.sequences.activate(sequence, expected[0])
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
    core.sequences.activate(sequence, generate(sequence, LIMIT)[0])
    second = make_sequence("second", [1] * 9)
    core.sequences.add(second)
    drain(core)
    assert second.num_cached_tokens == 8


@BOTH
@pytest.mark.parametrize("knows_first", [True, False], ids=["after-first-token", "from-scratch"])
def test_fallen_back_sequence_delivers_what_was_not_delivered(
    overlap: bool, knows_first: bool
) -> None:
    core, _ = make_core(overlap=overlap)
    sequence = reserve(core)
    expected = generate(sequence, LIMIT)
    core.sequences.recompute_locally(sequence, expected[0] if knows_first else None)
    outputs = drain(core)
    assert tokens_of(outputs, "remote") == expected[int(knows_first) :]
    assert [o.cached_tokens for o in outputs] == [0] + [None] * (len(outputs) - 1)
    assert_idle(core)


def test_fallen_back_sequence_is_next_in_line() -> None:
    core, _ = make_core(num_blocks=16, max_num_seqs=1)
    sequence = reserve(core)
    core.sequences.add(make_sequence("queues", [0] * 3))
    core.sequences.recompute_locally(sequence, None)
    core.step()
    assert core.scheduler.table.running == [sequence]
    drain(core)


# What outputs report


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@BOTH
def test_first_output_alone_has_cache_and_times(overlap: bool) -> None:
    clock = Clock()
    core, _ = make_core(max_num_batched_tokens=4, overlap=overlap, clock=clock)
    core.sequences.add(make_sequence("warms", [1] * 9))
    drain(core)
    core.sequences.add(make_sequence("a", [1] * 15))
    clock.now = 102.0  # waited for 2 s
    core.step()
    clock.now = 107.0
    outputs = drain(core)
    reported = [(o.cached_tokens, o.queue_s, o.prefill_s) for o in outputs]
    assert reported == [(8, 2.0, 5.0)] + [(None, 0.0, 0.0)] * 3


@BOTH
def test_tokens_of_which_there_is_no_more_to_say_are_in_columns(overlap: bool) -> None:
    core, _ = make_core(overlap=overlap)
    long, short = make_sequence("long", [1] * 5, max_tokens=8), make_sequence("short", [0] * 3)
    expected = {s.request_id: generate(s, LIMIT) for s in (long, short)}
    core.sequences.add(long)
    core.sequences.add(short)
    columns: dict[str, list[int]] = {"long": [], "short": []}
    others: dict[str, list[int]] = {"long": [], "short": []}
    while core.has_work:
        outputs, _ = core.step()
        for request_id, token in zip(outputs.request_ids, outputs.token_ids, strict=True):
            columns[request_id].append(token)
        for output in outputs.individual:
            others[output.request_id] += output.token_ids
    for name, tokens in expected.items():
        assert others[name] == [tokens[0], tokens[-1]]
        assert columns[name] == tokens[1:-1]


def test_outputs_that_were_handed_out_do_not_change() -> None:
    core, _ = make_core(overlap=True)
    core.sequences.add(make_sequence("a", [1] * 5, max_tokens=20))
    core.sequences.add(make_sequence("b", [0] * 5, max_tokens=9))
    kept = []
    while core.has_work:
        outputs, _ = core.step()
        kept.append((outputs, list(outputs)))
    assert all(list(outputs) == then for outputs, then in kept)


def test_replayed_sequence_delivers_only_what_is_new() -> None:
    core, _ = make_core()
    plain = make_sequence("a", [1] * 5, max_tokens=6)
    tokens = generate(plain, LIMIT)
    core.sequences.add(make_sequence("a", [1] * 5, replayed=tokens[:4], max_tokens=6))
    outputs = drain(core)
    assert [(o.token_ids, o.cached_tokens) for o in outputs] == [
        ([tokens[4]], 0),
        ([tokens[5]], None),
    ]


def test_cached_tokens_are_of_the_prompt_only() -> None:
    core, _ = make_core()
    plain = make_sequence("a", [1] * 5, max_tokens=12)
    tokens = generate(plain, LIMIT)
    core.sequences.add(plain)
    drain(core)
    core.sequences.add(make_sequence("b", [1] * 5, replayed=tokens[:10], max_tokens=12))
    outputs = drain(core)
    assert outputs[0].cached_tokens == 5
    assert tokens_of(outputs, "b") == tokens[10:]


@BOTH
def test_counters_count_each_token_once(overlap: bool) -> None:
    core, device = make_core(overlap=overlap)
    core.sequences.add(make_sequence("a", [1] * 9, max_tokens=5))
    drain(core)
    core.sequences.add(make_sequence("b", [1] * 9, max_tokens=5))
    drain(core)
    stats = core.stats
    assert (stats.prompt_tokens_computed, stats.tokens_generated) == (9 + 1, 10)
    assert (stats.prefix_queries, stats.prefix_hits) == (18, 8)
    assert stats.steps == len(device.batches) == 10


# A step that waits for what may be sampled


def test_step_that_awaits_a_supply_samples_what_is_allowed() -> None:
    _, device = make_core()
    plan = StepPlan(
        number=1,
        new_slots=[NewDeviceSlot(0, RequestSpec(seed=0)), NewDeviceSlot(1, RequestSpec(seed=0))],
        blocks=TableEntries([0, 1], [0, 0], [0, 1]),
        chunks=[PrefillChunk(slot, 0, [1, 2, 3], samples=True) for slot in (0, 1)],
        awaits_masks=True,
    )
    free = make_sequence("free", [1, 2, 3])
    token = generate(free, LIMIT)[0]
    other = (token + 3) % VOCAB
    pending = device.execute(plan)
    device.sample(GrammarMasks(number=1, masks={1: bytes([1 << other])}))
    assert pending.wait().tokens == [token, other]
