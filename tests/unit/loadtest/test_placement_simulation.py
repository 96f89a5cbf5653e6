"""What routers know of workers makes the difference that docs/architecture.md states."""

from __future__ import annotations

from collections.abc import Mapping

from pagewire.loadtest.bench.placement import KNOWN, Simulation

SECONDS = 20.0


def figures(routers: int) -> list[Mapping[str, float]]:
    """Return what is simulated with each kind of knowledge, in the order of `KNOWN`."""
    return [Simulation(routers, 0.5, known, seed=1).run(SECONDS) for known in KNOWN]


def test_four_routers_place_as_well_as_one_if_they_share_what_they_have_reserved() -> None:
    record, shared, reports = figures(routers=4)
    assert shared["wait_mean_ms"] < record["wait_mean_ms"] / 4
    assert reports["wait_mean_ms"] < shared["wait_mean_ms"] / 1.3
    assert reports["decode_excess"] < shared["decode_excess"] / 1.5


def test_reports_help_one_router() -> None:
    _, shared, reports = figures(routers=1)
    assert reports["wait_mean_ms"] < shared["wait_mean_ms"] / 2
    assert reports["decode_excess"] < shared["decode_excess"] / 1.5
