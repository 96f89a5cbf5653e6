import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewire.services.router.placement import placed_sessions
from pagewire.services.router.placement.in_flight_load import InFlightLoad
from pagewire.services.router.placement.policy import (
    MAX_PREFILL_WORKERS,
    Candidate,
    PrefixPolicy,
    Prompt,
    RoundRobinPolicy,
)
from pagewire.shared.base.errors import NoWorkerError
from pagewire.shared.control.protocol import LoadReport
from pagewire.shared.costs.load import Load

IDS = [f"w{i}" for i in range(6)]
BLOCK = 16


def candidates(**loads: int) -> list[Candidate]:
    return [Candidate(worker_id, Load(load, load)) for worker_id, load in loads.items()]


def place(prompt: Prompt, decodes: list[Candidate], prefills: list[Candidate], seed: int = 0):
    return PrefixPolicy(random.Random(seed)).place(prompt, decodes, prefills)


@st.composite
def situations(draw: st.DrawFn) -> tuple[Prompt, list[Candidate], list[Candidate]]:
    loads = st.dictionaries(st.sampled_from(IDS), st.integers(0, 500), max_size=6)
    decodes = draw(loads.filter(bool))
    prefills = {f"p{name}": load for name, load in draw(loads).items()}
    num_tokens = draw(st.integers(1, 2000))
    hit = st.integers(0, num_tokens // BLOCK)
    hits = draw(st.dictionaries(st.sampled_from([*decodes, *prefills]), hit))
    return Prompt(num_tokens, BLOCK, hits), candidates(**decodes), candidates(**prefills)


@given(situations())
def test_every_decode_worker_is_named_once_and_prefill_workers_up_to_the_bound(situation):
    prompt, decodes, prefills = situation
    placement = place(prompt, decodes, prefills)
    assert sorted(placement.decode_workers) == sorted(c.worker_id for c in decodes)
    assert len(set(placement.prefill_workers)) == len(placement.prefill_workers)
    assert len(placement.prefill_workers) == min(len(prefills), MAX_PREFILL_WORKERS)


@given(situations(), st.randoms(use_true_random=False))
def test_no_worker_is_better_in_both_load_and_cache_than_the_chosen(situation, rng):
    prompt, decodes, prefills = situation
    placement = PrefixPolicy(rng).place(prompt, decodes, prefills)
    for chosen_ids, group in (
        (placement.decode_workers, decodes),
        (placement.prefill_workers, prefills),
    ):
        by_id = {c.worker_id: c for c in group}
        for chosen in chosen_ids[:1]:
            for other in by_id:
                load_gain = by_id[chosen].load.blocks - by_id[other].load.blocks
                hit_gain = prompt.hits.get(other, 0) - prompt.hits.get(chosen, 0)
                # A better cache may not save anything of a prompt's last, always computed token.
                saves = prompt.uncached_tokens(chosen) - prompt.uncached_tokens(other)
                assert not (load_gain > 0 and hit_gain >= 0)
                assert not (load_gain >= 0 and saves >= BLOCK)


@given(situations(), st.integers(1, 1000))
def test_more_load_never_attracts(situation, extra):
    prompt, decodes, prefills = situation
    chosen = place(prompt, decodes, prefills).decode_workers[0]
    heavier = [
        c if c.worker_id == chosen else Candidate(c.worker_id, c.load.plus(Load(extra)))
        for c in decodes
    ]
    assert place(prompt, heavier, prefills, seed=1).decode_workers[0] == chosen


def test_a_cached_prefix_attracts_both_kinds():
    prompt = Prompt(160, BLOCK, {"d1": 8, "p1": 9})
    placement = place(prompt, candidates(d0=0, d1=0), candidates(p0=0, p1=0))
    assert placement.decode_workers == ("d1", "d0")
    assert placement.prefill_workers == ("p1", "p0")


def test_load_outweighs_a_small_hit():
    prompt = Prompt(160, BLOCK, {"d1": 2, "p1": 2})
    placement = place(prompt, candidates(d0=0, d1=50), candidates(p0=0, p1=500))
    assert placement.decode_workers[0] == "d0"
    assert placement.prefill_workers[0] == "p0"


def test_ties_are_broken_at_random():
    prompt = Prompt(10, BLOCK, {})
    policy = PrefixPolicy(random.Random(0))
    placements = [
        policy.place(prompt, candidates(d0=1, d1=1, d2=1), candidates(p0=0, p1=0))
        for _ in range(300)
    ]
    firsts = [p.decode_workers[0] for p in placements]
    assert all(firsts.count(d) > 60 for d in ("d0", "d1", "d2"))
    assert {p.prefill_workers[0] for p in placements} == {"p0", "p1"}


def test_a_session_has_its_own_order_of_equal_workers():
    policy = PrefixPolicy(random.Random(0))

    def order(session: int, **loads: int) -> tuple[str, ...]:
        prompt = Prompt(10, BLOCK, {}, session=session)
        return policy.place(prompt, candidates(**loads), []).decode_workers

    orders = {session: order(session, d0=1, d1=1, d2=1) for session in range(300)}
    firsts = [each[0] for each in orders.values()]
    assert all(firsts.count(d) > 60 for d in ("d0", "d1", "d2"))
    for session, known in orders.items():
        assert order(session, d0=1, d1=1, d2=1) == known
        without = tuple(each for each in known if each != "d1")
        assert order(session, d0=1, d2=1) == without


def test_a_session_stays_longer_where_its_blocks_are():
    loads = candidates(d0=0, d1=15)
    hits = {"d1": 10}
    assert place(Prompt(160, BLOCK, hits), loads, []).decode_workers[0] == "d0"
    first = Prompt(160, BLOCK, hits, session=1)
    assert place(first, loads, []).decode_workers[0] == "d0"
    named = Prompt(160, BLOCK, hits, session=1, has_home=True)
    assert place(named, loads, []).decode_workers[0] == "d1"
    assert place(named, candidates(d0=0, d1=25), []).decode_workers[0] == "d0"


def test_a_burst_of_equal_prefixes_stays_together_until_its_queue_is_long():
    in_flight, policy = InFlightLoad(settle_s=60), PrefixPolicy(random.Random(0))
    chosen = []
    for number in range(8):
        hits = {chosen[0]: 64} if number else {}
        prompt = Prompt(1054, BLOCK, hits)
        loads = [Candidate(p, in_flight.recently_placed(p)) for p in ("p0", "p1")]
        placement = policy.place(prompt, candidates(d0=0), loads)
        chosen.append(placement.prefill_workers[0])
        in_flight.add(chosen[-1], Load(tokens=prompt.uncached_tokens(chosen[-1])))
    assert len(set(chosen[:6])) == 1


def test_different_prompts_spread_evenly():
    in_flight, policy = InFlightLoad(settle_s=60), PrefixPolicy(random.Random(0))
    chosen = []
    for _ in range(9):
        prompt = Prompt(500, BLOCK, {})
        loads = [Candidate(p, in_flight.recently_placed(p)) for p in ("p0", "p1", "p2")]
        chosen.append(policy.place(prompt, candidates(d0=0), loads).prefill_workers[0])
        in_flight.add(chosen[-1], Load(tokens=500))
    assert sorted(chosen) == ["p0"] * 3 + ["p1"] * 3 + ["p2"] * 3


def test_round_robin_takes_each_in_turn():
    policy = RoundRobinPolicy()
    prompt = Prompt(160, BLOCK, {"d1": 10})
    placements = [
        policy.place(prompt, candidates(d0=99, d1=0), candidates(p0=0, p1=0, p2=0))
        for _ in range(6)
    ]
    assert [p.decode_workers[0] for p in placements] == ["d0", "d1"] * 3
    assert [p.prefill_workers[0] for p in placements] == ["p0", "p1", "p2"] * 2


@pytest.mark.parametrize("policy", [PrefixPolicy(random.Random(0)), RoundRobinPolicy()])
def test_without_a_decode_worker_there_is_no_placement(policy):
    with pytest.raises(NoWorkerError):
        policy.place(Prompt(1, BLOCK, {}), [], candidates(p0=0))


RECORD = LoadReport(0, 0, Load(0))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_recent_placements_count_until_a_record_must_show_them():
    clock = Clock()
    in_flight = InFlightLoad(settle_s=2, clock=clock)
    in_flight.add("w0", Load(5))
    clock.now = 1.5
    in_flight.add("w0", Load(7))
    in_flight.add("w1", Load(1))
    assert in_flight.recently_placed("w0").blocks == 12
    assert in_flight.recently_placed("w1").blocks == 1
    clock.now = 3
    assert in_flight.recently_placed("w0").blocks == 7
    assert in_flight.load("w0", RECORD, records_arrive=False).blocks == 12


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["add", "remove", "write", "wait"]),
            st.sampled_from(["w0", "w1"]),
            st.integers(1, 50),
        ),
        max_size=40,
    )
)
def test_other_routers_never_know_of_less_than_there_is_and_of_nothing_in_the_end(steps):
    """Each placement is followed by a write; what ends may be known later."""
    clock, known_elsewhere, entries = Clock(), {}, []
    in_flight = InFlightLoad(settle_s=2, clock=clock)

    def known(worker_id: str) -> int:
        amount, until = known_elsewhere.get(worker_id, (0, 0.0))
        return amount if until >= clock.now else 0

    def write() -> None:
        for worker_id, (load, seconds) in in_flight.take_changes().items():
            known_elsewhere[worker_id] = (load.blocks, clock.now + seconds)
            assert load == in_flight.recently_placed(worker_id)
        assert in_flight.take_changes() == {}

    for action, worker_id, amount in steps:
        if action == "add":
            entries.append(in_flight.add(worker_id, Load(amount)))
        elif action == "remove" and entries:
            in_flight.remove(entries.pop(amount % len(entries)))
        elif action == "wait":
            clock.now += amount % 4
        if action in ("add", "write"):
            write()
        for each in ("w0", "w1"):
            assert known(each) >= in_flight.recently_placed(each).blocks
    clock.now += 3
    assert known("w0") == known("w1") == 0


def test_finished_placements_count_no_more():
    in_flight = InFlightLoad(settle_s=2, clock=Clock())
    entries = [in_flight.add("w0", Load(amount)) for amount in (1, 2, 4)]
    in_flight.remove(entries[1])
    in_flight.remove(entries[1])
    assert in_flight.recently_placed("w0").blocks == 5
    in_flight.remove(entries[0])
    in_flight.remove(entries[2])
    assert in_flight.recently_placed("w0").blocks == 0


def test_what_a_worker_reports_with_tokens_replaces_an_older_record():
    clock = Clock()
    in_flight = InFlightLoad(settle_s=2, clock=clock)
    record = LoadReport(1, 100, Load(9))
    in_flight.record_report("w0", LoadReport(1, 120, Load(3)))
    assert in_flight.load("w0", record).blocks == 3
    assert in_flight.load("w0", record, records_arrive=False).blocks == 3
    in_flight.record_report("w0", LoadReport(1, 110, Load(50)))  # came by a longer way
    assert in_flight.load("w0", record).blocks == 3
    assert in_flight.load("w0", LoadReport(1, 130, Load(7))).blocks == 7
    assert in_flight.load("w0", LoadReport(2, 1, Load(8))).blocks == 8, (
        "the worker was started again"
    )
    in_flight.forget("w0")
    assert in_flight.load("w0", record).blocks == 9


@pytest.mark.parametrize("records_arrive", [True, False])
def test_what_was_placed_before_a_report_is_part_of_it(records_arrive):
    clock = Clock()
    in_flight = InFlightLoad(settle_s=2, clock=clock)
    in_flight.add("w0", Load(5))
    clock.now = 1.0
    in_flight.add("w0", Load(7))
    in_flight.record_report("w0", LoadReport(1, 1, Load(100)))
    assert in_flight.load("w0", RECORD, records_arrive).blocks == 107, (
        "the newest is still on its way"
    )
    clock.now = 1.2
    in_flight.record_report("w0", LoadReport(1, 2, Load(100)))
    assert in_flight.load("w0", RECORD, records_arrive).blocks == 100
    assert in_flight.recently_placed("w0").blocks == 0
    clock.now = 1.3
    in_flight.add("w0", Load(2))
    assert in_flight.load("w0", RECORD, records_arrive).blocks == 102
    assert in_flight.recently_placed("w0").blocks == 2


def test_what_came_during_a_long_step_counts_beside_a_report_that_lacks_it():
    clock = Clock()
    in_flight = InFlightLoad(settle_s=2, clock=clock)
    in_flight.add("w0", Load(5))
    clock.now = 0.4  # while a step runs
    in_flight.add("w0", Load(7))
    clock.now = 0.8
    in_flight.record_report("w0", LoadReport(1, 1, Load(100), age_s=0.6))
    assert in_flight.load("w0", RECORD).blocks == 107
    clock.now = 1.2
    in_flight.record_report("w0", LoadReport(1, 2, Load(107), age_s=0.4))
    assert in_flight.load("w0", RECORD).blocks == 107


def test_a_session_has_a_home_until_many_others_were_placed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(placed_sessions, "MOST_SESSIONS", 3)
    sessions = placed_sessions.PlacedSessions()
    for number in (1, 2, 3, None, 1, 4):
        sessions.add(number)
    assert [number for number in range(5) if number in sessions] == [1, 3, 4]
    assert None not in sessions


def test_a_worker_has_the_pace_of_its_latest_first_tokens():
    now_s = 0.0
    in_flight = InFlightLoad(settle_s=60, clock=lambda: now_s)

    def first_token(expected_s: float | None, seconds: float) -> None:
        nonlocal now_s
        entry = in_flight.add("w", Load(tokens=9, seconds=0.1), expected_s)
        now_s += seconds
        in_flight.end_prompt(entry, "w")
        assert in_flight.recently_placed("w") == Load()

    assert in_flight.pace("w") == 1.0
    first_token(None, 9.0)
    in_flight.remove(in_flight.add("w", Load(seconds=0.1), 0.1))
    assert in_flight.pace("w") == 1.0
    for _ in range(100):
        first_token(0.1, 0.15)
    assert in_flight.pace("w") == pytest.approx(1.5, abs=0.05)
    first_token(0.1, 100.0)  # nothing that computing explains
    assert in_flight.pace("w") < 1.6
    for _ in range(100):
        first_token(0.1, 0.08)
    assert in_flight.pace("w") == pytest.approx(0.8, abs=0.05)
    in_flight.forget("w")
    assert in_flight.pace("w") == 1.0


def test_only_the_worker_that_computed_a_prompt_has_its_pace_changed():
    clock = Clock()
    in_flight = InFlightLoad(settle_s=60, clock=clock)
    entry = in_flight.add("planned", Load(seconds=0.1), 0.1)
    clock.now = 0.4
    in_flight.end_prompt(entry, "other")
    assert in_flight.recently_placed("planned") == Load()
    assert in_flight.pace("planned") == in_flight.pace("other") == 1.0


def test_nothing_placed_on_a_lost_worker_counts_when_it_is_back():
    clock = Clock()
    in_flight = InFlightLoad(settle_s=60, clock=clock)
    entry = in_flight.add("w0", Load(5), 0.1)
    in_flight.take_changes()
    in_flight.forget("w0")
    assert in_flight.take_changes() == {"w0": (Load(), 60)}
    clock.now = 0.4
    in_flight.end_prompt(entry, "w0")
    assert in_flight.pace("w0") == 1.0


def test_a_worker_without_prompts_gets_its_usual_pace_back():
    """A worker that seems slow gets no prompt that would show that it is not."""
    clock = Clock()
    in_flight = InFlightLoad(settle_s=60, clock=clock)

    def pace_after(idle_s: float) -> float:
        clock.now += idle_s
        return in_flight.pace("w0")

    entry = in_flight.add("w0", Load(), 5.0)
    clock.now = 20.0
    in_flight.end_prompt(entry, "w0")
    paces = [pace_after(60.0 * (number > 0)) for number in range(6)]
    assert paces[0] > 3.5
    assert paces == sorted(paces, reverse=True)
    assert paces[-1] == pytest.approx(1.0, abs=0.15)
    entry = in_flight.add("w0", Load(), 5.0)  # old prompts count less than this one, too
    clock.now += 5.0
    in_flight.end_prompt(entry, "w0")
    assert in_flight.pace("w0") == pytest.approx(1.0, abs=0.03)
