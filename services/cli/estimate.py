"""The command `pagewire estimate`: memory and KV blocks of a model on a GPU."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from pagewire.services.cli.error_exit import needs_worker_extra, one_line_errors
from pagewire.services.cli.options import options_of, with_settings
from pagewire.services.cli.terminal import print_whole
from pagewire.shared.base.errors import ConfigError
from pagewire.shared.model.config import has_dtype, load_config
from pagewire.shared.model.model_config import ModelConfig
from pagewire.shared.model.shard import Shard
from pagewire.shared.model.source import resolve_model
from pagewire.shared.settings.config import WorkerSettings, load_settings

if TYPE_CHECKING:
    from pagewire.shared.worker.estimate import Estimate

GIB = 1 << 30
# Approximate memory that CUDA reports for each GPU type, in GiB; --memory takes another value.
GPUS = {
    "L4": 22.0,
    "RTX 4090": 23.5,
    "A100 40GB": 39.4,
    "L40S": 44.4,
    "A100 80GB": 79.2,
    "H100 80GB": 79.2,
    "H200": 139.8,
    "B200": 178.4,
}
SIZES = (
    "revision",
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "tensor_parallel_size",
    "block_size",
    "gpu_memory_utilization",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "cuda_graphs",
    "staging_slots",
    "staging_slot_bytes",
)

Model = Annotated[str, typer.Argument(help="A Hugging Face directory, a hub id, or demo.")]
Length = Annotated[
    int, typer.Option(min=1, help="Length of a sequence in tokens, prompt and answer together.")
]
Memory = Annotated[
    float | None,
    typer.Option(min=0.1, max=1e6, help="GiB of a GPU's memory, instead of a list of GPU types."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, with all numbers in bytes.")]


@with_settings(WorkerSettings, only=SIZES)
def estimate(
    ctx: typer.Context,
    model: Model,
    memory: Memory = None,
    length: Length = 4096,
    as_json: AsJson = False,
) -> None:
    """Estimate which GPUs fit a model, and how many tokens of KV.

    Reads the model's configuration, not its weights.

    Example: pagewire estimate demo --memory 24
    """
    with one_line_errors():
        settings = load_settings(WorkerSettings, options_of(WorkerSettings, ctx.params))
        path = resolve_model(settings.model, weights=False, revision=settings.revision)
        config = load_config(
            path, quantization=settings.quantization, kv_cache_dtype=settings.kv_cache_dtype
        )
        if settings.dtype == "auto" and not has_dtype(path):
            raise ConfigError(
                "the model's config.json names no dtype, and no weights here have one that a "
                "worker would take: choose one with --dtype"
            )
        with needs_worker_extra():
            from pagewire.shared.worker.estimate import estimate as estimate_memory
            from pagewire.shared.worker.estimate import fitting_ranks
        sizes = GPUS if memory is None else {f"{memory:g} GiB": memory}
        if length > config.max_position_embeddings:
            raise ConfigError(
                f"--length {length} is more than the model's {config.max_position_embeddings} "
                "tokens"
            )
        fits = {}
        for name, size in sizes.items():
            ranks: int | None = settings.tensor_parallel_size
            one = estimate_memory(config, settings, int(size * GIB))
            if not one.kv_blocks:
                ranks = fitting_ranks(config, settings, one.total)
            fits[name] = GpuFit(one, _sequences(one, length, settings, config), ranks)
        if as_json:
            print(json.dumps(_report(fits, length), indent=2))
        else:
            _show(fits, length, settings)


@dataclass(frozen=True, slots=True)
class GpuFit:
    """How a model fits on one type of GPU.

    Attributes:
        estimate: a worker's memory on it.
        sequences: how many sequences of `--length` tokens run at once.
        ranks: how many such GPUs the model needs together; None if one host has too few.
    """

    estimate: Estimate
    sequences: int
    ranks: int | None


def _sequences(
    estimate: Estimate, length: int, settings: WorkerSettings, config: ModelConfig
) -> int:
    """Return how many sequences of a length run at once: `max_num_seqs` at most."""
    if length > estimate.context:
        return 0
    ranks = settings.tensor_parallel_size
    layout = config.kv_layout(settings.block_size, estimate.dtype, Shard(ranks - 1, ranks))
    return min(settings.max_num_seqs, estimate.kv_blocks // layout.held_blocks(length))


def _report(fits: dict[str, GpuFit], length: int) -> dict[str, object]:
    return {
        "length": length,
        "gpus": {
            name: {
                **dataclasses.asdict(fit.estimate),
                "sequences": fit.sequences,
                "tensor_parallel_size": fit.ranks,
            }
            for name, fit in fits.items()
        },
    }


def _show(fits: dict[str, GpuFit], length: int, settings: WorkerSettings) -> None:
    first = next(iter(fits.values())).estimate
    kind, ranks = first.weight_format, settings.tensor_parallel_size
    each = "" if ranks == 1 else f" on each of {ranks} GPUs"
    console = Console()
    console.print(f"Weights: {first.weights / GIB:.2f} GiB ({first.weights} bytes, {kind}){each}")
    kv = f"{first.kv_bytes_per_token} bytes a token"
    console.print(f"KV cache: {kv}, {first.kv_dtype}{each}")
    table = Table()
    sequences = f"sequences of {length}, at most {settings.max_num_seqs}"
    for name in ("GPU", "GiB", "KV pool GiB", "KV tokens", "context", sequences):
        table.add_column(name, justify="left" if name == "GPU" else "right")
    for name, fit in fits.items():
        size = fit.estimate
        cells = [_what_fits(fit.ranks), "", "", ""]
        if size.kv_tokens:
            pool = f"{size.kv_pool / GIB:.1f}"
            cells = [pool, f"{size.kv_tokens}", f"{size.context}", f"{fit.sequences}"]
        table.add_row(name, f"{size.total / GIB:.1f}", *cells)
    print_whole(console, table)


def _what_fits(needed: int | None) -> str:
    """Return what to do if a model does not fit on a GPU; `needed` is how many fit it together."""
    if needed is None:
        return "does not fit"
    return f"needs {needed}: --tensor-parallel-size {needed}"
