"""`pagewire up`: its options, and what can be checked of them alone.

This module imports few packages: `make up` checks its options (`check.py`) before it installs the
others.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from pagewire.services.cli.error_exit import one_line_errors
from pagewire.services.cli.imports import without_garbage_searches
from pagewire.services.cli.options import OWN_REDIS, options_of, with_settings
from pagewire.shared.base.addresses import is_address
from pagewire.shared.model.source import DEMO
from pagewire.shared.settings.config import RouterSettings, WorkerSettings, load_settings
from pagewire.shared.settings.texts import ENGINE

OF_ONE_SERVICE = (
    "worker_id",
    "router_id",
    "control_port",
    "metrics_port",
    "fd",
    "operator_fd",
)
DRAIN_TIMEOUT_S = 30.0  # somebody waits at the terminal
OWN = ("host", "port", "operator_port", "redis_url", "drain_timeout_s")  # settings of `up` itself
COUNTS = ("prefill", "decode", "routers", "prefill_tensor_parallel_size")
NOT_SETTINGS = (*COUNTS, *OWN, "log_dir", "ready_file", "verbose")

Prefill = Annotated[
    int,
    typer.Option(min=0, max=64, help="Prefill workers; 0: decode workers compute prompts, too."),
]
Decode = Annotated[int, typer.Option(min=1, max=64, help="Number of decode workers.")]
Routers = Annotated[
    int,
    typer.Option(min=1, max=64, help="Router processes, which share one listening socket."),
]
PrefillRanks = Annotated[
    int | None,
    typer.Option(
        "--prefill-tensor-parallel-size",
        min=1,
        max=64,
        help="Processes that compute the model in each prefill worker.  [default: as in decode "
        "workers, --tensor-parallel-size]",
        rich_help_panel=ENGINE,
    ),
]
LogDir = Annotated[
    Path | None,
    typer.Option(help="Directory for the services' logs.  [default: ~/.cache/pagewire/runs]"),
]
ReadyFilePath = Annotated[
    Path | None,
    typer.Option(
        help="JSON file about the cluster, written once it is ready, removed when it stops.  "
        "[default: none]"
    ),
]
Verbose = Annotated[bool, typer.Option("--verbose", help="Print the services' logs, too.")]


@with_settings(
    RouterSettings,
    WorkerSettings,
    omit=OF_ONE_SERVICE,
    unset={"redis_url": OWN_REDIS, "drain_timeout_s": f"{DRAIN_TIMEOUT_S:g}"},
)
def up(
    ctx: typer.Context,
    prefill: Prefill = 1,
    decode: Decode = 1,
    routers: Routers = 2,
    prefill_tensor_parallel_size: PrefillRanks = None,
    log_dir: LogDir = None,
    ready_file: ReadyFilePath = None,
    verbose: Verbose = False,
) -> None:
    """Start a cluster on this machine; Ctrl-C stops it.

    Settings can also come from the environment: PAGEWIRE_MODEL is --model. The numbers of workers
    and routers cannot.

    Example: pagewire up --prefill 1 --decode 2 --model demo --port 8000
    """
    with one_line_errors():
        settings = check_options(ctx.params)
        with without_garbage_searches():
            from pagewire.services.cli.up.cluster import run_cluster
            from pagewire.services.cli.up.prepare import prepare
            from pagewire.shared.base.open_files import raise_open_file_limit

        context = prepare(ctx.params, settings)
        raise_open_file_limit()
        asyncio.run(run_cluster(context))


@dataclass(frozen=True)
class UpSettings:
    """The settings of the services, and which of them are options of their command lines."""

    router: RouterSettings
    worker: WorkerSettings
    router_options: dict[str, Any]
    worker_options: dict[str, Any]


def check_options(params: dict[str, Any]) -> UpSettings:
    """Check the options and the environment.

    Raises:
        ConfigError: a setting is out of range.
    """
    given = {name: value for name, value in params.items() if name not in NOT_SETTINGS}
    router_options = options_of(RouterSettings, given)
    worker_options = options_of(WorkerSettings, given)
    others = {name: params[name] for name in OWN}
    router = load_settings(RouterSettings, {**router_options, **others})
    if router.model == DEMO and "trust_request_placement" not in router.model_fields_set:
        router_options["trust_request_placement"] = True  # so that the first answer shows KV move
        router = load_settings(RouterSettings, {**router_options, **others})
    if not is_address(router.host):  # routers get the socket, and not the name that it has
        router_options["allowed_hosts"] = ",".join((*(router.allowed_hosts or ()), router.host))
    worker = load_settings(WorkerSettings, worker_options)
    return UpSettings(router, worker, router_options, worker_options)
