"""Forecasts by simulation what `two_gpus` measures, or compares forecasts and measurements.

    python -P -m pagewire.loadtest.bench.forecast --loads 6144/256@6.5 mixed@36#1 --seconds 30
    python -P -m pagewire.loadtest.bench.forecast --clients 512 --measured FILE

Requests come at the same times and are as long as those that `two_gpus` sends with these options.
Placement by prediction is simulated once more with an objective for gaps. FILE has what `two_gpus`
printed. A figure that it has, too, is printed as "measured / forecast". Times are in ms.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pagewire.loadtest.bench.clusters import Topology, run_bench
from pagewire.loadtest.bench.crowd import PROMPT, TOKENS, WARM_UP_S, start_delays
from pagewire.loadtest.bench.open_load import FORM, PROMISE, WITH_OBJECTIVE, OpenLoad, contents_of
from pagewire.loadtest.bench.tables import markdown, text_of
from pagewire.loadtest.cluster import BenchError
from pagewire.services.cli.simulation.cluster import ClusterPlan, SimulatedCluster
from pagewire.services.cli.simulation.machine import MachinePrices, load_machine
from pagewire.services.cli.simulation.worker import WorkerLimits
from pagewire.services.cli.simulation.workload import clients, independent
from pagewire.shared.base.errors import ConfigError

ROUTERS = 2  # as `pagewire up` starts them
FASTEST_ANSWER_S = 0.5  # no answer is faster; bounds the requests of a client in a closed loop
TOPOLOGIES = ("1:1:2048:predicted", "1:1:2048:prefix", "0:2:2048")

Figures = dict[str, float]


def cluster_of(
    topology: Topology, machine: MachinePrices, max_num_seqs: int, gap_s: float = math.inf
) -> SimulatedCluster:
    """Return a cluster without requests, whose workers have an objective for gaps or none."""
    plan = ClusterPlan(topology.prefill, topology.decode, topology.placement, routers=ROUTERS)
    limits = WorkerLimits(topology.budget, max_num_seqs, caching=False, slo_gap_s=gap_s)
    return SimulatedCluster(plan, machine, limits)


def open_load_figures(cluster: SimulatedCluster, load: OpenLoad, seconds: float) -> Figures:
    """Return what `goodput` would measure, by the same names."""
    arrivals = load.arrivals(seconds)
    times = iter([arrival.at for arrival in arrivals])
    cluster.run(independent(times, len(arrivals), contents_of(load.mix), load.seed))
    summary = cluster.summary(PROMISE)
    return {
        "req_s": summary.completed_per_s,
        "good_s": summary.kept_per_s,
        "ttft_p50": summary.ttft.p50,
        "ttft_p99": summary.ttft.p99,
        "itl_p50": summary.gap.p50,
        "itl_p99": summary.gap.p99,
    }


def crowd_figures(cluster: SimulatedCluster, count: int, seconds: float) -> Figures:
    """Return what the bench of that name would measure with clients in a closed loop."""
    end_s = WARM_UP_S + seconds
    contents = contents_of(f"{PROMPT}/{TOKENS}")
    turns = int(end_s / FASTEST_ANSWER_S)
    load = clients(count, count * turns, contents, seed=0)
    delays = start_delays(count, WARM_UP_S)
    cluster.run([replace(each, start_s=at) for each, at in zip(load, delays, strict=True)], end_s)
    tokens = sum(WARM_UP_S <= at < end_s for answer in cluster.answers for at in answer.times)
    return {"tokens_per_s": tokens / seconds}


def forecasts(
    args: argparse.Namespace, machine: MachinePrices
) -> Iterator[tuple[str, str, Figures]]:
    """Yield clusters' and loads' names, with what is forecast of them."""

    def cluster(topology: Topology, gap_s: float = math.inf) -> SimulatedCluster:
        return cluster_of(topology, machine, args.max_num_seqs, gap_s)

    def figures_of(topology: Topology, load: OpenLoad, gap_s: float = math.inf) -> Figures:
        return open_load_figures(cluster(topology, gap_s), load, args.seconds)

    for count in args.clients:
        for topology in args.topologies:
            figures = crowd_figures(cluster(topology), count, args.seconds)
            yield topology.label, f"{count} clients", figures
    for load in args.loads:
        for topology in args.topologies:
            yield topology.label, load.name, figures_of(topology, load)
            if topology.policy == "predicted":
                figures = figures_of(topology, load, PROMISE.objective_s)
                yield topology.label + WITH_OBJECTIVE, load.name, figures


def read_measured(path: Path) -> dict[tuple[str, str], Mapping[str, Any]]:
    """Return the rows of a bench's output, by the names of cluster and load.

    Raises:
        BenchError: the file cannot be read, or a line of it is not complete.
    """
    found = dict[tuple[str, str], Mapping[str, Any]]()
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        results = [line.removeprefix("RESULT ") for line in lines if line.startswith("RESULT ")]
        rows = [json.loads(result) for result in results]
    except (OSError, ValueError) as exc:
        raise BenchError(f"{path} is not the output of a bench: {exc}") from exc
    for row in rows:
        if row.get("what") == "crowd":
            found[row["cluster"], f"{row['clients']} clients"] = row
        elif row.get("what") == "goodput":
            rate = float(row["kind"].removeprefix("rate "))
            found[row["cluster"], OpenLoad(row["mix"], rate, row["seed"]).name] = row
    return found


def compared(figures: Figures, measured: Mapping[str, Any]) -> dict[str, str]:
    """Return each figure as text, with the measured one before it if there is one."""
    return {
        name: " / ".join(text_of(float(each[name])) for each in (measured, figures) if name in each)
        for name in figures
    }


def run(args: argparse.Namespace) -> None:
    """Forecast each load on each cluster, and print the table.

    Raises:
        BenchError: an option has no such form, or a file cannot be read.
    """
    if not args.loads and not args.clients:
        raise BenchError("there is nothing to forecast: give --loads or --clients")
    args.loads = [OpenLoad.parse(text) for text in args.loads]
    args.topologies = [Topology.parse(text, args.budget) for text in args.topologies]
    try:
        machine = load_machine(args.machine)
        measured = {} if args.measured is None else read_measured(args.measured)
        rows = [
            {"load": load, "cluster": label, **compared(figures, measured.get((label, load), {}))}
            for label, load, figures in forecasts(args, machine)
        ]
    except ConfigError as exc:
        raise BenchError(str(exc)) from exc
    print(markdown(rows))


def main(arguments: Sequence[str] | None = None) -> int:
    """Forecast; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--loads", nargs="*", default=[], help=FORM)
    parser.add_argument("--clients", nargs="*", type=int, default=[], help="in a closed loop")
    parser.add_argument("--topologies", nargs="+", default=list(TOPOLOGIES))
    parser.add_argument("--seconds", type=float, default=12.0, help="length of each load")
    parser.add_argument("--budget", type=int, default=2048, help="tokens of a step")
    parser.add_argument("--max-num-seqs", type=int, default=256, help="most sequences of a worker")
    parser.add_argument("--machine", default="h200-llama-3.1-8b", help="name, or a JSON file")
    parser.add_argument("--measured", type=Path, help="output of two_gpus")
    args = parser.parse_args(arguments)
    return run_bench(lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
