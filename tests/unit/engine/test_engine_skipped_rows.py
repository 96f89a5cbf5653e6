"""Rows whose masks are late sample nothing and run again: the same tokens, whatever comes between.

The device is a fake that notices every wrong read; which masks are late is drawn by a seed.
"""

from __future__ import annotations

import random
import threading
from concurrent.futures import CancelledError
from dataclasses import dataclass, field

import msgspec
import pytest
from llguidance import LLTokenizer

from pagewire.shared.engine.constraints import Constraints, Masked
from pagewire.shared.engine.core import EngineCore
from pagewire.shared.engine.launched import Launched
from pagewire.shared.engine.scheduling.sequence import Sequence
from pagewire.shared.grammar.masks import MAX_WAIT_S, MaskFiller
from pagewire.shared.grammar.structures import regex_grammar
from pagewire.shared.grammar.vocabulary import load_vocabulary
from pagewire.shared.model.demo import demo_model_path
from pagewire.tests.support.engine_iterations import (
    LIMIT,
    assert_idle,
    drain,
    ends_of,
    tokens_of,
)
from pagewire.tests.support.fake_engine import generate, make_core, make_sequence
from pagewire.tests.support.wrong_results import Failing, Results, Wrong

pytestmark = pytest.mark.usefixtures("each_executor")


@dataclass(slots=True)
class LateMasks(Constraints):
    """Masks that allow everything, and are late or fail at random."""

    choose: random.Random = field(default_factory=random.Random)
    fails: frozenset[str] = frozenset()
    has_time: bool = True

    def check(self, sequence: Sequence) -> None:
        pass

    def open(self, sequence: Sequence) -> None:
        pass

    def poll(self) -> bool:
        return True

    def fill(self, launched: Launched, wait: bool, usual_step_s: float) -> Masked | None:
        if not wait and self.choose.random() < 0.3:
            return None
        masked = Masked()
        for index, sequence in enumerate(launched.schedule.sampled):
            if sequence.spec.grammar is None or sequence in launched.lost:
                continue
            if sequence.request_id in self.fails and self.choose.random() < 0.3:
                failed = masked.failed if self.has_time else masked.too_late
                failed.append((sequence, "no token is allowed"))
            elif self.choose.random() < 0.4:
                masked.skipped[index] = sequence
        return masked


def constrained(sequence: Sequence) -> Sequence:
    sequence.spec = msgspec.structs.replace(sequence.spec, grammar="any")
    return sequence


def make_late(seed: int, *, overlap: bool, num_blocks: int = 16) -> tuple[EngineCore, LateMasks]:
    masks = LateMasks(choose=random.Random(seed))
    core, _device = make_core(overlap=overlap, num_blocks=num_blocks, constraints=masks)
    return core, masks


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_same_tokens_with_preemption_forks_stops_and_prefill_jobs(seed: int, overlap: bool) -> None:
    core, _masks = make_late(seed, overlap=overlap)
    choose = random.Random(seed)
    sequences = []
    for index in range(9):
        prompt = [choose.randrange(7) for _ in range(choose.randint(1, 20))]
        sequence = make_sequence(
            f"s{index}",
            prompt,
            seed=index,
            max_tokens=choose.randint(1, 24),
            stop=frozenset({choose.randrange(7)}) if index % 3 == 0 else frozenset(),
            prefill_only=index == 5,
        )
        sequences.append(constrained(sequence) if index % 4 else sequence)
    child = constrained(make_sequence("child", list(sequences[1].token_ids), seed=99))
    expected = {each.request_id: generate(each, LIMIT) for each in (*sequences, child)}
    for sequence in sequences:
        core.sequences.add(sequence, (child,) if sequence is sequences[1] else ())
    drain(core)
    for sequence in (*sequences, child):
        answer = sequence.token_ids[sequence.num_prompt_tokens :]
        assert answer == expected[sequence.request_id], sequence.request_id
    core.scheduler.table.forget("s5")
    assert core.stats.rows_skipped > 10
    assert core.stats.tokens_generated == sum(map(len, expected.values()))
    assert_idle(core)


@pytest.mark.parametrize("has_time", [True, False])
@pytest.mark.parametrize("overlap", [False, True])
def test_row_that_cannot_go_on_fails_alone(overlap: bool, has_time: bool) -> None:
    core, masks = make_late(5, overlap=overlap)
    masks.has_time = has_time
    masks.fails = frozenset({"bad"})
    good = [make_sequence("free", [1] * 5, max_tokens=20), make_sequence("late", [2] * 9, seed=3)]
    expected = [generate(each, LIMIT) for each in good]
    bad = constrained(make_sequence("bad", [3] * 4, max_tokens=40, seed=1))
    for each in (good[0], constrained(good[1]), bad):
        core.sequences.add(each)
    outputs = []
    while core.has_work:
        outputs += core.step(wait=False)[0].individual
    assert [each.token_ids[each.num_prompt_tokens :] for each in good] == expected
    (failed,) = [output for output in outputs if output.finish_reason == "error"]
    assert (failed.request_id, failed.error) == ("bad", "no token is allowed")
    assert (failed.param, failed.is_busy) == ("grammar" if has_time else None, not has_time)
    assert_idle(core)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_aborted_while_its_step_runs(seed: int, overlap: bool) -> None:
    core, _masks = make_late(seed, overlap=overlap)
    kept = constrained(make_sequence("kept", [1] * 7, max_tokens=20))
    expected = generate(kept, LIMIT)
    core.sequences.add(kept)
    core.sequences.add(constrained(make_sequence("gone", [2] * 7, max_tokens=40, seed=2)))
    for _ in range(5 + seed):
        core.step(wait=False)
    core.sequences.abort("gone")
    drain(core)
    assert kept.token_ids[kept.num_prompt_tokens :] == expected
    assert_idle(core)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_same_tokens_after_a_result_that_fails(
    seed: int, overlap: bool, caplog: pytest.LogCaptureFixture
) -> None:
    core, _masks = make_late(seed, overlap=overlap)
    results = Results(core, {})
    sequences = [
        make_sequence(f"s{index}", [index] * 5, seed=index, max_tokens=9) for index in range(4)
    ]
    expected = {each.request_id: generate(each, LIMIT) for each in sequences}
    for index, sequence in enumerate(sequences):
        core.sequences.add(constrained(sequence) if index % 2 == seed % 2 else sequence)
    outputs = []
    for _ in range(4 + seed):
        outputs += core.step(wait=False)[0]
    results.break_next(Wrong if overlap else Failing)
    outputs += drain(core)
    failed = [name for name, end in ends_of(outputs).items() if end == "error"]
    assert len(failed) <= (1 if overlap else 2)  # none in a step of several prompts
    for name in expected.keys() - set(failed):
        assert tokens_of(outputs, name) == expected[name]
    assert all(each.num_in_flight_tokens == 0 for each in sequences)
    assert core.stats.tokens_generated == sum(len(output.token_ids) for output in outputs)
    assert "device on fire" in caplog.text
    assert_idle(core)


@pytest.mark.parametrize("overlap", [False, True])
def test_wait_for_a_row_that_is_aborted_does_not_shorten_the_next_one(overlap: bool) -> None:
    gate, now = threading.Event(), [0.0]

    def load() -> LLTokenizer:
        gate.wait()
        return load_vocabulary(demo_model_path(), 2048, (1, 5))

    constraints = Constraints(MaskFiller(load, 2048), clock=lambda: now[0])
    core, _device = make_core(overlap=overlap, constraints=constraints)
    for name in ("gone", "next"):
        sequence = make_sequence(name, [1] * 5, max_tokens=1)
        grammar = regex_grammar(r"(.|\n)*")  # the end, too, is always allowed
        sequence.spec = msgspec.structs.replace(sequence.spec, grammar=grammar)
        core.sequences.add(sequence)
        if name == "gone":
            for _ in range(4):
                core.step(wait=False)
            assert core.has_work and not core.stats.tokens_generated
            core.sequences.abort(name)
            core.step(wait=False)
            now[0] = 1.0
            gate.set()
    drain(core)
    assert (core.stats.tokens_generated, core.stats.rows_skipped) == (1, 0)
    assert_idle(core)


@pytest.mark.parametrize("overlap", [False, True])
def test_masks_that_do_not_come_in_time_are_no_fault_of_a_good_grammar(overlap: bool) -> None:
    gate, now = threading.Event(), [0.0]

    def load() -> LLTokenizer:
        gate.wait()
        return load_vocabulary(demo_model_path(), 2048, (1, 5))

    filler = MaskFiller(load, 2048, lambda: now[0])
    constraints = Constraints(filler, clock=lambda: now[0])
    core, _device = make_core(overlap=overlap, constraints=constraints)
    sequence = make_sequence("good", [1] * 5, max_tokens=1)
    sequence.spec = msgspec.structs.replace(sequence.spec, grammar=regex_grammar("a"))
    core.sequences.add(sequence)
    outputs = []
    while core.has_work:
        outputs += core.step(wait=False)[0].individual
        now[0] += 0.5
    gate.set()
    (failed,) = [output for output in outputs if output.finish_reason == "error"]
    assert (failed.param, failed.is_busy) == (None, True)
    assert MAX_WAIT_S < now[0] < MAX_WAIT_S + 5
    assert_idle(core)


def test_grammar_of_a_closed_sequence_is_not_compiled() -> None:
    gate = threading.Event()

    def load() -> LLTokenizer:
        gate.wait()
        return load_vocabulary(demo_model_path(), 2048, (1, 5))

    constraints = Constraints(MaskFiller(load, 2048))
    sequence = make_sequence("gone", [1])
    sequence.spec = msgspec.structs.replace(sequence.spec, grammar=regex_grammar("a"))
    constraints.open(sequence)
    (follower,) = constraints._followers.values()
    constraints.close(sequence)
    gate.set()
    with pytest.raises(CancelledError):
        follower.compiled.result()
