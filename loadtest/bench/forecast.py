"""`python -P -m pagewire.loadtest.bench.forecast FILE`: the simulator against measured loads.

Reads lines of a bench of two GPUs, each with `RESULT` and a JSON object:

    {"label": "1P1D" or "2agg", "kind": "rate 5.0" or "conc 512", "mix": "6144/256" or "mixed",
     "n": requests, "chunks": output tokens, "req_s": ..., "ttft_p50": ms, "itl_p50": ms,
     "tpot_p50": ms, "good": share}

Other labels are left out. Simulates the same loads with a few seeds, prints a table, and ends with
code 1 if a forecast is further off than the bounds. "mixed" lengths are log-normal.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from pagewire.loadtest.bench.tables import markdown
from pagewire.loadtest.cluster import BenchError
from pagewire.services.cli.bench.load import Lengths
from pagewire.services.cli.simulation.cluster import ClusterPlan, SimulatedCluster
from pagewire.services.cli.simulation.machine import MachinePrices, load_machine
from pagewire.services.cli.simulation.results import Promise, SimulationSummary
from pagewire.services.cli.simulation.worker import WorkerLimits
from pagewire.services.cli.simulation.workload import (
    Contents,
    Conversation,
    clients,
    independent,
    log_normal,
)

PLANS = {"1P1D": ClusterPlan(1, 1, routers=2), "2agg": ClusterPlan(0, 2, routers=2)}
PROMISE = Promise(ttft_s=0.6, tpot_s=0.015, gap_s=0.03)
MIXED = Contents(log_normal(6.2, 1.1, 16, 12_000), log_normal(5.0, 0.8, 2, 1500))
TOKENS_BOUND = 0.03  # how much a load's output tokens may differ from the measured ones
MOST_SEEDS = 1000
LOWEST, HIGHEST = "lowest", "highest"  # median first token of any seed
RATE_BOUND, TTFT_BOUND = 0.1, 0.25  # the largest error of completed rate and of p50


@dataclass(frozen=True)
class Cell:
    """A measured load and its figures.

    Attributes:
        span_s: time from the first request to the last one, with a rate.
    """

    label: str
    kind: str
    mix: str
    n: int
    measured: Mapping[str, float]
    span_s: float

    def load(self, seed: int) -> list[Conversation]:
        """Return such a load; the seed is that of times and lengths."""
        name, _, number = self.kind.partition(" ")
        if name == "conc":
            return clients(int(number), self.n, contents_of(self.mix), seed)
        rng = random.Random(f"{seed}/times")
        between = [rng.uniform(0, self.span_s) for _ in range(self.n - 2)]
        times = [0.0, *sorted(between), self.span_s]
        return independent(iter(times), self.n, contents_of(self.mix), seed)

    def loads(self, count: int) -> Iterator[tuple[int, list[Conversation]]]:
        """Yield seeds and their loads, which have about as many output tokens as were measured.

        Raises:
            BenchError: hardly any seed has that number of them.
        """
        for seed in range(MOST_SEEDS):
            load = self.load(seed)
            tokens = sum(turn.answer_tokens for conversation in load for turn in conversation.turns)
            if abs(tokens / self.measured["chunks"] - 1) <= TOKENS_BOUND:
                yield seed, load
                count -= 1
            if count == 0:
                return
        raise BenchError(f"{self.mix} does not make {self.measured['chunks']:g} output tokens")


def contents_of(mix: str) -> Contents:
    """Return the distributions that prompt and answer lengths of a mix are drawn from."""
    if mix == "mixed":
        return MIXED
    prompt, answer = (Lengths.parse(text) for text in mix.split("/"))
    return Contents(prompt.draw, answer.draw)


def read_cells(path: Path) -> list[Cell]:
    """Return the cells of a file that can be simulated, in its order."""
    lines = path.read_text(encoding="utf-8").splitlines()
    rows: list[dict[str, Any]] = [
        json.loads(line.removeprefix("RESULT ")) for line in lines if line.startswith("RESULT ")
    ]
    return [
        Cell(row["label"], row["kind"], row["mix"], row["n"], row, _span_s(row, rows))
        for row in rows
        if row["label"] in PLANS
    ]


def _span_s(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> float:
    """Return the time in which the requests of a row came, which rows do not have.

    If all answers are equally long, the last one began about when its request came, and took as
    long as others. Of the rows with the same requests, the one that lagged least says best
    when that was. Otherwise it is the time that number and rate mean.
    """
    name, _, number = row["kind"].partition(" ")
    if name == "conc":
        return 0.0
    if row["mix"] == "mixed":
        return int(row["n"]) / float(number)
    spans_s: list[float] = []
    for each in rows:
        if all(each[key] == row[key] for key in ("kind", "mix", "n")):
            answer_ms = each["ttft_p50"] + each["chunks"] / each["n"] * each["itl_p50"]
            spans_s.append(each["n"] / each["req_s"] - answer_ms * 1e-3)
    return min(spans_s)


def forecast(cell: Cell, machine: MachinePrices, seeds: int) -> dict[str, float]:
    """Return a cell's figures by simulation, the medians of several seeds."""
    limits = WorkerLimits(machine.max_step_tokens)
    runs: list[SimulationSummary] = []
    for seed, load in cell.loads(seeds):
        cluster = SimulatedCluster(PLANS[cell.label], machine, limits, seed)
        cluster.run(load)
        runs.append(cluster.summary(PROMISE))
    return {
        "req_s": median(figures.completed_per_s for figures in runs),
        "ttft_p50": median(figures.ttft.p50 for figures in runs),
        LOWEST: min(figures.ttft.p50 for figures in runs),
        HIGHEST: max(figures.ttft.p50 for figures in runs),
        "ttft_p99": median(figures.ttft.p99 for figures in runs),
        "itl_p50": median(figures.gap.p50 for figures in runs),
        "itl_p99": median(figures.gap.p99 for figures in runs),
        "tpot_p50": median(figures.tpot.p50 for figures in runs),
        "good": median(figures.kept_share for figures in runs),
    }


def compared(cell: Cell, predicted: Mapping[str, float]) -> dict[str, Any]:
    """Return a row of the table: each figure as measured and by forecast.

    The median first token also has the lowest and the highest of any seed: in a queue that is
    nearly full, it depends on when exactly the requests come.
    """
    pairs = {
        name: f"{cell.measured[name]:.4g} / {value:.4g}"
        for name, value in predicted.items()
        if name not in (LOWEST, HIGHEST)
    }
    pairs["ttft_p50"] += f" ({predicted[LOWEST]:.4g} - {predicted[HIGHEST]:.4g})"
    return {"cluster": cell.label, "load": f"{cell.mix}, {cell.kind}", **pairs}


def errors(cell: Cell, predicted: Mapping[str, float]) -> tuple[float, float]:
    """Return the relative errors of the completed rate and of the median first token."""
    rate, ttft = (predicted[figure] / cell.measured[figure] - 1 for figure in ("req_s", "ttft_p50"))
    return rate, ttft


def main(arguments: Sequence[str] | None = None) -> int:
    """Forecast and compare; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="JSON file of measured cells")
    parser.add_argument("--machine", default="h200-llama-3.1-8b", help="name, or a JSON file")
    parser.add_argument("--seeds", type=int, default=5, help="simulations of each cell")
    options = parser.parse_args(arguments)
    machine, rows, worst = load_machine(options.machine), [], (0.0, 0.0)
    for cell in read_cells(options.file):
        predicted = forecast(cell, machine, options.seeds)
        rate, ttft = errors(cell, predicted)
        worst = max(worst[0], abs(rate)), max(worst[1], abs(ttft))
        rows.append(compared(cell, predicted) | {"rate error": rate, "TTFT p50 error": ttft})
    print("Each cell is: measured / forecast; times in ms.\n")
    print(markdown(rows))
    return int(worst[0] > RATE_BOUND or worst[1] > TTFT_BOUND)


if __name__ == "__main__":
    sys.exit(main())
