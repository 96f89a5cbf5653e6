"""Throughput and added latency of a router: stub decode workers, a real router and Redis.

    python -P -m pagewire.loadtest.bench.router --streams 64 512 --tokens-per-event 1 4

Prints a line for each number of streams and of tokens per event. At full speed, a stub worker sends
its next step when the client has received all events of the last one: the router is fully loaded,
and tokens are not joined. Events are counted per second of the router's CPU time. At half of that
rate, "added" is the time from a worker's message to the client's socket. A bare asyncio relay and
nginx, if it is installed, pass the same bytes on at full speed and at the router's half rate. The
last line is for short answers of one token. Figures are medians of `--repeats` repetitions; `low`
and `high` are the lowest and highest rate.

Every token of every stream is checked: a wrong or missing one ends the bench.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from pagewire.loadtest import cluster
from pagewire.loadtest.bench.clusters import run_bench
from pagewire.loadtest.bench.router_client import MAX_STREAMS
from pagewire.loadtest.bench.router_run import CONNECTIONS, Bench, Case
from pagewire.loadtest.bench.router_start import CYCLE
from pagewire.loadtest.bench.tables import emit, spread
from pagewire.services.cli.bench.stats import percentile
from pagewire.shared.base.open_files import raise_open_file_limit

STREAMS = (64, 512, 2048)
TOKENS_PER_EVENT = (1, 4)

Row = dict[str, Any]


def case_row(cases: dict[str, list[Case]]) -> Row:
    """Return the figures of one number of streams and of tokens per event.

    Args:
        cases: by target, one for each repetition.
    """
    ours = cases["router"]
    row: Row = {
        **target_row("", ours),
        **spread("events_per_cpu_s", [case.events_per_cpu_s for case in ours]),
        "tokens_per_cpu_s": median_of(ours, lambda case: case.full[1].tokens / case.full[0].cpu_s),
        "events_per_s": median_of(ours, lambda case: case.full[1].events / case.full[0].seconds),
        "cores": median_of(ours, lambda case: case.full[0].cpu_s / case.full[0].seconds),
        "loop_cores": median_of(ours, lambda case: case.full[0].loop_s / case.full[0].seconds),
        "half_load_events_per_s": median_of(ours, lambda case: case.rate),
        "half_load_joined": median_of(ours, lambda case: case.half[1].joined / case.half[1].events),
    }
    for name in ("relay", "nginx"):
        theirs = target_row(f"{name}_", cases.get(name, ()))
        for rate in ("events_per_cpu_s", "half_load_events_per_cpu_s"):
            peer = theirs[f"{name}_{rate}"]
            place = "" if rate == "events_per_cpu_s" else "half_load_"
            row[f"{place}of_{name}"] = None if peer is None else row[rate] / peer
        row |= theirs
    return row


def target_row(prefix: str, cases: Sequence[Case]) -> Row:
    """Return the figures that all targets have; without cases each is None.

    "added" is of all events at the router's half load.
    """
    figures: dict[str, Callable[[Case], float]] = {
        "events_per_cpu_s": lambda case: case.events_per_cpu_s,
        "half_load_events_per_cpu_s": lambda case: case.half[1].events / case.half[0].cpu_s,
        "added_p50_ms": lambda case: percentile(case.half[1].added, 50) * 1e3,
        "added_p99_ms": lambda case: percentile(case.half[1].added, 99) * 1e3,
    }
    return {
        prefix + name: median_of(cases, value) if cases else None for name, value in figures.items()
    }


def median_of(cases: Sequence[Case], value: Callable[[Case], float]) -> float:
    """Return the median of the cases' values."""
    return median([value(case) for case in cases])


def measure(options: argparse.Namespace, bench: Bench) -> None:
    """Print a line for each case.

    Raises:
        BenchError: a token is wrong or missing, or a process ended.
    """
    names = ("routers", "workers", "repeats", "seconds")
    setting = {name: getattr(options, name) for name in names}
    for streams in options.streams:
        cases_by_target: dict[str, list[dict[int, Case]]] = {name: [] for name in bench.targets}
        for _ in range(options.repeats):
            rates = None
            for name, target in bench.targets.items():
                cases = bench.streams(target, streams, rates)
                rates = rates or {tokens: case.rate for tokens, case in cases.items()}
                cases_by_target[name].append(cases)
        for tokens in options.tokens_per_event:
            by_name = {
                name: [run[tokens] for run in runs] for name, runs in cases_by_target.items()
            }
            case = {"streams": streams, "tokens_per_event": tokens}
            emit("router", **case, **case_row(by_name), **setting)
    short = [bench.short_answers() for _ in range(options.repeats)]
    emit(
        "router_requests",
        connections=CONNECTIONS * options.routers,
        **spread("requests_per_cpu_s", [count / span.cpu_s for span, count in short]),
        requests_per_s=median([count / span.seconds for span, count in short]),
        cores=median([span.cpu_s / span.seconds for span, _ in short]),
        **setting,
    )


def number_up_to(most: int) -> Callable[[str], int]:
    """Return the type of an option whose value is a whole number from 1 to `most`."""

    def parse(text: str) -> int:
        if not text.isdecimal() or not 1 <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text} is not a number from 1 to {most}")
        return int(text)

    return parse


def main() -> int:
    """Measure the router with all numbers of streams and print the rows."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    streams, tokens = number_up_to(MAX_STREAMS), number_up_to(CYCLE)
    number = number_up_to(64)
    parser.add_argument("--streams", type=streams, nargs="+", default=STREAMS)
    parser.add_argument("--tokens-per-event", type=tokens, nargs="+", default=TOKENS_PER_EVENT)
    parser.add_argument("--seconds", type=float, default=1.5, help="least length of a measurement")
    parser.add_argument("--repeats", type=number, default=3)
    parser.add_argument("--routers", type=number, default=1, help="router processes, a port each")
    parser.add_argument("--workers", type=number, default=2, help="number of stub decode workers")
    parser.add_argument("--program", default=cluster.PROGRAM, help="the module that is `pagewire`")
    options = parser.parse_args()
    raise_open_file_limit()

    def run() -> None:
        with tempfile.TemporaryDirectory(prefix="pw-") as folder, ExitStack() as stack:
            measure(options, Bench(options, Path(folder), stack))

    return run_bench(run)


if __name__ == "__main__":
    sys.exit(main())
