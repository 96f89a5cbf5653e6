"""What `pagewire up` checks before the first process starts, besides its options."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from pagewire.services.cli.up.cluster import ClusterContext
from pagewire.services.cli.up.cluster_plan import ClusterOptions
from pagewire.services.cli.up.command import DRAIN_TIMEOUT_S, UpSettings
from pagewire.services.cli.up.machine import inspect_machine
from pagewire.services.cli.up.progress import ServerConsole
from pagewire.services.cli.up.ready_file import ReadyFile
from pagewire.services.cli.up.router_port import operator_port, router_port
from pagewire.services.cli.up.run_dir import make_log_dir
from pagewire.shared.http.api_keys import load_keys
from pagewire.shared.model.config import load_config
from pagewire.shared.model.generation import load_sampling_defaults
from pagewire.shared.model.shard import Shard
from pagewire.shared.model.source import resolve_model, served_names
from pagewire.shared.model.transformers_model.config import require_transformers


def prepare(params: dict[str, Any], settings: UpSettings) -> ClusterContext:
    """Check everything that can be checked before the first process starts.

    Raises:
        ConfigError: the port is taken, or the model is unusable.
    """
    router, worker = settings.router, settings.worker
    router_options, worker_options = dict(settings.router_options), dict(settings.worker_options)
    drain_timeout_s = DRAIN_TIMEOUT_S
    if "drain_timeout_s" in router.model_fields_set:
        drain_timeout_s = router.drain_timeout_s
    router_options["drain_timeout_s"] = worker_options["drain_timeout_s"] = drain_timeout_s
    if "gpu_memory_utilization" in worker.model_fields_set:  # else the plan divides the default
        worker_options["gpu_memory_utilization"] = worker.gpu_memory_utilization
    port = asyncio.run(router_port(router.host, router.port))
    model_path = resolve_model(worker.model, revision=worker.revision)
    config = load_config(model_path, worker.model_impl, worker.quantization, worker.kv_cache_dtype)
    ranks = worker.tensor_parallel_size
    prefill_ranks = params.get("prefill_tensor_parallel_size") or ranks
    for count in (ranks, prefill_ranks):
        config.kv_layout(worker.block_size, config.dtype, Shard(count - 1, count))
    if worker.model_impl == "transformers":
        require_transformers()
    load_sampling_defaults(model_path, router.generation_config)
    if router.chat_template is not None:
        # Here: importing Jinja would delay all starts.
        from pagewire.shared.text.chat_template import read_template

        read_template(router.chat_template, {})
    ready_file = ReadyFile(Path(params["ready_file"])) if params["ready_file"] else None
    return ClusterContext(
        options=ClusterOptions(
            prefill=params["prefill"],
            decode=params["decode"],
            routers=params["routers"],
            ranks=ranks,
            prefill_ranks=prefill_ranks,
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
        trusts_placement=router.trust_request_placement,
        ready_file=ready_file,
        model=served_names(router.served_model_name, router.model)[0],
    )
