"""How many prompt tokens a step takes, next to rows that wait for their tokens."""

from __future__ import annotations

import math

import msgspec
import pytest

from pagewire.shared.costs.step_prices import SMALLEST_CHUNK, StepPrices
from pagewire.shared.costs.step_work import StepWork
from pagewire.shared.engine.scheduling.sequence import Sequence
from pagewire.shared.engine.scheduling.slices import EFFICIENT_CHUNK, SHARED_FACTOR
from pagewire.shared.engine.step_clock import RunningStep
from pagewire.tests.support.fake_engine import FixedCosts, make_core, make_sequence

BUDGET = 256
PRICES = StepPrices(fixed=0.004, per_token=(1e-4,) * 5, per_sequence=1e-4, per_product=1e-8)


class Engine:
    """An engine whose steps are predicted by fixed prices, and what its steps compute."""

    step_sizes: tuple[int, ...] = ()

    def __init__(
        self, prices: StepPrices = PRICES, largest: int = 10_000, gap_s: float = math.inf
    ) -> None:
        self.costs = FixedCosts(prices, largest)
        self.core, _ = make_core(
            on_step_change=self._note,
            num_blocks=2000,
            max_num_seqs=16,
            max_num_batched_tokens=BUDGET,
            max_model_len=2000,
            gap_s=gap_s,
            step_sizes=self.step_sizes,
            costs=self.costs,
        )
        self.works: list[StepWork] = []
        self.num_added = 0

    def _note(self, step: RunningStep | None) -> None:
        if step is not None:
            self.works.append(step.work)

    def add(self, name: str, length: int, answer: int, gap_s: float | None = None) -> Sequence:
        self.num_added += 1
        sequence = make_sequence(name, [self.num_added] * length, max_tokens=answer)
        sequence.spec = msgspec.structs.replace(sequence.spec, slo_gap_s=gap_s)
        self.core.sequences.add(sequence)
        return sequence

    def run(self, steps: int) -> list[StepWork]:
        """Run some steps; returns those with a chunk next to rows."""
        self.works.clear()
        for _ in range(steps):
            self.core.step()
        return [work for work in self.works if work.rows and work.tokens]


class Captured(Engine):
    """An engine whose steps of some sizes are CUDA graphs."""

    step_sizes = (16, 32, 64, 128, 192, 256)


class CapturedToOneHundred(Engine):
    """An engine whose larger steps are launched kernel by kernel."""

    step_sizes = (16, 32, 64, 100)


class CapturedToTwoHundred(Engine):
    """An engine whose budget is between its largest captured step and twice that."""

    step_sizes = (16, 32, 64, 128, 200)


def with_rows(engine: Engine, *gaps: float | None, answer: int = 1000) -> Engine:
    for number, gap_s in enumerate(gaps):
        engine.add(f"row{number}", 8, answer, gap_s)
    engine.run(3)
    return engine


@pytest.mark.parametrize("gap_s", [0.007, 0.01, 0.02])
def test_no_step_is_predicted_to_last_longer_than_a_row_may_wait(gap_s: float) -> None:
    engine = with_rows(Engine(), None, gap_s, None)
    prompt = engine.add("prompt", 1200, 1)
    works = engine.run(120)
    assert prompt.is_finished
    assert all(PRICES.step_s(work) <= gap_s for work in works)
    # All that fits is used, but for the sizes that chunks have.
    assert max(PRICES.step_s(work) for work in works) > 0.8 * gap_s


def test_some_of_a_prompt_is_computed_however_small_the_gap() -> None:
    engine = with_rows(Engine(), 1e-6)
    prompts = [engine.add(f"prompt{number}", 100, 1) for number in range(2)]
    works = engine.run(20)
    assert all(prompt.is_finished for prompt in prompts)
    assert min(work.tokens for work in works[:-1]) >= SMALLEST_CHUNK


def test_an_objective_that_cannot_be_kept_leaves_prompts_a_share_of_each_step() -> None:
    engine = with_rows(Engine(), *[1e-6] * 12)
    engine.add("prompt", 600, 1)
    works = engine.run(5)
    alone = [PRICES.step_s(StepWork(work.rows, work.contexts)) for work in works]
    shares = [PRICES.step_s(work) / rows for work, rows in zip(works, alone, strict=True)]
    assert 1.4 < min(shares) <= max(shares) <= SHARED_FACTOR


def test_the_smallest_of_several_gaps_counts_as_long_as_its_row_runs() -> None:
    engine = with_rows(Engine(), 0.02, 0.04)
    strict = engine.add("strict", 8, 30, 0.008)
    engine.run(2)
    engine.add("prompt", 1900, 1)
    during = engine.run(20)
    assert all(PRICES.step_s(work) <= 0.008 for work in during)
    while not strict.is_finished:
        engine.run(1)
    after = engine.run(3)
    assert 0.015 < max(PRICES.step_s(work) for work in after) <= 0.02


def test_without_an_objective_a_step_has_as_many_tokens_as_are_allowed() -> None:
    engine = with_rows(Engine(), None, None)
    engine.add("prompt", 1200, 1)
    assert [work.tokens for work in engine.run(3)] == [BUDGET - 2] * 3


def test_an_objective_of_the_worker_is_for_requests_without_their_own() -> None:
    engine = with_rows(Engine(gap_s=0.01), None)
    engine.add("prompt", 1200, 1)
    assert all(PRICES.step_s(work) <= 0.01 for work in engine.run(5))
    patient = with_rows(Engine(gap_s=0.01), 0.02)
    patient.add("prompt", 1200, 1)
    assert 0.015 < max(PRICES.step_s(work) for work in patient.run(5)) <= 0.02


def test_prompts_alone_need_not_keep_an_objective() -> None:
    engine = Engine(gap_s=0.008)
    engine.add("prompt", 1200, 1)
    engine.run(4)
    assert [work.tokens for work in engine.works] == [BUDGET] * 4


def test_a_step_fills_a_captured_one() -> None:
    engine = with_rows(Captured(), 0.02, None, None)
    engine.add("prompt", 1200, 1)
    works = engine.run(5)
    assert {work.rows + work.tokens for work in works} == {128}  # the next would last 0.024 s


@pytest.mark.parametrize("lengths", [[1200], [90, 90, 90, 90]], ids=["one prompt", "several"])
def test_a_step_with_an_objective_is_no_larger_than_the_captured_ones(lengths: list[int]) -> None:
    engine = with_rows(CapturedToOneHundred(), 0.02, None)
    for number, length in enumerate(lengths):
        engine.add(f"prompt{number}", length, 1)
    works = engine.run(3)
    assert works
    # 150 tokens would last 0.02 s.
    assert all(90 < work.rows + work.tokens <= 100 for work in works)


@pytest.mark.parametrize("largest", [10_000, 90], ids=["all sizes seen", "captured sizes seen"])
def test_a_step_that_may_last_long_is_larger_than_the_captured_ones(largest: int) -> None:
    engine = with_rows(CapturedToOneHundred(largest=largest), 0.03, None)
    engine.add("prompt", 1200, 1)
    works = engine.run(3)
    assert works
    assert all(work.tokens > 150 for work in works)


def test_a_budget_below_twice_the_captured_sizes_is_used_where_time_allows() -> None:
    engine = with_rows(CapturedToTwoHundred(), 1.0, None)
    engine.add("prompt", 1200, 1)
    assert {work.rows + work.tokens for work in engine.run(3)} == {BUDGET}


def test_a_worker_that_knows_no_prompts_begins_with_short_chunks() -> None:
    engine = with_rows(Engine(StepPrices(), largest=0), 0.02)
    engine.add("prompt", 1900, 1)
    (first,) = engine.run(1)
    assert first.tokens == EFFICIENT_CHUNK
    engine.costs.largest = first.tokens
    assert [work.tokens for work in engine.run(1)] == [BUDGET - 1]
