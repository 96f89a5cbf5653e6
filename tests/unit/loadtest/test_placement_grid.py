"""Placement by prediction loses nowhere, and gains somewhere, in simulations of an H200."""

from __future__ import annotations

from statistics import geometric_mean

import pytest

from pagewire.loadtest.bench.placement_grid import (
    LEAST_SHARE,
    PROMISES,
    WRONG,
    Cell,
    MixLoad,
    compare,
    trials,
)
from pagewire.services.cli.simulation.cluster import ClusterPlan, SimulatedCluster
from pagewire.services.cli.simulation.machine import load_machine
from pagewire.services.cli.simulation.worker import WorkerLimits

MACHINE = "h200-llama-3.1-8b"
# Of each mix: two loads of two GPUs, the second one nearly as much as they carry.
LOADS = [
    MixLoad("long", 2.0, 2, 30),
    MixLoad("long", 3.5, 2, 60),
    MixLoad("mixed", 10.0, 2, 60),
    MixLoad("mixed", 20.0, 2, 200),
    MixLoad("agents", 16, 2, 40),
    MixLoad("agents", 32, 2, 72),
]


def cells(loads: list[MixLoad], prices: tuple[float, ...] = (1.0,)) -> list[Cell]:
    found = [each for load in loads for each in trials(load, MACHINE, 1, prices, ("even", "soon"))]
    return compare(found)


def kept(found: list[Cell]) -> list[float]:
    return [each.kept for each in found if each.kept is not None]


def test_prediction_is_at_least_as_good_as_the_best_static_cluster() -> None:
    found = cells(LOADS)
    assert len(found) == 12
    completed = [each.completed for each in found]
    assert geometric_mean(completed) >= 0.99  # the last answers' ends decide in loads so small
    assert geometric_mean(kept(found)) >= 1.0
    assert min(*completed, *kept(found)) >= LEAST_SHARE
    assert max(kept(found)) >= 1.1


@pytest.mark.parametrize("load", [LOADS[1], LOADS[3]], ids=lambda load: load.mix)
def test_prices_that_are_wrong_by_a_third_do_not_make_it_lose(load: MixLoad) -> None:
    found = cells([load], WRONG)
    assert min(*(each.completed for each in found), *kept(found)) >= LEAST_SHARE


def test_wrong_prices_keep_nine_tenths_of_what_right_ones_keep() -> None:
    load, promise = MixLoad("long", 3.25, 2, 120).conversations(0), PROMISES["even"]

    def kept_per_s(*factors: float) -> float:
        limits = WorkerLimits(2048, slo_gap_s=promise.objective_s)
        plan = ClusterPlan(1, 1, "predicted")
        cluster = SimulatedCluster(plan, load_machine(MACHINE), limits, price_factors=factors)
        cluster.run(load)
        return cluster.summary(promise).kept_per_s

    right = kept_per_s(1.0)
    assert min(kept_per_s(*WRONG), kept_per_s(*reversed(WRONG))) >= 0.9 * right


def test_several_routers_do_not_send_all_requests_to_the_same_worker_in_turn() -> None:
    load = LOADS[3].conversations(0)

    def kept_per_s(routers: int) -> float:
        plan = ClusterPlan(1, 1, "predicted", routers)
        cluster = SimulatedCluster(plan, load_machine(MACHINE), WorkerLimits(2048, slo_gap_s=0.027))
        cluster.run(load)
        return cluster.summary(PROMISES["even"]).kept_per_s

    assert kept_per_s(routers=4) >= LEAST_SHARE * kept_per_s(routers=1)
