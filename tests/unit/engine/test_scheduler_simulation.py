"""Sequences of all kinds come and go at random over a pool far too small for them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.shared.base.errors import InvalidRequestError
from pagewire.shared.costs.step_work import NOTHING
from pagewire.shared.engine.scheduling.sequence import Sequence
from pagewire.shared.engine.scheduling.status import RequestStatus
from pagewire.shared.engine.scheduling.step import Expect, Export, StepPlan, Withdraw
from pagewire.shared.request.sampling_types import RetainSeconds
from pagewire.tests.support.fake_engine import generate, make_core, make_sequence
from pagewire.tests.support.kv_layouts import kv_layout

pytestmark = pytest.mark.usefixtures("each_executor")

Outcome = Literal["arrives", "is recomputed", "is recomputed after its first token"]
Failure = Literal["launch", "result", "two results"]
OUTCOMES: tuple[Outcome, ...] = ("arrives", "is recomputed", "is recomputed after its first token")


@dataclass(frozen=True)
class Arrival:
    """A request of the simulation: its arrival, its parameters, and what happens to it.

    Attributes:
        at: iteration in which it arrives.
        replayed: number of outputs that it already has.
        outcome: what ends a reservation.
        delay: iterations until that, and (up to 5) from its end until the engine forgets it.
        abort_after: iterations from its arrival until it is aborted; None: it is not.
        children: for each child, its `abort_after`.
        strikes: how strongly it is suspected, with its children.
        owner: who sent it.
    """

    at: int
    prompt: list[int]
    max_tokens: int
    stop: frozenset[int]
    seed: int
    replayed: int
    kind: Literal["local", "remote", "prefill only"]
    outcome: Outcome
    delay: int
    abort_after: int | None
    children: list[int | None]
    strikes: int
    owner: str | None
    retain_s: RetainSeconds


@dataclass(frozen=True)
class World:
    """The engine of a simulation and its requests."""

    block_size: int
    windows: tuple[int | None, ...]
    num_blocks: int
    budget: int
    max_num_seqs: int
    watermark: int
    local_prefill_tokens: int
    max_model_len: int
    caching: bool
    max_retained: int
    overlap: bool
    iterations_a_step: int  # how long the device takes for a step
    failure: tuple[int, Failure] | None  # iteration and kind of what fails
    arrivals: list[Arrival]


# Windows of the layers: none, as in most models; then some.
WINDOWS: list[tuple[int | None, ...]] = [
    (None,),
    (None,),
    (None, 1),
    (None, 5, 5, 5),
    (None, None, 3, 9),
]
RETAIN: list[RetainSeconds] = [0, 0, 300, 3600]
FAILURES = st.none() | st.tuples(
    st.integers(0, 40), st.sampled_from(["launch", "result", "two results"])
)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Draw engines under pressure: in most, running sequences need more blocks than there are.

    In the others, prompts that prefill workers compute pass those that wait for a full step.
    """
    block_size = draw(st.sampled_from([1, 2, 4, 8]))
    windows = draw(st.sampled_from(WINDOWS))
    layout = kv_layout(windows, block_size)
    num_blocks, budget = draw(st.integers(3, 14)) * len(layout.groups), draw(st.integers(1, 12))
    capacity = layout.longest_sequence(num_blocks, budget)
    num_blocks *= draw(st.sampled_from([1, 1, 4]))
    return World(
        block_size=block_size,
        windows=windows,
        num_blocks=num_blocks,
        budget=budget,
        max_num_seqs=draw(st.integers(1, 6)),
        watermark=draw(st.integers(0, 3)),
        local_prefill_tokens=draw(st.sampled_from([0, 3])),
        max_model_len=draw(st.sampled_from([1024, 1024, 13])),
        caching=draw(st.booleans()),
        max_retained=draw(st.sampled_from([0, 3, 100])),
        overlap=draw(st.booleans()),
        iterations_a_step=draw(st.integers(1, 3)),
        failure=draw(FAILURES),
        arrivals=draw(st.lists(arrivals(capacity), min_size=3, max_size=9)),
    )


@st.composite
def arrivals(draw: st.DrawFn, capacity: int) -> Arrival:
    return Arrival(
        at=draw(st.integers(0, 20)),
        prompt=draw(prompts(capacity)),
        max_tokens=draw(st.integers(1, 30)),
        stop=draw(st.sampled_from([frozenset[int]()] * 3 + [frozenset({3})])),
        seed=draw(st.integers(0, 1)),
        replayed=draw(st.sampled_from([0, 0, 0, 1, 4])),
        kind=draw(st.sampled_from(["local", "local", "local", "remote", "remote", "prefill only"])),
        outcome=draw(st.sampled_from(OUTCOMES)),
        delay=draw(st.integers(0, 6)),
        abort_after=draw(st.sampled_from([None] * 14 + [0, 1, 2, 3, 5, 8])),
        children=draw(st.lists(st.sampled_from([None, None, 0, 1, 3, 6]), max_size=3)),
        strikes=draw(st.sampled_from([0, 0, 0, 1])),
        owner=draw(st.sampled_from([None, None, "a", "b"])),
        retain_s=draw(st.sampled_from(RETAIN)),
    )


@st.composite
def prompts(draw: st.DrawFn, capacity: int) -> list[int]:
    """Draw prompts with few different beginnings, so that they share blocks; some are too long."""
    percent = draw(st.sampled_from([1, 10, 25, 25, 40, 40, 60, 90, 110]))
    length = max(1, capacity * percent // 100 + draw(st.integers(-1, 1)))
    tail = draw(st.lists(st.integers(0, 2), max_size=4))[:length]
    return [draw(st.integers(0, 1))] * (length - len(tail)) + tail


@dataclass
class Life:
    """One request in the simulated engine."""

    arrival: Arrival
    sequence: Sequence
    expected: list[int]
    got: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    reserved_at: int | None = None
    finished_at: int | None = None

    @property
    def is_over(self) -> bool:
        return self.finish_reason is not None


class Simulation:
    """Runs an engine's loop and simulates its clients, workers and KV transfers."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.core, self.device = make_core(
            hooks=[self],
            num_blocks=world.num_blocks,
            block_size=world.block_size,
            windows=world.windows,
            max_num_seqs=world.max_num_seqs,
            max_num_batched_tokens=world.budget,
            max_model_len=world.max_model_len,
            watermark_blocks=world.watermark,
            local_prefill_tokens=world.local_prefill_tokens,
            caching=world.caching,
            max_retained=world.max_retained,
            overlap=world.overlap,
        )
        self.lives: dict[str, Life] = {}
        self.exported: dict[str, int] = {}  # blocks of each prefill job
        self.to_come = sorted(enumerate(world.arrivals), key=lambda item: item[1].at)
        self.now = 0

    def run(self) -> None:
        while self.to_come or not all(life.is_over for life in self.lives.values()):
            self.iterate()
            assert self.now < 4000, "no end in sight"
        for _ in range(12):  # so that held blocks are freed and steps in flight end
            self.iterate()

    def iterate(self) -> None:
        self.let_arrive()
        for life in list(self.lives.values()):
            self.tend(life)
        self.device.has_run = self.now % self.world.iterations_a_step == 0
        self.let_fail()
        outputs, _worked = self.core.step(wait=False)
        for output in outputs:
            life = self.lives[output.request_id]
            assert not life.is_over, "an output after the last one"
            life.got.extend(output.token_ids)
            life.finish_reason = output.finish_reason
            assert len(output.token_ids) <= 1
        assert all(count <= self.world.budget for count, _ in self.device.batches[-1:])
        self.core.scheduler.table.check_integrity()
        self.check_slots()
        self.check_totals()
        for sequence in self.core.scheduler.table.awaiting_send.values():
            assert self.device.content(sequence) == sequence.token_ids[:-1]
        self.now += 1

    def let_fail(self) -> None:
        """Let the result of the next step fail, if it is time for that."""
        at, kind = self.world.failure or (-1, "launch")
        num_failures = {"launch": 0, "result": 1, "two results": 2}[kind]
        if at <= self.now < at + num_failures:
            self.device.fail("fail_wait", "device on fire")

    def let_arrive(self) -> None:
        while self.to_come and self.to_come[0][1].at <= self.now:
            number, arrival = self.to_come.pop(0)
            sequence = self.make(number, arrival)
            limit = self.core.scheduler.limits.max_model_len
            lives = [self.begin(arrival, sequence)]
            for index, abort_after in enumerate([] if sequence.prefill_only else arrival.children):
                of_child = replace(arrival, abort_after=abort_after)
                lives.append(self.begin(of_child, self.make_child(sequence, index)))
            try:
                self.core.sequences.add(sequence, tuple(life.sequence for life in lives[1:]))
            except InvalidRequestError:
                assert not 1 <= len(sequence.token_ids) < limit
            else:
                self.lives |= {life.sequence.request_id: life for life in lives}

    def begin(self, arrival: Arrival, sequence: Sequence) -> Life:
        limit = self.core.scheduler.limits.max_model_len
        sequence.strikes = arrival.strikes
        return Life(arrival, sequence, generate(sequence, limit)[sequence.num_replayed_tokens :])

    def make_child(self, parent: Sequence, index: int) -> Sequence:
        return make_sequence(
            f"{parent.request_id}-child{index}",
            parent.token_ids[: parent.num_prompt_tokens],
            replayed=parent.token_ids[parent.num_prompt_tokens :],
            max_tokens=parent.spec.max_tokens,
            stop=parent.stop_token_ids,
            seed=2 + index,
            remote_prefill=parent.remote_prefill,
            owner=parent.spec.owner,
        )

    def make(self, number: int, arrival: Arrival) -> Sequence:
        plain = make_sequence(
            f"r{number}",
            arrival.prompt,
            max_tokens=arrival.max_tokens,
            stop=arrival.stop,
            seed=arrival.seed,
            remote_prefill=arrival.kind == "remote",
            prefill_only=arrival.kind == "prefill only",
            owner=arrival.owner,
            retain_s=arrival.retain_s,
        )
        if plain.prefill_only or not arrival.prompt:
            return plain
        # The tokens that another worker delivered before it died; never all tokens.
        outputs = generate(plain, self.core.scheduler.limits.max_model_len)
        replayed = outputs[: min(arrival.replayed, len(outputs) - 1)] if outputs else []
        plain.token_ids.extend(replayed)
        plain.num_replayed_tokens = len(replayed)
        return plain

    def poll(self) -> bool:
        return False

    def before_launch(self, plan: StepPlan) -> None:
        if self.world.failure == (self.now, "launch"):
            raise RuntimeError("device on fire")

    def after_launch(self, plan: StepPlan | None) -> bool:
        """Simulate the KV endpoint: handle what the engine reports to it."""
        for work in plan.kv if plan is not None else []:
            sequence = self.lives[work.request_id].sequence
            match work:
                case Expect():
                    self.on_reserved(sequence, work)
                case Export():
                    self.on_export(sequence, work)
                case Withdraw():
                    self.exported.pop(work.request_id, None)
        return False

    def on_reserved(self, sequence: Sequence, expect: Expect) -> None:
        layout, num_tokens = self.core.scheduler.pool.layout, len(sequence.token_ids)
        assert expect.block_ids == layout.job_blocks(sequence.tables, num_tokens)
        assert min(expect.block_ids) >= 0
        assert len(sequence.tables[0]) * self.world.block_size >= num_tokens
        first, rest = divmod(sequence.num_computed_tokens, self.world.block_size)
        assert rest == 0 and expect.first == layout.job_index(first, num_tokens)
        assert len(sequence.token_ids) - sequence.num_computed_tokens > (
            self.world.local_prefill_tokens
        )
        self.lives[sequence.request_id].reserved_at = self.now

    def on_export(self, sequence: Sequence, export: Export) -> None:
        """Check that blocks come in order, once, and were written by steps launched so far."""
        layout, size = self.core.scheduler.pool.layout, self.world.block_size
        assert export.first == self.exported.get(export.request_id, 0)
        end = self.exported[export.request_id] = export.first + len(export.block_ids)
        prompt = sequence.token_ids[: sequence.num_prompt_tokens]
        positions = [
            position
            for position in range(-(-len(prompt) // size))
            for group in layout.groups
            if group.window is None or (position + 1) * size > len(prompt) - group.window
        ]
        assert export.is_last == (end == len(positions) == layout.held_blocks(len(prompt)))
        for position, block in zip(positions[export.first : end], export.block_ids, strict=True):
            tokens = prompt[position * size :][:size]
            assert self.device.cells[block][: len(tokens)] == tokens

    def tend(self, life: Life) -> None:
        """Simulate the client and the other workers of a request."""
        arrival, sequence = life.arrival, life.sequence
        if life.is_over:
            if life.finished_at is None:
                life.finished_at = self.now
            if self.now - life.finished_at >= min(arrival.delay, 5):
                self.core.scheduler.table.forget(sequence.request_id)
            return
        if arrival.abort_after is not None and self.now - arrival.at >= arrival.abort_after:
            self.core.sequences.abort(sequence.request_id)
            life.finish_reason = "abort"
            return
        if sequence.status is not RequestStatus.RESERVED or life.reserved_at is None:
            return
        if self.now - life.reserved_at >= arrival.delay:
            self.end_reservation(life)

    def end_reservation(self, life: Life) -> None:
        sequence, outcome = life.sequence, life.arrival.outcome
        first = life.expected[0]
        if outcome == "is recomputed":
            self.core.sequences.recompute_locally(sequence, None)
            return
        life.got.append(first)  # delivered by the worker that computed it
        if outcome == "arrives":
            self.device.write_prompt(sequence)
            self.core.sequences.activate(sequence, first)
        else:
            self.core.sequences.recompute_locally(sequence, first)

    def check_slots(self) -> None:
        table = self.core.scheduler.table
        used = [s.device_slot for s in table.holders() if s.device_slot is not None]
        num_slots = min(self.world.max_num_seqs, self.world.budget)
        assert sorted([*used, *table.free_slots]) == list(range(num_slots))
        turns = Counter(s.spec.owner for s in table.holders() if s.device_slot is not None)
        assert {owner: table.waiting.num_turns(owner) for owner in turns} == turns

    def check_totals(self) -> None:
        """Check the sums that the scheduler keeps instead of looking at each sequence."""
        table = self.core.scheduler.table
        waiting, decoding = table.waiting, table.rows
        local = [sequence for sequence in waiting if not sequence.remote_prefill]
        assert waiting.work.chunks == len(local)
        if not local:
            assert waiting.work == NOTHING
        if not waiting:
            assert waiting.num_tokens == 0
        rows = decoding.rows.sequences
        assert decoding.contexts == sum(row.num_computed_tokens + 1 for row in rows)

    def check_errors(self) -> None:
        """Check that one sequence fails with a step, of those whose blocks nobody else has."""
        failed = [life for life in self.lives.values() if life.finish_reason == "error"]
        kind = self.world.failure[1] if self.world.failure else None
        if kind == "launch":
            failed = [life for life in failed if life.arrival.kind != "remote"]
        else:
            failed = [life for life in failed if life.arrival.kind != "prefill only"]
        # A suspect of an earlier step may fail together with another one.
        failed = [life for life in failed if life.arrival.strikes == 0]
        assert len(failed) <= {None: 0, "launch": 1, "result": 1, "two results": 2}[kind]

    def check_ends(self) -> None:
        """Check that every sequence got the right tokens, and that the engine is empty."""
        self.check_errors()
        for life in self.lives.values():
            if life.finish_reason in ("abort", "error"):
                assert life.got == life.expected[: len(life.got)]
            else:
                assert life.got == life.expected
                stopped = life.expected[-1] in life.sequence.stop_token_ids
                assert life.finish_reason == (
                    "stop" if stopped and not life.sequence.prefill_only else "length"
                )
            assert life.sequence.num_in_flight_tokens == 0
            assert life.sequence.tables == []
        assert self.exported == {}
        scheduler = self.core.scheduler
        assert scheduler.pool.counts().used == 0
        assert list(scheduler.table.holders()) == []
        assert scheduler.table.unforked == set()
        assert not self.core.has_work


def simulate(world: World) -> None:
    simulation = Simulation(world)
    simulation.run()
    simulation.check_ends()


@settings(max_examples=100)
@given(world=worlds())
def test_every_sequence_ends_with_its_own_tokens(world: World) -> None:
    simulate(world)


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@settings(max_examples=2000)
@given(world=worlds())
def test_every_sequence_of_many_worlds_ends_with_its_own_tokens(world: World) -> None:
    simulate(world)
