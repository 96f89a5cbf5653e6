"""`pagewire simulate`: a load on a cluster that does not exist, in virtual time."""

from __future__ import annotations

import re
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from pagewire.services.cli.error_exit import one_line_errors
from pagewire.services.cli.simulation import options
from pagewire.services.cli.simulation.cluster import ClusterPlan, SimulatedCluster
from pagewire.services.cli.simulation.results import Promise, SimulationSummary
from pagewire.services.cli.simulation.view import table_of
from pagewire.services.cli.terminal import print_whole
from pagewire.shared.base.errors import ConfigError

MAX_WORKERS = 256

_WORKERS = "Workers: 1P1D, or a number of aggregated ones; several of them after commas."
Workers = Annotated[str, typer.Option(help=_WORKERS, rich_help_panel="Cluster")]
_LOCAL = "Uncached prompt tokens that a decode worker computes itself."
Local = Annotated[
    int, typer.Option("--local-prefill-tokens", min=0, help=_LOCAL, rich_help_panel="Cluster")
]


@options.with_load
def simulate(
    ctx: typer.Context,
    workers: Workers = "1P1D",
    local_prefill_tokens: Local = 32,
    *,
    as_json: options.AsJson = False,
) -> None:
    """Simulate a load on clusters, without a GPU.

    Scheduler, prefix caches and placement are the real ones; steps and
    transfers take as long as the machine's prices say.

    Example: pagewire simulate --rate 8 --prompt-tokens 6000 --workers 1P1D,2
    """
    with one_line_errors():
        params = ctx.params
        policy, routers = params["policy"], params["routers"]
        plans = dict.fromkeys(parse_workers(text, policy, routers) for text in workers.split(","))
        load, machine = options.load_of(params), options.machine_of(params)
        limits = options.limits_of(params, machine, local_prefill_tokens)
        promise = options.promise_of(params)
        summaries: dict[str, SimulationSummary] = {}
        for plan in plans:
            cluster = SimulatedCluster(plan, machine, limits, params["seed"])
            cluster.run(load)
            summaries[plan.label] = cluster.summary(promise)
        show(summaries, promise, as_json)


def parse_workers(text: str, policy: str, routers: int) -> ClusterPlan:
    """Parse "1P1D" or "2".

    Raises:
        ConfigError: the text has another form, or names no worker that decodes, or too many.
    """
    matched = re.fullmatch(r"(?:(\d{1,3})P)?(\d{1,3})(D?)", text.strip(), re.IGNORECASE)
    if matched is None or (matched[1] is not None and not matched[3]):
        raise ConfigError(f"--workers {text}: give 1P1D, or a number of aggregated workers")
    plan = ClusterPlan(int(matched[1] or 0), int(matched[2]), policy, routers)
    if not plan.decode or plan.prefill + plan.decode > MAX_WORKERS:
        raise ConfigError(
            f"--workers {text}: there must be a decode worker, and at most {MAX_WORKERS} workers"
        )
    return plan


def show(summaries: dict[str, SimulationSummary], promise: Promise, as_json: bool) -> None:
    """Print the figures of simulations by the clusters' labels."""
    if as_json:
        print_json(summaries)
    else:
        print_whole(Console(), table_of(summaries, promise))


def print_json(value: object) -> None:
    """Print figures as JSON; those that are not a number are null."""
    print(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())
