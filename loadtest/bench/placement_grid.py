"""`python -P -m pagewire.loadtest.bench.placement_grid`: prediction against fixed topologies.

Simulates three mixes of requests at six rates each on clusters of 2 and 4 GPUs, with placement by
prediction and by the fixed rule in every division, all with the same requests. Prints, for each
load and promise, completed answers and those that kept the promise, as a share of what the best
division reached; the best one may be another for each figure. Where the best keeps the promise for
less than a tenth of the requests, the promise does not count.

Static clusters are all xPyD, and aggregated workers with steps of 2,048 and of 512 tokens. The
workers of the predicted cluster have nine tenths of a promised gap as their `slo_gap_s` or, without
one, 97.5 % of the promised mean.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean, geometric_mean

from pagewire.loadtest.bench.open_load import MIXED
from pagewire.loadtest.bench.tables import markdown
from pagewire.services.cli.bench.load import arrival_times
from pagewire.services.cli.simulation.cluster import ClusterPlan, SimulatedCluster
from pagewire.services.cli.simulation.machine import load_machine
from pagewire.services.cli.simulation.results import Promise
from pagewire.services.cli.simulation.trace_file import read_trace
from pagewire.services.cli.simulation.worker import WorkerLimits
from pagewire.services.cli.simulation.workload import (
    Contents,
    Conversation,
    agents,
    faster,
    first_turns,
    independent,
)

PROMISES = {
    "even": Promise(ttft_s=0.6, tpot_s=0.015, gap_s=0.03),
    "soon": Promise(ttft_s=0.3, tpot_s=0.03, gap_s=0.1),
    "steady": Promise(ttft_s=2.0, tpot_s=0.02),
}
LONG = Contents(lambda _rng: 6144, lambda _rng: 256)
# Of each GPU: requests a second, or agents; what the pace of a trace is multiplied by.
RATES: Mapping[str, Sequence[float]] = {
    "long": (1.0, 2.0, 2.75, 3.25, 3.75, 4.25),
    "mixed": (6.0, 10.0, 14.0, 17.0, 20.0, 25.0),
    "agents": (16, 24, 32, 40, 52, 64),
}
TRACE_SPEEDS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.7)
LEAST_KEPT = 0.1  # share of requests
LEAST_SHARE = 0.93  # share of the best static cluster's figures, in any cell
WRONG = (1.3, 1 / 1.3)


@dataclass(frozen=True)
class MixLoad:
    """Requests of one mix at one rate for a number of GPUs.

    Attributes:
        mix: a name in `RATES`, or a trace file.
        rate: requests a second for each GPU.
    """

    mix: str
    rate: float
    gpus: int
    requests: int

    def conversations(self, seed: int) -> list[Conversation]:
        """Return the requests of a seed."""
        rate = self.rate * self.gpus
        if self.mix == "agents":
            return first_turns(agents(round(rate), seed), self.requests)
        if self.mix not in RATES:
            return faster(read_trace(Path(self.mix))[: self.requests], rate)
        times = arrival_times("poisson", rate, seed)
        return independent(times, self.requests, LONG if self.mix == "long" else MIXED, seed)


@dataclass(frozen=True)
class Trial:
    """A cluster that a load is tried on.

    Attributes:
        promises: names of those that its answers are measured by.
        prices: factors by which routers see the prices of the workers, in turn.
    """

    load: MixLoad
    seed: int
    plan: ClusterPlan
    limits: WorkerLimits
    promises: tuple[str, ...]
    machine: str
    prices: tuple[float, ...] = (1.0,)

    @property
    def is_predicted(self) -> bool:
        """Whether the router places requests by predicted times."""
        return self.plan.policy == "predicted"

    @property
    def label(self) -> str:
        """The name of the trial's cluster in tables."""
        steps = "" if self.plan.prefill else f", {self.limits.max_num_batched_tokens}"
        return self.plan.label + steps

    def run(self) -> list[Figures]:
        """Simulate; returns the figures of each promise."""
        cluster = SimulatedCluster(
            self.plan, load_machine(self.machine), self.limits, self.seed, self.prices
        )
        cluster.run(self.load.conversations(self.seed))
        summaries = {name: cluster.summary(PROMISES[name]) for name in self.promises}
        return [
            Figures(self, name, summary.completed_per_s, summary.kept_per_s, summary.kept_share)
            for name, summary in summaries.items()
        ]


@dataclass(frozen=True)
class Figures:
    """How a trial did by a promise."""

    trial: Trial
    promise: str
    completed: float
    kept: float
    kept_share: float


def trials(
    load: MixLoad,
    machine: str,
    seeds: int,
    prices: tuple[float, ...] = (1.0,),
    promises: Sequence[str] = tuple(PROMISES),
) -> Iterator[Trial]:
    """Yield the clusters that a load is tried on.

    Args:
        load: what they are tried on.
        machine: what each worker runs on.
        seeds: how many loads of this kind there are.
        prices: see `Trial`; for prediction.
        promises: names in `PROMISES`.
    """
    most, gpus = load_machine(machine).max_step_tokens, load.gpus
    static = [(ClusterPlan(num_prefill, gpus - num_prefill), most) for num_prefill in range(gpus)]
    static.append((ClusterPlan(0, gpus), min(most, 512)))
    predicted = ClusterPlan(gpus // 2, gpus - gpus // 2, "predicted")
    for seed in range(seeds):
        for plan, tokens in static:
            yield Trial(load, seed, plan, WorkerLimits(tokens), tuple(promises), machine)
        for name in promises:
            limits = WorkerLimits(most, slo_gap_s=PROMISES[name].objective_s)
            yield Trial(load, seed, predicted, limits, (name,), machine, prices)


@dataclass(frozen=True)
class Cell:
    """A load and a promise: what prediction reached, in terms of the best static cluster.

    Attributes:
        completed: share of its completed answers a second.
        kept: share of its answers a second that kept the promise; None: too few did.
    """

    load: MixLoad
    promise: str
    completed: float
    kept: float | None
    row: Mapping[str, object]


def cells(figures: Iterable[Figures]) -> list[Cell]:
    """Return the cells of some figures, which are means over seeds."""
    groups: dict[tuple[MixLoad, str], dict[tuple[bool, str], list[Figures]]] = {}
    for figure in figures:
        group = groups.setdefault((figure.trial.load, figure.promise), {})
        group.setdefault((figure.trial.is_predicted, figure.trial.label), []).append(figure)
    return [_cell(load, promise, group) for (load, promise), group in groups.items()]


def _cell(load: MixLoad, promise: str, group: Mapping[tuple[bool, str], list[Figures]]) -> Cell:
    static = {label: runs for (is_predicted, label), runs in group.items() if not is_predicted}
    (own,) = [runs for (is_predicted, _), runs in group.items() if is_predicted]

    def best(figure: Callable[[Figures], float]) -> tuple[float, float, str]:
        means = {label: fmean(map(figure, runs)) for label, runs in static.items()}
        label = max(means, key=means.__getitem__)
        mine = fmean(map(figure, own))
        return mine / means[label] if means[label] else 1.0, mine, label

    completed, own_completed, completed_by = best(lambda each: each.completed)
    kept, own_kept, kept_by = best(lambda each: each.kept)
    counts = (
        max(fmean(figures.kept_share for figures in runs) for runs in static.values()) >= LEAST_KEPT
    )
    row = {
        "load": f"{load.mix} {load.rate * load.gpus:g}",
        "GPUs": load.gpus,
        "promise": promise,
        "done/s": own_completed,
        "share": completed,
        "of": completed_by,
        "kept/s": own_kept,
        "kept share": kept if counts else None,
        "of ": kept_by if counts else None,
    }
    return Cell(load, promise, completed, kept if counts else None, row)


def verdicts(cells_of_grid: Sequence[Cell]) -> list[dict[str, object]]:
    """Return for each mix, and for all of them, the mean, the worst and the best shares."""
    mixes = dict.fromkeys(cell.load.mix for cell in cells_of_grid)
    rows = []
    for name in (*mixes, "all"):
        of_mix = [cell for cell in cells_of_grid if name in (cell.load.mix, "all")]
        kept = [cell.kept for cell in of_mix if cell.kept is not None]
        for figure, shares in (("completed", [cell.completed for cell in of_mix]), ("kept", kept)):
            if shares:
                rows.append(
                    {
                        "mix": name,
                        "figure": figure,
                        "cells": len(shares),
                        "geomean": geometric_mean([max(share, 1e-3) for share in shares]),
                        "worst": min(shares),
                        "best": max(shares),
                    }
                )
    return rows


def compare(all_trials: Sequence[Trial], jobs: int = 1) -> list[Cell]:
    """Run all trials, in parallel processes if wanted, and compare their figures."""
    if jobs == 1:
        return cells(each for trial in all_trials for each in trial.run())
    with ProcessPoolExecutor(jobs) as pool:
        return cells(figure for figures in pool.map(Trial.run, all_trials) for figure in figures)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the grid and print it; returns 1 if prediction loses."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mixes", nargs="+", default=list(RATES), help="or trace files")
    parser.add_argument("--gpus", type=int, nargs="+", default=[2, 4])
    levels = range(6)
    parser.add_argument(
        "--levels", type=int, nargs="+", choices=levels, default=list(levels), help="of rates"
    )
    parser.add_argument("--requests", type=int, default=2000, help="requests of each load")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--machine", default="h200-llama-3.1-8b", help="name, or a JSON file")
    parser.add_argument("--jobs", type=int, default=1, help="parallel processes")
    parser.add_argument(
        "--wrong-prices", action="store_true", help="by 30 %%, too high and too low in turn"
    )
    options = parser.parse_args(arguments)
    loads = [
        MixLoad(mix, RATES.get(mix, TRACE_SPEEDS)[level], gpus, options.requests)
        for mix, gpus, level in product(options.mixes, options.gpus, options.levels)
    ]
    prices = WRONG if options.wrong_prices else (1.0,)
    wanted = [
        trial for load in loads for trial in trials(load, options.machine, options.seeds, prices)
    ]
    grid = compare(wanted, options.jobs)
    print(markdown([dict(cell.row) for cell in grid]))
    print()
    rows = verdicts(grid)
    print(markdown(rows))
    lowest = min(
        min(cell.completed, cell.completed if cell.kept is None else cell.kept) for cell in grid
    )
    return int(lowest < LEAST_SHARE)


if __name__ == "__main__":
    sys.exit(main())
