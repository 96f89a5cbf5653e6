"""Command-line options that several commands share; each sets the setting of the same name.

An option that is not given is None, so that the environment variable is used. Its help is the
description and default from the settings class.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic_settings import BaseSettings

from pagewire.shared.settings import types as setting_types
from pagewire.shared.settings.base import ClusterSettings
from pagewire.shared.settings.config import EngineSettings, RouterSettings, WorkerSettings
from pagewire.shared.settings.texts import default_text, description

ENGINE = "Engine"
NETWORK = "Network"


def setting(
    kind: type[BaseSettings],
    name: str,
    panel: str | None = None,
    *,
    note: str = "",
    unset: str | None = None,
    flags: tuple[str, ...] = (),
) -> Any:
    """Return an option for a field of a settings class.

    Args:
        kind: the settings class.
        name: name of the field.
        panel: group of the help page; None is the first group.
        note: text after the field's description.
        unset: what the command does by default, if that is not the field's default.
        flags: the option's names; by default, one made from the parameter's name.
    """
    text = f"{description(kind, name)} {note}".rstrip()
    default = unset or default_text(kind, name)
    return typer.Option(*flags, help=f"{text}  [default: {default}]", rich_help_panel=panel)


def _engine(name: str, *flags: str) -> Any:
    return setting(EngineSettings, name, ENGINE, flags=flags)


def _network(kind: type[ClusterSettings], name: str) -> Any:
    return setting(kind, name, NETWORK)


def redis_url(unset: str | None = None) -> Any:
    """Return the option for Redis; `unset` says what the command does without it."""
    note = "Put one with a password into PAGEWIRE_REDIS_URL: other users can see this command line."
    return setting(ClusterSettings, "redis_url", NETWORK, note=note, unset=unset)


Model = Annotated[str | None, setting(EngineSettings, "model")]
Revision = Annotated[str | None, setting(EngineSettings, "revision")]
ModelImpl = Annotated[setting_types.ModelImpl | None, setting(EngineSettings, "model_impl")]
ServedModelName = Annotated[str | None, setting(RouterSettings, "served_model_name")]
ApiKeyFile = Annotated[Path | None, _network(RouterSettings, "api_key_file")]
CorsOrigins = Annotated[str | None, _network(RouterSettings, "cors_origins")]
GenerationConfig = Annotated[
    setting_types.GenerationConfig | None, setting(RouterSettings, "generation_config")
]
SpecialTokensInMessages = Annotated[
    setting_types.SpecialTokens | None, setting(RouterSettings, "special_tokens_in_messages")
]
ToolParser = Annotated[setting_types.ToolParserName | None, setting(RouterSettings, "tool_parser")]
ReasoningParser = Annotated[
    setting_types.ReasoningParserName | None, setting(RouterSettings, "reasoning_parser")
]
Device = Annotated[setting_types.Device | None, _engine("device")]
Dtype = Annotated[setting_types.Dtype | None, _engine("dtype")]
LoadFormat = Annotated[setting_types.LoadFormat | None, _engine("load_format")]
Kernels = Annotated[setting_types.Kernels | None, _engine("kernels")]
BlockSize = Annotated[int | None, _engine("block_size")]
NumBlocks = Annotated[int | None, _engine("num_blocks")]
GpuMemoryUtilization = Annotated[float | None, _engine("gpu_memory_utilization")]
MaxModelLen = Annotated[int | None, _engine("max_model_len")]
MaxNumSeqs = Annotated[int | None, _engine("max_num_seqs")]
MaxNumBatchedTokens = Annotated[int | None, _engine("max_num_batched_tokens")]
MaxWaiting = Annotated[int | None, _engine("max_waiting")]
EnablePrefixCaching = Annotated[
    bool | None,
    _engine("enable_prefix_caching", "--enable-prefix-caching/--no-enable-prefix-caching"),
]
CudaGraphs = Annotated[bool | None, _engine("cuda_graphs", "--cuda-graphs/--no-cuda-graphs")]
BatchInvariant = Annotated[
    bool | None, _engine("batch_invariant", "--batch-invariant/--no-batch-invariant")
]
LocalPrefillTokens = Annotated[int | None, setting(WorkerSettings, "local_prefill_tokens", ENGINE)]
KvTransport = Annotated[setting_types.KvTransport | None, _network(WorkerSettings, "kv_transport")]
KvNetwork = Annotated[setting_types.KvNetwork | None, _network(WorkerSettings, "kv_network")]
StagingSlots = Annotated[int | None, _network(WorkerSettings, "staging_slots")]
StagingSlotBytes = Annotated[int | None, _network(WorkerSettings, "staging_slot_bytes")]
WorkerId = Annotated[str | None, _network(WorkerSettings, "worker_id")]
ControlPort = Annotated[int | None, _network(WorkerSettings, "control_port")]
MetricsPort = Annotated[int | None, _network(WorkerSettings, "metrics_port")]
RedisUrl = Annotated[str | None, redis_url()]
OwnRedisUrl = Annotated[str | None, redis_url("a private server is started")]
Host = Annotated[str | None, _network(ClusterSettings, "host")]
Port = Annotated[int | None, _network(RouterSettings, "port")]
Fd = Annotated[int | None, _network(RouterSettings, "fd")]
OperatorPort = Annotated[int | None, _network(RouterSettings, "operator_port")]
OperatorFd = Annotated[int | None, _network(RouterSettings, "operator_fd")]
RouterId = Annotated[str | None, _network(RouterSettings, "router_id")]
Policy = Annotated[setting_types.Policy | None, _network(RouterSettings, "policy")]
MaxQueue = Annotated[int | None, _network(RouterSettings, "max_queue")]
DrainTimeoutS = Annotated[float | None, _network(ClusterSettings, "drain_timeout_s")]
OwnDrainTimeoutS = Annotated[
    float | None, setting(ClusterSettings, "drain_timeout_s", NETWORK, unset="30")
]
LogLevel = Annotated[setting_types.LogLevel | None, setting(ClusterSettings, "log_level")]
LogFormat = Annotated[setting_types.LogFormat | None, setting(ClusterSettings, "log_format")]
