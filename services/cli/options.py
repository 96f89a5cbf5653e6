"""Command-line options that several commands share; each sets the setting of its name.

An option that is not given is None, so that the environment counts. The default that its help shows
is the one of the settings class.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer
from pydantic_settings import BaseSettings

from pagewire.shared.config import ClusterSettings, EngineSettings, RouterSettings, WorkerSettings

ENGINE = "Engine"
NETWORK = "Network"


def setting(
    kind: type[BaseSettings],
    name: str,
    text: str,
    panel: str | None = None,
    *,
    unset: str | None = None,
    flags: tuple[str, ...] = (),
) -> Any:
    """Return an option for a field of a settings class, whose help shows the field's default.

    Args:
        kind: the settings class.
        name: of the field.
        text: the help.
        panel: of the help page; None puts it among the first.
        unset: what happens by default, where the field's default is computed or None.
        flags: in place of the one made from the parameter's name.
    """
    default = kind.model_fields[name].default
    if unset is None:
        unset = ("off", "on")[default] if isinstance(default, bool) else str(default)
    return typer.Option(*flags, help=f"{text}  [default: {unset}]", rich_help_panel=panel)


def _engine(name: str, text: str, unset: str | None = None, *flags: str) -> Any:
    return setting(EngineSettings, name, text, ENGINE, unset=unset, flags=flags)


def _worker(name: str, text: str, unset: str | None = None) -> Any:
    return setting(WorkerSettings, name, text, NETWORK, unset=unset)


Model = Annotated[
    str | None,
    setting(
        EngineSettings,
        "model",
        'A Hugging Face directory, a hub id, or "demo" for the model in the package.',
    ),
]
ServedModelName = Annotated[
    str | None,
    setting(
        RouterSettings,
        "served_model_name",
        "The name that clients ask for.",
        unset="the directory's or hub id's last part",
    ),
]
GenerationConfig = Annotated[
    Literal["auto", "none"] | None,
    setting(
        RouterSettings,
        "generation_config",
        "auto: a request that gives no temperature, top_p, top_k or max_tokens gets those of the "
        "model's generation_config.json.",
    ),
]
Device = Annotated[
    Literal["auto", "cpu", "cuda"] | None,
    _engine("device", "auto takes CUDA where there is a GPU."),
]
Dtype = Annotated[
    Literal["auto", "float32", "float16", "bfloat16"] | None,
    _engine("dtype", "Of weights and KV cache; auto takes the checkpoint's."),
]
LoadFormat = Annotated[
    Literal["safetensors", "dummy"] | None,
    _engine("load_format", "dummy: random weights, for benchmarks."),
]
Kernels = Annotated[
    Literal["auto", "triton", "torch"] | None,
    _engine("kernels", "auto: Triton on CUDA, torch on the CPU."),
]
BlockSize = Annotated[int | None, _engine("block_size", "Tokens in a KV block: 16, 32, 64, 128.")]
NumBlocks = Annotated[
    int | None, _engine("num_blocks", "Blocks in the KV pool.", "as many as fit into memory")
]
GpuMemoryUtilization = Annotated[
    float | None,
    _engine(
        "gpu_memory_utilization",
        "Share of the GPU's memory for a worker; workers on one GPU divide the default.",
    ),
]
MaxModelLen = Annotated[
    int | None,
    _engine("max_model_len", "Longest prompt plus answer, in tokens.", "the model's longest"),
]
MaxNumSeqs = Annotated[int | None, _engine("max_num_seqs", "Sequences that run at once.")]
MaxNumBatchedTokens = Annotated[
    int | None,
    _engine("max_num_batched_tokens", "Tokens of one step; longer prompts run in chunks."),
]
MaxWaiting = Annotated[
    int | None, _engine("max_waiting", "Sequences that may wait for those that run.")
]
EnablePrefixCaching = Annotated[
    bool | None,
    _engine(
        "enable_prefix_caching",
        "Reuse blocks with equal content.",
        None,
        "--enable-prefix-caching/--no-enable-prefix-caching",
    ),
]
CudaGraphs = Annotated[
    bool | None,
    _engine(
        "cuda_graphs",
        "Replay steps and copies of KV blocks as CUDA graphs.",
        None,
        "--cuda-graphs/--no-cuda-graphs",
    ),
]
KvTransport = Annotated[
    Literal["auto", "ipc", "ucx", "zmq"] | None,
    _worker(
        "kv_transport",
        "auto: between GPUs CUDA IPC, then UCX if the KV network is private; else ZeroMQ, which is "
        "encrypted.",
    ),
]
KvNetwork = Annotated[
    Literal["untrusted", "private"] | None,
    _worker(
        "kv_network",
        "private: auto may take UCX. Anyone who reaches a UCX port can end the worker.",
    ),
]
LocalPrefillTokens = Annotated[
    int | None,
    setting(
        WorkerSettings,
        "local_prefill_tokens",
        "A decode worker computes up to this many uncached prompt tokens itself.",
        ENGINE,
    ),
]
StagingSlots = Annotated[int | None, _worker("staging_slots", "KV segments under way at once.")]
StagingSlotBytes = Annotated[
    int | None,
    _worker("staging_slot_bytes", "Largest KV segment, in bytes.", "by the block's size"),
]
WorkerId = Annotated[
    str | None, _worker("worker_id", "Stable name of this worker.", "a random one")
]
ControlPort = Annotated[
    int | None, _worker("control_port", "Of the control socket; 0 takes a free one.")
]
MetricsPort = Annotated[
    int | None, _worker("metrics_port", "Of /metrics and /health; 0 takes a free one.")
]


def redis_url(unset: str | None = None) -> Any:
    """Return the option for Redis; `unset` is what the command does without it."""
    text = (
        "redis://host:port/db or unix:///path. Put one with a password into "
        "PAGEWIRE_REDIS_URL: other users can see this command line."
    )
    return setting(ClusterSettings, "redis_url", text, NETWORK, unset=unset)


RedisUrl = Annotated[str | None, redis_url()]
OwnRedisUrl = Annotated[str | None, redis_url("a private server is started")]
Host = Annotated[str | None, setting(ClusterSettings, "host", "Address to listen on.", NETWORK)]
Port = Annotated[int | None, setting(RouterSettings, "port", "Of the HTTP endpoint.", NETWORK)]
Policy = Annotated[
    Literal["prefix", "round_robin"] | None,
    setting(RouterSettings, "policy", "How requests are placed.", NETWORK),
]
MaxQueue = Annotated[
    int | None,
    setting(RouterSettings, "max_queue", "Requests in the system; more get 429.", NETWORK),
]
LogLevel = Annotated[
    Literal["debug", "info", "warning", "error"] | None,
    setting(ClusterSettings, "log_level", "Of the services' logs."),
]
