import dataclasses
import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewire.services.router.placement.forecast import Forecast, with_lent_prices
from pagewire.services.router.placement.policy import Candidate, Placement, PrefixPolicy, Prompt
from pagewire.services.router.placement.predicted import (
    DELAY_WEIGHT,
    ON_PREFILL_WORKER,
    TYPICAL_ANSWER_TOKENS,
    PredictedPolicy,
)
from pagewire.shared.base.errors import NoWorkerError
from pagewire.shared.cluster.worker_record import LinkInfo
from pagewire.shared.costs.load import Load
from pagewire.shared.costs.step_prices import KNOTS, StepPrices

BLOCK = 16
# A step takes 5 ms, a row 0.1 ms and a prompt token 0.1 ms.
PRICES = StepPrices(
    fixed=0.005, per_token=(0.0001,) * len(KNOTS), steps=100, prompt_steps=100, per_context=1e-8
)
FORECAST = Forecast(PRICES, max_rows=256, total_blocks=4096, block_size=BLOCK)


def worker(name: str, **known: Any) -> Candidate:
    load = {key: known.pop(key) for key in list(known) if key in Load.__struct_fields__}
    reported = Load(**{"room": 512, **load})
    return Candidate(name, reported, dataclasses.replace(FORECAST, **known) if known else FORECAST)


def sender(name: str, **known: Any) -> Candidate:
    """A prefill worker that cannot be asked to decode."""
    return dataclasses.replace(worker(name, **known), may_decode=False)


def place(
    prompt: Prompt, decodes: list[Candidate], prefills: list[Candidate], seed: int = 0
) -> Placement:
    return PredictedPolicy(random.Random(seed)).place(prompt, decodes, prefills)


def prompt_of(num_tokens: int, **known: Any) -> Prompt:
    return Prompt(num_tokens, BLOCK, known.pop("hits", {}), **known)


def test_an_idle_decode_worker_computes_what_nobody_waits_for():
    placement = place(prompt_of(2000), [worker("d")], [worker("p", seconds=0.1)])
    assert (placement.decode_workers, placement.prefill_workers) == (("d",), ())


def test_places_of_about_the_same_cost_follow_the_roles():
    placement = place(prompt_of(2000), [worker("d")], [worker("p")])
    assert (placement.decode_workers, placement.prefill_workers) == (("d",), ("p",))


def test_a_busy_decode_worker_is_spared_a_long_prompt_and_not_a_short_one():
    decodes, prefills = [worker("d", rows=64)], [sender("p", seconds=0.04)]
    assert place(prompt_of(2000), decodes, prefills).prefill_workers == ("p",)
    assert place(prompt_of(8), decodes, prefills).prefill_workers == ()


def test_a_prompt_is_not_computed_where_steps_have_hardly_room_for_it():
    prefills = [sender("p", seconds=0.3)]
    for room, expected in ((512, ()), (16, ("p",))):
        decodes = [worker("d", rows=8, room=room)]
        assert place(prompt_of(2000), decodes, prefills).prefill_workers == expected


def test_the_longer_the_queue_of_the_prefill_worker_the_more_is_computed_where_it_is_decoded():
    def is_local(seconds: float) -> bool:
        prefill = sender("p", seconds=seconds)
        return not place(prompt_of(1000), [worker("d", rows=16)], [prefill]).prefill_workers

    found = [is_local(0.1 * number) for number in range(20)]
    assert found == sorted(found)
    assert {*found} == {False, True}


def test_a_later_turn_is_computed_where_the_earlier_ones_are():
    decodes, prefills = [worker("d0"), worker("d1", rows=8)], [worker("p0")]
    prompt = prompt_of(6000, hits={"d1": 350, "p0": 100})
    placement = place(prompt, decodes, prefills)
    assert (placement.decode_workers, placement.prefill_workers) == (("d1", "d0"), ())


def test_a_session_stays_where_it_is_while_load_allows():
    def is_moved(rows: int, **known: Any) -> bool:
        decodes = [worker("d0"), worker("d1", rows=rows)]
        prompt = prompt_of(4000, hits={"d1": 240}, **known)
        return place(prompt, decodes, [worker("p")]).decode_workers[0] != "d1"

    kinds = {}, {"session": 5}, {"session": 5, "has_home": True}
    unnamed, first, later = (
        [is_moved(rows, **kind) for rows in range(0, 200, 2)] for kind in kinds
    )
    for found in (unnamed, later):
        assert found == sorted(found)
        assert {*found} == {False, True}
    assert first == unnamed  # d1 has what many sessions begin with
    assert later.count(True) < first.count(True) - 10


def test_a_session_that_no_worker_knows_is_placed_as_others_are():
    decodes, prefills = [worker("d0", rows=20), worker("d1", rows=9)], [sender("p")]
    placements = [place(prompt_of(900, session=each), decodes, prefills) for each in (None, 3)]
    assert placements[0] == placements[1]


def test_a_worker_that_is_slower_than_predicted_gets_less():
    def with_pace(pace: float) -> tuple[str, ...]:
        slow = dataclasses.replace(sender("p"), pace=pace)
        return place(prompt_of(2000), [worker("d", rows=16)], [slow]).prefill_workers

    assert [with_pace(pace) for pace in (1.0, 1.2, 4.0)] == [("p",), ("p",), ()]


def test_a_prompt_is_expected_to_take_what_its_worker_predicts_unless_more_is_queued():
    decodes, prompt = [worker("d", rows=99)], prompt_of(512)
    for seconds, expected in ((0.05, {"p": pytest.approx(0.1062)}), (0.06, {})):
        prefill = dataclasses.replace(sender("p", seconds=seconds), pace=0.5)
        placement = place(prompt, decodes, [prefill])
        assert placement.prefill_workers == ("p",)
        found = {each: s for each, s in placement.expected_s.items() if each == "p"}
        assert found == expected


@pytest.mark.parametrize("prefills", [[], [sender("p")]], ids=["own", "remote"])
def test_nothing_is_expected_of_a_prompt_that_waits_for_a_free_row(prefills: list[Candidate]):
    prompt = prompt_of(512, remote=bool(prefills))
    for rows, count in ((255, 1 + len(prefills)), (256, 0)):
        placement = place(prompt, [worker("d", rows=rows)], prefills)
        assert placement.decode_workers == ("d",)
        assert len(placement.expected_s) == count


def test_a_request_may_ask_for_a_prefill_worker():
    prompt = prompt_of(3, remote=True)
    placement = place(prompt, [worker("d")], [worker("p", seconds=9.0)])
    assert placement.prefill_workers == ("p",)
    assert placement.local_tokens == 0
    assert place(prompt, [worker("d")], []).prefill_workers == ()


def test_a_full_decode_worker_is_left_alone_while_another_one_has_room():
    full, empty = worker("d0", blocks=4000), worker("d1", rows=200, blocks=3000)
    assert place(prompt_of(3200), [full, empty], []).decode_workers == ("d1", "d0")
    full, empty = worker("d0", rows=256), worker("d1", rows=255)
    assert place(prompt_of(16), [full, empty], [sender("p")]).decode_workers[0] == "d1"
    assert place(prompt_of(16), [full], []).decode_workers == ("d0",)


def test_a_prefill_worker_decodes_when_no_decode_worker_has_room():
    full, prefills = worker("d", rows=256), [worker("p0", rows=250), worker("p1", rows=9)]
    placement = place(prompt_of(100), [full], prefills)
    assert placement.decode_workers == ("p1", "d")
    assert placement.prefill_workers == ()
    prefills = [dataclasses.replace(each, may_decode=False) for each in prefills]
    assert place(prompt_of(100), [full], prefills).decode_workers == ("d",)
    assert place(prompt_of(100), [worker("d", rows=255)], prefills).decode_workers == ("d",)


def test_prefill_workers_decode_when_the_decode_worker_has_become_slow():
    def decodes_here(rows: int) -> bool:
        decodes, prefills = [worker("d", rows=rows, blocks=8 * rows)], [worker("p")]
        return place(prompt_of(100), decodes, prefills).decode_workers[0] == "p"

    found = [decodes_here(rows) for rows in range(0, 250, 10)]
    assert found == sorted(found)
    assert {*found} == {False, True}


def test_a_slow_link_counts():
    fast, slow = (
        {"d": LinkInfo(peer="d", transport="zmq", gbps=gbps, latency_s=0.001)}
        for gbps in (10.0, 0.01)
    )
    prefills = [
        sender("p0", links=slow, block_bytes=1 << 20),
        sender("p1", links=fast, block_bytes=1 << 20, seconds=0.02),
    ]
    placement = place(prompt_of(2000), [worker("d", rows=99)], prefills)
    assert placement.prefill_workers == ("p1", "p0")


def test_seconds_of_the_chosen_workers_are_known_afterwards():
    prompt = prompt_of(512)
    placement = place(prompt, [worker("d", rows=99)], [sender("p")])
    load = placement.prefill_load(prompt, "p")
    assert load == Load(tokens=512, seconds=pytest.approx(0.0562))


@given(st.integers(1, 5000), st.integers(0, 300), st.integers(0, 9))
def test_without_forecasts_it_places_as_by_prefix(num_tokens: int, blocks: int, seed: int):
    decodes = [worker("d0", blocks=blocks), Candidate("d1", Load(blocks=100))]
    prefills = [worker("p0", tokens=300), worker("p1", tokens=blocks)]
    prompt = prompt_of(num_tokens)
    by_prefix = PrefixPolicy(random.Random(seed)).place(prompt, decodes, prefills)
    by_both = PredictedPolicy(random.Random(seed)).place(prompt, decodes, prefills)
    assert by_both.decode_workers[0] == by_prefix.decode_workers[0]
    assert by_both.local_tokens is None


def test_workers_of_equal_cost_are_chosen_equally_often():
    policy = PredictedPolicy(random.Random(0))
    decodes, prefills = [worker("d0"), worker("d1")], [worker("p0"), worker("p1")]
    placements = [policy.place(prompt_of(900), decodes, prefills) for _ in range(200)]
    for chosen in (
        [each.decode_workers[0] for each in placements],
        [each.prefill_workers[0] for each in placements],
    ):
        assert 60 < chosen.count(chosen[0]) < 140


def plain_costs(
    prompt: Prompt, decodes: list[Candidate], prefills: list[Candidate]
) -> dict[tuple[str, str | None], float]:
    """Return the cost of each pair of a decode worker and a sender of the prompt."""

    def terms(each: Candidate) -> tuple[float, float, bool]:
        forecast, load, name = each.forecast, each.load, each.worker_id
        assert forecast is not None
        count, after = prompt.uncached_tokens(name), prompt.cached_tokens(name)
        prefill_s = forecast.prefill_s(load, count, after)
        delay_s = load.rows * forecast.delay_s(load, count, prefill_s)
        decode_s = TYPICAL_ANSWER_TOKENS * forecast.decode_step_s(load, prompt.num_tokens)
        decode_s += forecast.alone_s(count, after) if prompt.has_home else 0
        has_room = each.may_decode and forecast.has_room(load, prompt.missing_blocks(name))
        first_s = load.seconds + prefill_s + DELAY_WEIGHT * delay_s
        return each.pace * first_s, each.pace * decode_s, has_room

    is_free = not (prompt.remote and prefills)
    found = {each.worker_id: terms(each) for each in (*decodes, *prefills)}
    spare = [each for each in prefills if is_free and found[each.worker_id][2]]
    roomy = [each for each in decodes if found[each.worker_id][2]] or ([] if spare else decodes)
    least_s = min(found[each.worker_id][1] for each in (*roomy, *spare))
    costs: dict[tuple[str, str | None], float] = {}
    for decode in roomy:
        name = decode.worker_id
        own_s = found[name][1] - least_s
        if is_free:
            costs[name, None] = found[name][0] + own_s
        for sender in [p for p in prefills if p.forecast and name in p.forecast.links] or prefills:
            assert sender.forecast is not None
            count = min(sender.load.room, prompt.uncached_tokens(name))
            first_s = found[sender.worker_id][0] + sender.forecast.transfer_s(name, count)
            costs[name, sender.worker_id] = first_s + own_s
    for each in spare:
        first_s, decode_s, _ = found[each.worker_id]
        costs[each.worker_id, None] = (first_s + decode_s - least_s) / ON_PREFILL_WORKER
    return costs


@st.composite
def situations(draw: st.DrawFn) -> tuple[Prompt, list[Candidate], list[Candidate]]:
    rng = draw(st.randoms(use_true_random=False))
    decodes = [f"d{number}" for number in range(draw(st.integers(1, 6)))]
    prefills = [f"p{number}" for number in range(draw(st.integers(0, 6)))]

    def one(name: str) -> Candidate:
        linked = [each for each in decodes if rng.random() < 0.7] if name[0] == "p" else []
        gbps = rng.choice([0.0, 0.1, 50.0])
        links = {each: LinkInfo(peer=each, transport="zmq", gbps=gbps) for each in linked}
        prices = dataclasses.replace(
            FORECAST,
            prices=msgspec.structs.replace(PRICES, fixed=rng.choice([0.004, 0.005])),
            max_rows=rng.choice([8, 256]),
            block_bytes=1 << 21,
            links=links,
        )
        load = Load(
            blocks=rng.randrange(4200),
            seconds=rng.choice([0.0, rng.random()]),
            rows=rng.randrange(0, 60),
            room=rng.choice([16, 512]),
        )
        return Candidate(name, load, prices, rng.random() < 0.8, rng.choice([1.0, 0.7, 2.0]))

    hits = {each: rng.randrange(300) for each in (*decodes, *prefills) if rng.random() < 0.4}
    prompt = prompt_of(
        rng.randrange(1, 5000),
        hits=hits,
        remote=rng.random() < 0.2,
        session=rng.choice([None, 7]),
        has_home=rng.random() < 0.5,
    )
    return prompt, [one(each) for each in decodes], [one(each) for each in prefills]


@given(situations(), st.integers(0, 9))
def test_no_other_place_is_cheaper(
    situation: tuple[Prompt, list[Candidate], list[Candidate]], seed: int
):
    costs = plain_costs(*situation)
    placement = place(*situation, seed=seed)
    sender = next(iter(placement.prefill_workers), None)
    assert costs[placement.decode_workers[0], sender] <= min(costs.values()) * (1 + 1e-9)


def test_without_a_decode_worker_there_is_no_placement():
    with pytest.raises(NoWorkerError):
        place(prompt_of(1), [], [worker("p")])


def test_prices_of_what_a_worker_has_not_done_are_lent():
    rising = (1e-3, 5e-4, 1e-4, 1e-4, 1e-4)
    prompts = StepPrices(per_token=rising, steps=50, prompt_steps=50, largest=2048)
    decodes = StepPrices(fixed=0.006, per_context=1e-7, steps=900, prompt_steps=2, largest=20)
    new = StepPrices()
    given = {
        name: dataclasses.replace(FORECAST, prices=prices)
        for name, prices in {"p": prompts, "d": decodes, "new": new}.items()
    }
    lent = with_lent_prices(given)
    assert lent["new"].prices == prompts
    assert (lent["d"].prices.fixed, lent["d"].prices.per_token) == (0.006, prompts.per_token)
    assert (lent["p"].prices.fixed, lent["p"].prices.per_context) == (0.006, 1e-7)
    assert with_lent_prices({"new": given["new"]}) == {}


def test_a_prefill_worker_that_has_no_link_is_not_asked():
    link = {"d": LinkInfo(peer="d", transport="zmq", gbps=1.0)}
    prefills = [sender("p0"), sender("p1", links=link, block_bytes=1 << 20)]
    placement = place(prompt_of(2000), [worker("d", rows=99)], prefills)
    assert placement.prefill_workers[0] == "p1"
