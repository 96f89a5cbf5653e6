"""Forecasts of measured loads, and the fit of a machine's prices."""

from __future__ import annotations

import dataclasses
import json
import math
from itertools import product
from pathlib import Path

import pytest

from pagewire.loadtest.bench.forecast import main, read_cells
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

MEASURED = {
    "label": "1P1D",
    "kind": "rate 5.0",
    "mix": "6144/16",
    "n": 20,
    "chunks": 320,
    "req_s": 5.3,
    "ttft_p50": 700.0,
    "ttft_p99": 600.0,
    "itl_p50": 5.0,
    "itl_p99": 6.0,
    "tpot_p50": 5.0,
    "good": 0.9,
}


def write(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("ready\n" + "".join(f"RESULT {json.dumps(row)}\n" for row in rows))
    return path


def test_measured_cells_are_forecast(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    peer = MEASURED | {"label": "vllm-2rep"}
    crowd = MEASURED | {"label": "2agg", "kind": "conc 4", "req_s": 20.0, "n": 12, "chunks": 192}
    file = write(tmp_path / "cells", [peer, MEASURED, crowd])
    assert [(each.label, len(each.load(0))) for each in read_cells(file)] == [
        ("1P1D", 20),
        ("2agg", 4),
    ]
    assert main([str(write(tmp_path / "one", [MEASURED])), "--seeds", "1"]) == 0
    assert "| 1P1D | 6144/16, rate 5.0 | 5.3 / " in capsys.readouterr().out
    assert main([str(write(tmp_path / "off", [MEASURED | {"req_s": 9.0}])), "--seeds", "1"]) == 1


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
