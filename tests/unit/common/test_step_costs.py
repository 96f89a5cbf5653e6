"""How long steps and prompts will take, learnt from the steps before."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from pagewire.shared.costs.first_steps import FIRST, FURTHER, TimedStep
from pagewire.shared.costs.step_costs import StepCosts
from pagewire.shared.costs.step_prices import SMALLEST_CHUNK, StepPrices
from pagewire.shared.costs.step_work import NOTHING, StepWork

Machine = Callable[[StepWork], float]


def on_a_cpu(work: StepWork) -> float:
    """What a step takes where each token costs the same."""
    sequences = work.rows + work.chunks
    seconds = 0.003 + 2e-4 * sequences + 1e-4 * work.tokens + 2e-8 * work.products
    return seconds + 1e-7 * work.contexts


def on_a_gpu(work: StepWork) -> float:
    """What a step takes where the weights are read, or the tokens computed, whatever is longer."""
    tokens = work.rows + work.tokens
    seconds = 0.0005 + max(0.004, 2e-5 * tokens) + 2e-8 * work.contexts
    return seconds + 1e-5 * work.rows + 1e-9 * work.products


def of_experts(work: StepWork) -> float:
    """What a step takes where each further token reads fewer experts than the one before."""
    tokens = work.rows + work.tokens
    seconds = 0.003 + 0.017 * (1 - 0.95**tokens) + 1.5e-5 * tokens
    return seconds + 1.5e-8 * work.contexts + 5e-10 * work.products


MACHINES: tuple[Machine, ...] = (on_a_cpu, on_a_gpu, of_experts)
UNSEEN = [
    StepWork(3, 9_000),
    StepWork(12, 12_000),
    NOTHING.with_chunk(0, 2048),
    StepWork(3, 3000).with_chunk(20_000, 128),
    StepWork(6, 6000).with_chunk(300, 200).with_chunk(0, 100),
]


def some_work(rng: random.Random) -> StepWork:
    rows = rng.randrange(17)
    work = StepWork(rows, rows * rng.randrange(100, 4000))
    if rows and rng.random() < 0.6:
        return work
    for _ in range(rng.choice((1, 1, 2))):
        work = work.with_chunk(rng.randrange(20_000), rng.choice([16, 50, 128, 300, 512, 1024]))
    return work


def learn(
    costs: StepCosts, machine: Machine, steps: int, seed: int = 0, noise: float = 0.05
) -> None:
    rng = random.Random(seed)
    for _ in range(steps):
        work = some_work(rng)
        costs.observe(work, machine(work) * rng.uniform(1 - noise, 1 + noise))


def worst_error(costs: StepCosts, machine: Machine) -> float:
    return max(abs(costs.predict(work) / machine(work) - 1) for work in UNSEEN)


def test_two_small_steps_are_enough_for_a_first_guess() -> None:
    costs, work = StepCosts(), NOTHING.with_chunk(0, 2048)
    assert costs.predict(work) == 0.0
    for start in (0, 1024):
        small = NOTHING.with_chunk(start, 16)
        costs.observe(small, on_a_cpu(small))
    assert costs.predict(work) == pytest.approx(on_a_cpu(work), rel=2)


@pytest.mark.parametrize("first", [(), FIRST, (*FIRST, *FURTHER)])
@pytest.mark.parametrize("machine", MACHINES)
def test_predictions_are_right_for_work_that_was_not_seen(
    machine: Machine, first: Sequence[TimedStep]
) -> None:
    costs = StepCosts()
    for step in first:
        costs.learn(step.work, machine(step.work))
    learn(costs, machine, 500)
    assert worst_error(costs, machine) < 0.15


@pytest.mark.parametrize("machine", MACHINES)
def test_the_steps_before_any_work_are_enough(machine: Machine) -> None:
    costs, rng = StepCosts(), random.Random(0)
    for step in (*FIRST, *FURTHER):
        costs.learn(step.work, machine(step.work) * rng.uniform(0.97, 1.03))
    assert worst_error(costs, machine) < 0.15
    assert costs.published.largest == 2048
    assert costs.published.error is None  # nobody has predicted anything


@pytest.mark.parametrize("machine", MACHINES)
def test_the_price_of_prompts_outlasts_a_time_without_any(machine: Machine) -> None:
    costs, rows = StepCosts(), StepWork(3, 3000)
    learn(costs, machine, 500)
    for _ in range(5000):
        costs.observe(rows, machine(rows))
    assert worst_error(costs, machine) < 0.2
    assert costs.predict(rows) == pytest.approx(machine(rows), rel=0.02)


@pytest.mark.parametrize("machine", MACHINES)
def test_what_was_learnt_of_prompts_outlasts_it_too(machine: Machine) -> None:
    """Prompts take twice as long as before there was work, decode rows as long as then."""

    def slower(work: StepWork) -> float:
        return (2 if work.tokens else 1) * machine(work)

    costs, rng = StepCosts(), random.Random(0)
    for step in (*FIRST, *FURTHER):
        costs.learn(step.work, machine(step.work))
    learn(costs, slower, 800)
    for _ in range(5000):
        rows = rng.randrange(1, 20)
        work = StepWork(rows, 2000 * rows)
        costs.observe(work, slower(work) * rng.gauss(1, 0.03))
    chunk = NOTHING.with_chunk(0, 2048)
    assert costs.prices.step_s(chunk) == pytest.approx(slower(chunk), rel=0.15)


def short_prompts(rng: random.Random) -> StepWork:
    """Return a step while all prompts and all answers have 256 tokens."""
    rows = rng.randrange(100, 140)
    work = StepWork(rows, rows * 384)
    for _ in range(rng.choice((0, 0, 1, 2, 4))):
        work = work.with_chunk(0, 256)
    return work


@pytest.mark.parametrize("times", [1.0, 1.3])
@pytest.mark.parametrize("machine", MACHINES)
def test_equal_prompts_do_not_change_the_price_of_longer_ones(
    machine: Machine, times: float
) -> None:
    costs, rng = StepCosts(), random.Random(0)
    for step in (*FIRST, *FURTHER):
        costs.learn(step.work, machine(step.work))
    for number in range(4000):
        work, pace = short_prompts(rng), times if number > 2000 else 1.0
        costs.observe(work, pace * machine(work) * rng.gauss(1, 0.03))
    for start in (0, 2048, 16_384):
        chunk = NOTHING.with_chunk(start, 2048)
        assert costs.prices.step_s(chunk) == pytest.approx(times * machine(chunk), rel=0.15)


@pytest.mark.parametrize("times", [0.4, 4.0])
@pytest.mark.parametrize("machine", MACHINES)
def test_another_speed_is_followed_within_200_steps(machine: Machine, times: float) -> None:
    costs = StepCosts()
    learn(costs, machine, 500)
    learn(costs, lambda work: times * machine(work), 200, seed=1)
    assert worst_error(costs, lambda work: times * machine(work)) < 0.2


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("kind", ["rows", "chunk"])
def test_a_pause_of_the_process_changes_little(machine: Machine, kind: str) -> None:
    costs = StepCosts()
    learn(costs, machine, 500)
    before = [costs.predict(work) for work in UNSEEN]
    work = StepWork(4, 4000) if kind == "rows" else NOTHING.with_chunk(3000, 1024)
    costs.observe(work, 10.0)
    learn(costs, machine, 20, seed=2)
    for each, seconds in zip(UNSEEN, before, strict=True):
        assert costs.predict(each) == pytest.approx(seconds, rel=0.25)


def test_predictions_follow_a_moment_in_which_the_machine_is_slow() -> None:
    costs, rows = StepCosts(), StepWork(4, 4000)
    learn(costs, on_a_gpu, 500)
    usual = costs.prices
    for _ in range(10):
        costs.observe(rows, 1.5 * on_a_gpu(rows))
    assert costs.predict(rows) > 1.25 * on_a_gpu(rows)
    assert usual.step_s(UNSEEN[2]) == pytest.approx(costs.prices.step_s(UNSEEN[2]), rel=0.05)
    learn(costs, on_a_gpu, 30, seed=3)
    assert worst_error(costs, on_a_gpu) < 0.15


def test_steps_may_take_no_time() -> None:
    costs = StepCosts()
    for step in (*FIRST, *FURTHER):
        costs.learn(step.work, on_a_gpu(step.work))
    for _ in range(8000):
        costs.observe(StepWork(2, 100), 0.0)
        costs.observe(NOTHING.with_chunk(0, 64), 0.0)
    assert costs.predict(StepWork(2, 100)) < 1e-3


def test_who_has_seen_nothing_says_so() -> None:
    costs = StepCosts()
    assert costs.published == StepPrices()
    for _ in range(20):
        costs.observe(StepWork(2, 100), 0.01)
    prices = costs.published
    assert (prices.steps, prices.prompt_steps, prices.prompt_error) == (20, 0, None)
    assert prices.error is not None


def test_the_error_is_that_of_a_usual_prediction() -> None:
    costs = StepCosts()
    learn(costs, on_a_cpu, 1000, noise=0.2)  # half of the errors are below 0.1
    prices = costs.published
    assert prices.error == pytest.approx(0.1, rel=0.4)
    assert prices.prompt_error == pytest.approx(0.1, rel=0.4)
    assert 0 < prices.prompt_steps < prices.steps == 1000


@pytest.mark.parametrize(
    ("per_token", "seconds"),
    [((), 1.0), ((2.0,), 1.0 + 40 * 2), ((2.0, 1.0, 0.5, 0.1, 9.0, 9.0), 1.0 + 16 + 24 + 4)],
)
def test_another_release_may_have_more_prices_or_fewer(
    per_token: tuple[float, ...], seconds: float
) -> None:
    prices = StepPrices(fixed=1.0, per_token=per_token)
    assert prices.step_s(StepWork(rows=30, tokens=10)) == pytest.approx(seconds)


@pytest.mark.parametrize("after", [0, 5000])
@pytest.mark.parametrize("rows", [0, 7])
def test_a_prompt_takes_as_long_as_its_steps(after: int, rows: int) -> None:
    costs = StepCosts()
    learn(costs, on_a_gpu, 300)
    alongside, prices = StepWork(rows, 1000 * rows), costs.prices
    steps = [alongside.with_chunk(after + start, 256) for start in range(0, 1000, 256)]
    steps[-1] = alongside.with_chunk(after + 768, 1000 - 768)
    expected = sum(prices.step_s(step) for step in steps)
    assert prices.prefill_s(1000, after, 256, alongside) == pytest.approx(expected)
    assert prices.prefill_s(0, after, 256, alongside) == 0


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("start", [0, 5000, 100_000])
def test_a_chunk_takes_about_the_time_that_is_asked_for(machine: Machine, start: int) -> None:
    costs, rest = StepCosts(), StepWork(4, 4000)
    learn(costs, machine, 500)
    prices, most = costs.prices, 1 << 20
    seconds = 3 * prices.step_s(rest.with_chunk(start, 64))
    tokens = prices.tokens_within(seconds, rest, start, most)
    assert tokens % SMALLEST_CHUNK == 0
    assert 0.7 * seconds < prices.step_s(rest.with_chunk(start, tokens)) <= seconds
    assert prices.tokens_within(seconds, rest, start, 32) == 32


def test_a_step_always_has_room_for_one_small_chunk() -> None:
    costs = StepCosts()
    work = NOTHING.with_chunk(0, 16)
    costs.observe(work, 30.0)
    assert costs.prices.tokens_within(1.0, NOTHING, 0) == SMALLEST_CHUNK
    assert costs.prices.tokens_within(1.0, work, 0) == 0


def test_prices_of_long_prompts_outlast_any_number_of_other_steps() -> None:
    costs = StepCosts()
    for number in range(300):
        work = NOTHING.with_chunk(0, 100 + 20 * number % 2048)
        costs.observe(work, on_a_gpu(work))
    long = NOTHING.with_chunk(0, 2048)
    expected = costs.predict(long)
    for kind in (costs._decodes, costs._prompts):  # as after hours of decode steps
        kind.equations.fade(1e-300)
        kind.equations.fade(1e-300)
    rng = random.Random(0)
    for _ in range(400):
        work = StepWork(rng.randint(1, 60), 9000)
        costs.observe(work, on_a_gpu(work))
    assert costs.predict(long) == pytest.approx(expected, rel=0.15)
