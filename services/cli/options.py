"""Command-line options that several commands share; each sets the setting of its name."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

MODEL_HELP = 'A Hugging Face directory, a hub id, or "demo" for the model in the package.'
ENGINE = "Engine"
NETWORK = "Network"

Model = Annotated[str | None, typer.Option(help=MODEL_HELP, show_default="demo")]
ServedModelName = Annotated[
    str | None,
    typer.Option(help="The name that clients ask for.", show_default="the model's own"),
]
GenerationConfig = Annotated[
    Literal["auto", "none"] | None,
    typer.Option(
        help="auto: a request that gives no temperature, top_p, top_k or max_tokens gets those "
        "of the model's generation_config.json.",
        show_default="auto",
    ),
]
Device = Annotated[
    Literal["auto", "cpu", "cuda"] | None,
    typer.Option(help="auto takes CUDA where there is a GPU.", rich_help_panel=ENGINE),
]
Dtype = Annotated[
    Literal["auto", "float32", "float16", "bfloat16"] | None,
    typer.Option(help="Of weights and KV cache.", rich_help_panel=ENGINE),
]
LoadFormat = Annotated[
    Literal["safetensors", "dummy"] | None,
    typer.Option(help="dummy: random weights, for benchmarks.", rich_help_panel=ENGINE),
]
Kernels = Annotated[
    Literal["auto", "triton", "torch"] | None,
    typer.Option(help="auto: Triton on CUDA, torch on the CPU.", rich_help_panel=ENGINE),
]
BlockSize = Annotated[
    int | None, typer.Option(help="Tokens in a KV block.", rich_help_panel=ENGINE)
]
NumBlocks = Annotated[
    int | None,
    typer.Option(help="KV blocks; by memory if not given.", rich_help_panel=ENGINE),
]
GpuMemoryUtilization = Annotated[
    float | None,
    typer.Option(help="Share of the GPU's memory that a worker takes.", rich_help_panel=ENGINE),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(help="Longest prompt plus answer, in tokens.", rich_help_panel=ENGINE),
]
MaxNumSeqs = Annotated[
    int | None, typer.Option(help="Sequences that run at once.", rich_help_panel=ENGINE)
]
MaxNumBatchedTokens = Annotated[
    int | None,
    typer.Option(help="Tokens of one step; longer prompts run in chunks.", rich_help_panel=ENGINE),
]
MaxWaiting = Annotated[
    int | None,
    typer.Option(help="Sequences that may queue behind those running.", rich_help_panel=ENGINE),
]
EnablePrefixCaching = Annotated[
    bool | None,
    typer.Option(
        "--enable-prefix-caching/--no-enable-prefix-caching",
        help="Reuse blocks with equal content.",
        rich_help_panel=ENGINE,
    ),
]
CudaGraphs = Annotated[
    bool | None,
    typer.Option(
        "--cuda-graphs/--no-cuda-graphs",
        help="Replay steps and moves of KV blocks as CUDA graphs.",
        rich_help_panel=ENGINE,
    ),
]
KvTransport = Annotated[
    Literal["auto", "ucx", "zmq"] | None,
    typer.Option(help="auto takes UCX where ucxx is installed.", rich_help_panel=NETWORK),
]
LocalPrefillTokens = Annotated[
    int | None,
    typer.Option(
        help="A decode worker computes up to so many uncached prompt tokens itself.",
        rich_help_panel=ENGINE,
    ),
]
StagingSlots = Annotated[
    int | None,
    typer.Option(help="KV pieces under way at once.", rich_help_panel=NETWORK),
]
StagingSlotBytes = Annotated[
    int | None,
    typer.Option(help="Upper bound of a KV piece's blocks, in bytes.", rich_help_panel=NETWORK),
]
WorkerId = Annotated[
    str | None,
    typer.Option(help="Stable name of this worker.", rich_help_panel=NETWORK),
]
ControlPort = Annotated[
    int | None,
    typer.Option(help="Of the control socket; 0 takes a free one.", rich_help_panel=NETWORK),
]
MetricsPort = Annotated[
    int | None,
    typer.Option(help="Of /metrics and /health; 0 takes a free one.", rich_help_panel=NETWORK),
]
RedisUrl = Annotated[
    str | None,
    typer.Option(
        help="redis://host:port/db or unix:///path. Put one with a password into "
        "PAGEWIRE_REDIS_URL: other users can see this command line.",
        rich_help_panel=NETWORK,
    ),
]
Host = Annotated[str | None, typer.Option(help="Address to listen on.", rich_help_panel=NETWORK)]
Port = Annotated[int | None, typer.Option(help="Of the HTTP endpoint.", rich_help_panel=NETWORK)]
Policy = Annotated[
    Literal["prefix", "round_robin"] | None,
    typer.Option(help="How requests are placed.", rich_help_panel=NETWORK),
]
MaxQueue = Annotated[
    int | None,
    typer.Option(help="Requests in the system; more get 429.", rich_help_panel=NETWORK),
]
LogLevel = Annotated[
    Literal["debug", "info", "warning", "error"] | None, typer.Option(help="Of the services.")
]
