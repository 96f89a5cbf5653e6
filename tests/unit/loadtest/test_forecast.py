"""Forecasts of measured loads, and the fit of a machine's prices."""

from __future__ import annotations

import dataclasses
import json
import math
from itertools import product
from pathlib import Path

import pytest

from pagewire.loadtest.bench.forecast import main
from pagewire.loadtest.bench.forecast_cluster import options_of, rate_kept
from pagewire.loadtest.bench.machine import fit, machine_of
from pagewire.services.cli.simulation.cluster import ClusterPlan
from pagewire.services.cli.simulation.machine import (
    HostPrices,
    StepTable,
    WirePrices,
    load_machine,
)
from pagewire.shared.costs.step_work import StepWork
from pagewire.tests.support.fake_engine import make_core


def table(output: str) -> dict[tuple[str, str], list[str]]:
    """Return the rest of each row, by load and cluster."""
    lines = [line.strip("|").split("|") for line in output.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line] for line in lines[2:]]
    return {(row[0], row[1]): row[2:] for row in rows}


def test_loads_are_forecast_and_compared_with_measurements(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = {"cluster": "2 aggregated, steps of 512", "kind": "rate 4", "mix": "900/16"}
    rows = [
        measured | {"what": "goodput", "seed": 1, "req_s": 123.4, "ttft_p50": 5000.0},
        measured | {"what": "goodput", "seed": 0, "req_s": 77.0},
        measured | {"what": "crowd", "clients": 4, "tokens_per_s": 99999.0},
    ]
    file = tmp_path / "measured"
    file.write_text("ready\n" + "".join(f"RESULT {json.dumps(row)}\n" for row in rows))
    loads = ["--loads", "900/16@4#1", "--clients", "4", "--seconds", "2"]
    topologies = ["--topologies", "1:1:512:predicted", "0:2:512"]
    assert main([*loads, *topologies, "--measured", str(file)]) == 0
    found = table(capsys.readouterr().out)
    predicted, aggregated = "1P1D, steps of 512, predicted", "2 aggregated, steps of 512"
    assert list(found) == [
        ("4 clients", predicted),
        ("4 clients", aggregated),
        ("900/16@4#1", predicted),
        ("900/16@4#1", f"{predicted}, with objective"),
        ("900/16@4#1", aggregated),
    ]
    tokens, forecast = found["4 clients", aggregated][0].split(" / ")
    assert (tokens, 500 < float(forecast) < 1000) == ("99,999", True)
    _, rate, kept, ttft, *_ = found["900/16@4#1", aggregated]
    assert rate.startswith("123.4 / ")
    assert "/" not in kept
    assert ttft.startswith("5,000 / ")
    assert 10 < float(ttft.split(" / ")[1]) < 100


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--loads", "900@4"], "the load '900@4' is not"),
        (["--clients", "4", "--topologies", "2"], "the topology '2' is not"),
        (["--clients", "4", "--machine", "abacus"], "no machine 'abacus'"),
        (["--clients", "4", "--measured", "nowhere"], "nowhere is not the output of a bench"),
        (["--loads", "99999999/2@1"], "tokens must be from 1 to 1048576"),
        ([], "there is nothing to forecast: give --loads or --clients"),
    ],
)
def test_a_forecast_names_what_is_wrong(
    options: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(options) == 1
    assert error in capsys.readouterr().err


def test_a_bench_may_have_ended_within_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cut").write_text('RESULT {"what": "crowd", "clu')
    assert main(["--clients", "4", "--measured", str(tmp_path / "cut")]) == 1
    assert "cut is not the output of a bench: Unterminated string" in capsys.readouterr().err


def test_the_prices_of_steps_are_found() -> None:
    true = StepTable(
        curve=((1, 2.0), (16, 2.5), (64, 6.0), (256, 22.0)), row_us=8.0, context_ns=90, product_ns=7
    )
    works = [
        StepWork(rows, rows * context, tokens, tokens * context)
        for rows, tokens, context in product((0, 1, 4, 16, 40), (0, 8, 64, 200), (50, 900))
        if rows + tokens
    ]
    found, error = fit([(work, true.step_s(work)) for work in works])
    assert error < 0.02
    unseen = StepWork(10, 4000, 30, 12_000)
    assert found.step_s(unseen) == pytest.approx(true.step_s(unseen), rel=0.1)


def test_the_rate_that_keeps_a_promise_lies_between_two() -> None:
    assert rate_kept([2, 4, 6], [1.0, 0.95, 0.75]) == pytest.approx(4.5)
    assert rate_kept([2, 4], [1.0, 0.95]) == 4


@pytest.mark.parametrize("policy", ["prefix", "predicted"])
def test_a_cluster_is_measured_with_the_policy_that_is_simulated(policy: str) -> None:
    plan = ClusterPlan(1, 1, policy)
    options = options_of(plan, load_machine("h200-llama-3.1-8b"))
    assert options[options.index("--policy") + 1] == policy


@pytest.mark.parametrize(("overlap", "step_s"), [(True, math.inf), (False, 1.0)])
def test_a_machine_has_the_bounds_of_its_engine(overlap: bool, step_s: float) -> None:
    core, _ = make_core(overlap=overlap, max_num_batched_tokens=64)
    core.scheduler.limits = dataclasses.replace(core.scheduler.limits, step_s=step_s)
    table, wire = StepTable(curve=((1, 1.0), (2, 1.0))), WirePrices(gb_s=1.0)
    machine = machine_of(core, "a test", table, wire, HostPrices())
    assert machine.max_step_tokens == 64
    assert machine.step_limit_s == (step_s if step_s == 1.0 else None)
    assert machine.host.launches_early is overlap
