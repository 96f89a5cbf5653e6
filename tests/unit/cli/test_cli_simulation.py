"""The simulator: steps and transfers take what they cost, and the engine does the rest."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import get_args

import msgspec
import pytest

from pagewire.services.cli.simulation.capacity import highest_factor, in_words
from pagewire.services.cli.simulation.cluster import ClusterPlan, SimulatedCluster
from pagewire.services.cli.simulation.machine import (
    HostPrices,
    MachinePrices,
    StepTable,
    WirePrices,
    load_machine,
    machine_names,
)
from pagewire.services.cli.simulation.plan import GpuDivision, reason, verdict
from pagewire.services.cli.simulation.results import Promise, SimulatedAnswer, summarize
from pagewire.services.cli.simulation.wire import KvLink
from pagewire.services.cli.simulation.worker import WorkerLimits
from pagewire.services.cli.simulation.workload import (
    AgentShape,
    Contents,
    Conversation,
    PromptPart,
    Turn,
    agents,
    bursts,
    clients,
    independent,
)
from pagewire.shared.costs.load import NO_LOAD
from pagewire.shared.costs.step_work import StepWork
from pagewire.shared.settings.types import Policy

MACHINE = MachinePrices(
    source="a test",
    kv_blocks=64,
    block_size=16,
    kv_token_bytes=1000,
    steps=StepTable(curve=((1, 1.0), (1001, 101.0)), context_ns=1000.0, product_ns=100.0),
    wire=WirePrices(gb_s=0.01, latency_ms=3.0),
    host=HostPrices(),
)
LIMITS = WorkerLimits(max_num_batched_tokens=64)
MIXED = Contents(lambda rng: rng.randint(1, 400), lambda rng: rng.randint(1, 60))


def one_request(
    plan: ClusterPlan, machine: MachinePrices, prompt: int, answer: int
) -> SimulatedAnswer:
    load = [Conversation(0.0, (Turn((PromptPart(7, prompt),), answer),))]
    (found,) = SimulatedCluster(plan, machine, LIMITS).run(load)
    return found


def chunk_s(start: int, count: int) -> float:
    """What a step with one chunk takes on `MACHINE`."""
    products = count * start + count * (count + 1) // 2
    return 1e-3 + (count - 1) * 1e-4 + products * 1e-7


def row_s(context: int) -> float:
    return 1e-3 + context * 1e-6


def test_a_request_takes_the_sum_of_its_steps() -> None:
    answer = one_request(ClusterPlan(0, 1), MACHINE, prompt=100, answer=4)
    first = chunk_s(0, 64) + chunk_s(64, 36)
    rows = [row_s(101), row_s(102), row_s(103)]
    times = [first, first + rows[0], first + sum(rows[:2]), first + sum(rows)]
    assert list(answer.times) == pytest.approx(times)
    assert (answer.outcome, answer.is_remote) == ("ok", False)


def test_a_remote_prompt_takes_its_steps_its_messages_and_its_transfer() -> None:
    host = HostPrices(request_ms=5, start_ms=7, hop_ms=11, answer_ms=13, launch_ms=0.5)
    machine = msgspec.structs.replace(MACHINE, host=host)
    answer = one_request(ClusterPlan(1, 1), machine, prompt=100, answer=2)
    computed = 0.005 + 0.007 + 0.011 + 0.0005 + chunk_s(0, 64) + chunk_s(64, 36)
    assert answer.is_remote
    assert answer.times[0] == pytest.approx(computed + 2 * 0.011 + 0.013)
    # 7 blocks, of which 3 become final at the end. 64 KB take 6.4 ms, the rest 4.8.
    sent = computed - chunk_s(64, 36) + 0.0064
    arrived = max(sent, computed) + 0.0048 + 0.003
    activated = max(arrived, computed + 0.011)
    assert answer.times[1] == pytest.approx(activated + 0.0005 + row_s(101) + 0.011 + 0.013)


@pytest.mark.parametrize("overlap", [True, False])
def test_without_overlap_a_worker_takes_commands_between_steps_only(overlap: bool) -> None:
    machine = msgspec.structs.replace(MACHINE, host=HostPrices(launches_early=overlap))
    cluster = SimulatedCluster(ClusterPlan(0, 1), machine, LIMITS)
    worker, events = cluster.workers["decode-0"], cluster.events
    taken: list[float] = []
    events.at(0.002, lambda: worker.submit(lambda _core: taken.append(events.now)))
    cluster.run([Conversation(0.0, (Turn((PromptPart(7, 64),), 1),))])
    assert taken == [pytest.approx(0.002 if overlap else chunk_s(0, 64))]


def test_a_decode_worker_reports_its_load_of_a_moment_ago() -> None:
    cluster = SimulatedCluster(ClusterPlan(0, 1), MACHINE, LIMITS)
    worker = cluster.workers["decode-0"]
    ages: list[float] = []
    blocks: list[tuple[int, int]] = []

    def look() -> None:
        ages.append(worker.recent().age_s)
        blocks.append((worker.recent().load.blocks, worker.report().load.blocks))

    cluster.events.every(0.001, look)
    cluster.run([Conversation(0.0, (Turn((PromptPart(7, 60),), 200),))])
    assert 0.015 < max(ages) <= 0.03  # an interval and a step
    assert any(then < now for then, now in blocks)
    assert worker.recent().load.blocks == 0  # with the last token comes the load after it


def test_a_short_prompt_is_computed_by_its_decode_worker() -> None:
    answer = one_request(ClusterPlan(1, 1), MACHINE, prompt=32, answer=2)
    assert not answer.is_remote
    assert one_request(ClusterPlan(1, 1), MACHINE, prompt=33, answer=2).is_remote


@dataclass
class Recorder:
    """Records what steps compute, and takes a millisecond for each."""

    works: list[StepWork] = field(default_factory=list)

    def step_s(self, work: StepWork) -> float:
        self.works.append(work)
        return 1e-3


def test_steps_attend_to_the_tokens_before_them() -> None:
    recorder = Recorder()
    machine = msgspec.structs.replace(MACHINE, steps=recorder)
    load = clients(
        3, 9, Contents(lambda rng: rng.randint(1, 90), lambda rng: rng.randint(2, 20)), 1
    )
    cluster = SimulatedCluster(ClusterPlan(0, 1), machine, LIMITS)
    recorder.works.clear()  # so far, the worker has learnt its prices
    answers = cluster.run(load)
    lengths = [(each.prompt_tokens, len(each.times)) for each in answers]
    # The first token follows the prompt. Each further one is a row, which attends to itself, too.
    contexts = sum(prompt + n for prompt, count in lengths for n in range(1, count))
    assert sum(work.contexts for work in recorder.works) == contexts
    assert sum(work.rows for work in recorder.works) == sum(count - 1 for _, count in lengths)
    assert sum(work.tokens for work in recorder.works) == sum(prompt for prompt, _ in lengths)
    assert sum(work.chunks for work in recorder.works) >= 9


@pytest.mark.parametrize("plan", [ClusterPlan(0, 2), ClusterPlan(1, 1), ClusterPlan(2, 2)])
@pytest.mark.parametrize("policy", get_args(Policy))
def test_each_request_ends_once_and_no_block_stays_in_use(plan: ClusterPlan, policy: str) -> None:
    load = independent(bursts(400.0, 8, seed=3), 150, MIXED, seed=3)
    cluster = SimulatedCluster(dataclasses.replace(plan, policy=policy), MACHINE, LIMITS, seed=3)
    answers = cluster.run(load)
    cluster.events.run_until(lambda: cluster.events.now > answers[-1].times[-1] + 5)
    asked = [turn.answer_tokens for each in load for turn in each.turns]
    assert [len(each.times) for each in answers] == asked
    assert all(list(each.times) == sorted(each.times) for each in answers)
    assert {each.outcome for each in answers} == {"ok"}
    assert sum(w.core.scheduler.table.num_preemptions for w in cluster.workers.values()) > 0
    for worker in cluster.workers.values():
        worker.core.scheduler.table.check_integrity()
        assert worker.core.scheduler.pool.counts().used == 0
        assert not worker.core.has_work
    for router in cluster.routers:
        for name in cluster.workers:
            assert router.in_flight.recently_placed(name) == NO_LOAD


def test_equal_seeds_give_equal_figures_and_policies_get_equal_requests() -> None:
    def run(policy: str, seed: int) -> tuple[object, list[tuple[float, int]]]:
        load = independent(bursts(300.0, 1, seed), 60, MIXED, seed)
        cluster = SimulatedCluster(ClusterPlan(1, 2, policy), MACHINE, LIMITS, seed)
        answers = cluster.run(load)
        return cluster.summary(Promise(0.1)), [(a.sent_s, a.prompt_tokens) for a in answers]

    assert run("prefix", 1) == run("prefix", 1)
    assert run("prefix", 1)[1] == run("round_robin", 1)[1] != run("prefix", 2)[1]


def test_prefixes_are_found_where_they_were_computed() -> None:
    contents = Contents(lambda _rng: 100, lambda _rng: 2, shared_prefix=64)
    load = independent(iter([0.0, 1.0, 2.0]), 3, contents, seed=0)
    first, *others = SimulatedCluster(ClusterPlan(0, 2), MACHINE, LIMITS).run(load)
    assert (first.cached_tokens, first.known_tokens) == (0, 0)
    assert [(each.cached_tokens, each.known_tokens) for each in others] == [(64, 64)] * 2
    off = dataclasses.replace(LIMITS, caching=False)
    assert SimulatedCluster(ClusterPlan(0, 2), MACHINE, off).run(load)[-1].cached_tokens == 0


def test_an_agents_turn_continues_the_one_before() -> None:
    turns = (
        Turn((PromptPart(5, 40),), 30),
        Turn((PromptPart(6, 30),), 2, pause_s=4.0, continues=True),
    )
    cluster = SimulatedCluster(ClusterPlan(0, 1), MACHINE, LIMITS)
    first, second = cluster.run([Conversation(1.0, turns)])
    assert second.prompt_tokens == 40 + 30 + 30
    assert second.sent_s == pytest.approx(first.times[-1] + 4.0)
    assert (
        second.cached_tokens == 64
    )  # full blocks of prompt and answer, whose last token never ran


def test_sessions_find_their_blocks_between_many_other_requests() -> None:
    shape = AgentShape(256, (64, 128), (20, 40), (5, 9), (5, 5), pause_s=(15.0, 30.0))
    contents = Contents(lambda _rng: 300, lambda _rng: 2)
    machine = msgspec.structs.replace(MACHINE, kv_blocks=256)

    def cached_share(named: bool) -> float:
        named_agents = agents(3, 3, shape, named)
        others = independent(bursts(1.0, 1, seed=1), 120, contents, seed=5)
        plan = ClusterPlan(1, 1, "predicted")
        cluster = SimulatedCluster(plan, machine, LIMITS)
        answers = cluster.run([*named_agents, *others])
        assert all(each.outcome == "ok" for each in answers)
        turns = [each for each in answers if each.prompt_tokens != 300]
        known = sum(each.known_tokens for each in turns)
        return sum(each.cached_tokens for each in turns) / known

    assert cached_share(named=True) > 0.95 > 0.75 > cached_share(named=False)


def test_a_full_cluster_refuses() -> None:
    full = dataclasses.replace(LIMITS, max_waiting=1)
    load = independent(iter([0.0] * 9), 9, Contents(lambda _rng: 600, lambda _rng: 4), 0)
    cluster = SimulatedCluster(ClusterPlan(0, 2), MACHINE, full)
    outcomes = [each.outcome for each in cluster.run(load)]
    assert outcomes.count("refused") == 9 - outcomes.count("ok") > 0
    assert cluster.summary(Promise(1.0)).broken["ttft"] >= outcomes.count("refused") / 9


def test_a_link_sends_as_fast_as_its_bandwidth_and_its_credits_allow() -> None:
    prices = WirePrices(gb_s=1.0, latency_ms=2.0, segment_mib=1.0)
    mib_s = (1 << 20) / 1e9
    assert KvLink(prices, 100).send(0.5, 10 << 20) == pytest.approx(0.5 + 10 * mib_s + 0.002)
    one = KvLink(prices, 1)
    assert one.send(0.0, 2 << 20) == pytest.approx(2 * mib_s + 0.006)
    assert one.num_bytes == 2 << 20
    assert one.send(9.0, 0) == 9.0


def test_a_curve_is_linear_between_its_points_and_beyond() -> None:
    table = StepTable(curve=((1, 1.0), (10, 10.0), (20, 40.0)), row_us=1000.0)
    assert table.step_s(StepWork(rows=1)) == pytest.approx(0.002)
    assert table.step_s(StepWork(tokens=5)) == pytest.approx(0.005)
    assert table.step_s(StepWork(tokens=30)) == pytest.approx(0.070)


@pytest.mark.parametrize("name", machine_names())
def test_machines_of_the_package_can_be_read(name: str) -> None:
    machine = load_machine(name)
    steps = machine.steps
    assert steps.step_s(StepWork(1, 100)) < steps.step_s(StepWork(0, 0, 2048, 2048**2))


def test_agents_are_as_many_and_as_long_as_they_should_be() -> None:
    load = agents(20, seed=2)
    assert load == agents(20, seed=2)
    assert all(40 <= len(each.turns) <= 100 for each in load)
    assert len({each.turns[0].new[0] for each in load}) == 1
    contents = [part.content for each in load for turn in each.turns for part in turn.new]
    assert len(set(contents)) == len(contents) - len(load) + 1
    pauses = [turn.pause_s for each in load for turn in each.turns[1:]]
    assert 2 < sorted(pauses)[len(pauses) // 2] < 24


@pytest.mark.parametrize("limit", [0.03, 0.9, 1.0, 3.3, 40.0])
def test_the_capacity_is_found(limit: float) -> None:
    assert highest_factor(lambda factor: factor <= limit) == pytest.approx(limit, rel=0.02)


def test_capacity_is_bounded() -> None:
    assert highest_factor(lambda _factor: False) == 0.0
    assert highest_factor(lambda _factor: True) == 64.0
    assert in_words(0.0) == "less than 1/64 of this load"
    assert in_words(63.9) == "63.90 times this load"
    assert in_words(64.0) == "at least 64 times this load"


def test_a_promise_is_broken_in_parts() -> None:
    answer = SimulatedAnswer(1.0, 10, outcome="ok")
    answer.times.extend([1.5, 1.6, 1.9])
    assert answer.breaks(Promise(0.5, 0.21, 0.31)) == set()
    assert answer.breaks(Promise(0.4, 0.19, 0.29)) == {"ttft", "tpot", "gap"}
    assert answer.breaks(Promise(gap_s=0.2)) == {"gap"}
    assert SimulatedAnswer(1.0, 10, outcome="refused").breaks(Promise(math.inf)) == {
        "ttft",
        "tpot",
        "gap",
    }


def test_workers_keep_a_little_less_than_a_promised_gap_or_else_the_promised_mean() -> None:
    assert Promise(0.6, 0.015, 0.03).objective_s == pytest.approx(0.027)
    assert Promise(2.0, 0.02).objective_s == pytest.approx(0.0195)
    assert Promise(2.0).objective_s == math.inf


@pytest.mark.parametrize(("refused", "is_first"), [(0, False), (1, False), (3, True)])
def test_refusals_are_the_reason_only_if_they_broke_most(refused: int, is_first: bool) -> None:
    late = SimulatedAnswer(1.0, 10, outcome="ok")
    late.times.extend([9.0, 9.1])
    answers = [late] * 2 + [SimulatedAnswer(1.0, 10, outcome="refused")] * refused
    found = summarize(answers, Promise(1.0), 0, {"prefill-0": 1.0, "decode-0": 0.5})
    text = reason(GpuDivision(ClusterPlan(1, 1), 0, found))
    assert text.startswith("3 of 5 requests were refused" if is_first else "first tokens are too")
    assert (f"{refused} of {2 + refused} requests were refused" in text) == (refused > 0)


@pytest.mark.parametrize(
    ("too_long", "why"),
    [
        (0, "queues were full"),
        (2, "2 need more KV blocks than a worker has; queues were full for the others"),
        (3, "3 need more KV blocks than a worker has"),
    ],
)
def test_refusals_have_their_causes(too_long: int, why: str) -> None:
    answers = [
        SimulatedAnswer(1.0, 10, is_too_long=number < too_long, outcome="refused")
        for number in range(3)
    ]
    choice = GpuDivision(ClusterPlan(1, 1), 0, summarize(answers, Promise(1.0), 0, {}))
    assert reason(choice) == f"3 of 3 requests were refused: {why}"
    assert ("more KV blocks (--num-blocks)" in verdict(choice)) == (too_long > 1)


def test_routers_know_what_others_have_placed() -> None:
    """Prompts that come at once reach four routers, none of which has heard of the others' yet."""
    contents = Contents(lambda _rng: 200, lambda _rng: 2)
    load = independent(iter([1.0] * 16), 16, contents, seed=0)
    cluster = SimulatedCluster(ClusterPlan(4, 1, routers=4), MACHINE, LIMITS)
    cluster.run(load)
    prefills = [each for each in cluster.workers.values() if each.is_prefill]
    assert [each.core.stats.prompt_tokens_computed for each in prefills] == [4 * 200] * 4
