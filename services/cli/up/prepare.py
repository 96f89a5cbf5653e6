"""Checks what `pagewire up` needs, besides its options, before the first process starts."""

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
from pagewire.shared.base.errors import ConfigError
from pagewire.shared.http.api_keys import load_keys
from pagewire.shared.model.config import load_config
from pagewire.shared.model.generation import load_sampling_defaults
from pagewire.shared.model.model_config import ModelConfig
from pagewire.shared.model.shard import Shard
from pagewire.shared.model.source import resolve_model, served_names
from pagewire.shared.model.transformers_model.config import require_transformers
from pagewire.shared.settings.config import WorkerSettings


def prepare(params: dict[str, Any], settings: UpSettings) -> ClusterContext:
    """Check everything that can be checked before the first process starts.

    Raises:
        ConfigError: the port is taken, the model is unusable, or prefill and decode workers would
            have numbers of ranks that cannot exchange KV blocks.
    """
    router, worker = settings.router, settings.worker
    router_options, worker_options = dict(settings.router_options), dict(settings.worker_options)
    drain_timeout_s = DRAIN_TIMEOUT_S
    if "drain_timeout_s" in router.model_fields_set:
        drain_timeout_s = router.drain_timeout_s
    router_options["drain_timeout_s"] = worker_options["drain_timeout_s"] = drain_timeout_s
    if "gpu_memory_utilization" in worker.model_fields_set:  # else the plan divides the default
        worker_options["gpu_memory_utilization"] = worker.gpu_memory_utilization
    if worker.ranks_share_gpu:  # also if the environment says so
        worker_options["ranks_share_gpu"] = True
    port = asyncio.run(router_port(router.host, router.port))
    model_path = resolve_model(worker.model, revision=worker.revision)
    config = load_config(model_path, worker.model_impl, worker.quantization, worker.kv_cache_dtype)
    ranks = worker.tensor_parallel_size
    prefill_ranks = params.get("prefill_tensor_parallel_size") or ranks
    _check_ranks(worker, config, ranks, prefill_ranks if params["prefill"] else ranks)
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


def _check_ranks(
    worker: WorkerSettings, config: ModelConfig, ranks: int, prefill_ranks: int
) -> None:
    """Check that these numbers of ranks can share the model, and exchange its KV blocks.

    Raises:
        ConfigError: they cannot; names both.
    """
    ours, theirs = (
        config.kv_layout(worker.block_size, config.dtype, Shard(count - 1, count))
        for count in (ranks, prefill_ranks)
    )
    if ranks == prefill_ranks:
        return
    why = None
    if not ours.shares_heads_like(theirs):
        why = (
            f"several ranks would have the same of the model's {config.cached_token.heads} KV heads"
        )
    elif worker.batch_invariant:
        why = "--batch-invariant needs the same number"
    elif worker.load_format == "dummy":
        why = "--load-format dummy makes other weights for another number"
    elif config.quantization is not None and config.quantization.while_loading:
        why = "--quantization fp8 makes other weights for another number"
    if why is not None:
        raise ConfigError(
            f"--tensor-parallel-size {ranks} and --prefill-tensor-parallel-size {prefill_ranks} "
            f"cannot exchange KV blocks: {why}; choose one number for both"
        )
