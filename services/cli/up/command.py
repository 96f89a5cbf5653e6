"""`pagewire up`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic_settings import BaseSettings

from pagewire.services.cli.errors import one_line_errors
from pagewire.services.cli.options import OWN_REDIS, with_settings
from pagewire.services.cli.up.cluster import ClusterContext, run_cluster
from pagewire.services.cli.up.cluster_plan import ClusterOptions
from pagewire.services.cli.up.machine import inspect_machine
from pagewire.services.cli.up.progress import ServerConsole
from pagewire.services.cli.up.ready_file import ReadyFile
from pagewire.services.cli.up.router_port import operator_port, router_port
from pagewire.services.cli.up.run_dir import make_log_dir
from pagewire.shared.base.open_files import raise_open_file_limit
from pagewire.shared.http.api_keys import load_keys
from pagewire.shared.model.config import load_config
from pagewire.shared.model.generation import load_sampling_defaults
from pagewire.shared.model.source import resolve_model
from pagewire.shared.model.transformers_model.config import require_transformers
from pagewire.shared.settings.config import RouterSettings, WorkerSettings, load_settings

OF_ONE_SERVICE = (
    "worker_id",
    "router_id",
    "control_port",
    "metrics_port",
    "fd",
    "operator_fd",
)
DRAIN_TIMEOUT_S = 30.0  # somebody waits at the terminal
OWN = ("host", "port", "operator_port", "redis_url", "drain_timeout_s")  # that `up` itself acts on
NOT_SETTINGS = ("prefill", "decode", "routers", *OWN, "log_dir", "ready_file", "verbose")

Prefill = Annotated[
    int,
    typer.Option(min=0, max=64, help="Prefill workers; 0: decode workers compute prompts, too."),
]
Decode = Annotated[int, typer.Option(min=1, max=64, help="Decode workers.")]
Routers = Annotated[
    int,
    typer.Option(min=1, max=64, help="Router processes, which accept connections from one socket."),
]
LogDir = Annotated[
    Path | None,
    typer.Option(help="Where the services' logs go.  [default: ~/.cache/pagewire/runs]"),
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
        context = prepare(ctx.params)
        raise_open_file_limit()
        asyncio.run(run_cluster(context))


def options_of(kind: type[BaseSettings], given: dict[str, Any]) -> dict[str, Any]:
    """Return the options that are settings of a class."""
    return {name: value for name, value in given.items() if name in kind.model_fields}


def prepare(params: dict[str, Any]) -> ClusterContext:
    """Check everything that can be checked before the first process starts.

    Raises:
        ConfigError: a setting is out of range, the port is taken, or the model is unusable.
    """
    given = {name: value for name, value in params.items() if name not in NOT_SETTINGS}
    router_options = options_of(RouterSettings, given)
    worker_options = options_of(WorkerSettings, given)
    others = {name: params[name] for name in OWN}
    router = load_settings(RouterSettings, {**router_options, **others})
    worker = load_settings(WorkerSettings, worker_options)
    drain_timeout_s = DRAIN_TIMEOUT_S
    if "drain_timeout_s" in router.model_fields_set:
        drain_timeout_s = router.drain_timeout_s
    router_options["drain_timeout_s"] = worker_options["drain_timeout_s"] = drain_timeout_s
    if "gpu_memory_utilization" in worker.model_fields_set:  # else the plan divides the default
        worker_options["gpu_memory_utilization"] = worker.gpu_memory_utilization
    port = asyncio.run(router_port(router.host, router.port))
    model_path = resolve_model(worker.model, revision=worker.revision)
    load_config(model_path, worker.model_impl)
    if worker.model_impl == "transformers":
        require_transformers()
    load_sampling_defaults(model_path, router.generation_config)
    ready_file = ReadyFile(Path(params["ready_file"])) if params["ready_file"] else None
    return ClusterContext(
        options=ClusterOptions(
            prefill=params["prefill"],
            decode=params["decode"],
            routers=params["routers"],
            host=router.host,
            port=port,
            operator_port=operator_port(router.operator_port, port),
            device=worker.device,
            worker_options=worker_options,
            router_options=router_options,
        ),
        machine=inspect_machine(),
        secret=router.cluster_secret.get_secret_value(),
        redis_url=router.redis_url if "redis_url" in router.model_fields_set else None,
        drain_timeout_s=drain_timeout_s,
        log_dir=make_log_dir(Path(params["log_dir"]) if params["log_dir"] else None),
        console=ServerConsole(),
        echo=params["verbose"],
        log_format=router.log_format,
        needs_key=load_keys(router) is not None,
        ready_file=ready_file,
    )
