"""How a GPU worker loads checkpoints: its memory meanwhile, its KV pool, and how soon it is ready.

    python -P -m pagewire.loadtest.bench.loading [--models llama-8b:bf16 llama-8b:fp8 ...]

Writes each checkpoint into a folder, with random weights, and builds a worker's engine with it in a
process of its own. Prints for each:

    weights     GiB of parameters
    gpu_peak    GiB of the GPU that loading has used at most, and as a share of the weights
    host_peak   GiB of the process while it loaded, and of the largest file: what has been read of a
                file stays in memory while it is mapped
    blocks      of the KV pool, and how many `pagewire estimate` says, as a ratio
    ready_s     from the start of the process's work to an engine that is warmed up
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pagewire.loadtest.bench.checkpoints import write_checkpoint
from pagewire.loadtest.bench.clusters import run_bench
from pagewire.loadtest.bench.shapes import SHAPES
from pagewire.loadtest.bench.tables import emit_all
from pagewire.loadtest.cluster import BenchError
from pagewire.shared.engine.build import build_engine
from pagewire.shared.settings.config import WorkerSettings, load_settings
from pagewire.shared.worker.estimate import estimate
from pagewire.shared.worker.staging_size import staging_bytes

MODELS = ("llama-8b:bf16", "llama-8b:fp8", "llama-8b:awq", "qwen3-30b-a3b:fp8")
PROGRAM = "pagewire.loadtest.bench.loading"
GIB = 1 << 30
LOADED = "sizing the KV pool"  # an engine's report once it has its weights


def host_peak() -> int:
    """Return the most bytes that this process has had in memory."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    [line] = [line for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) << 10


def load(model: Path, options: dict[str, Any]) -> dict[str, float]:
    """Build a worker's engine in this process; return what was measured."""
    began, loaded = time.monotonic(), dict[str, float]()
    settings = load_settings(WorkerSettings, {"model": str(model), **options})

    def progress(stage: str) -> None:
        if stage == LOADED:
            loaded["gpu_peak"] = torch.cuda.max_memory_allocated() / GIB
            loaded["weights"] = torch.cuda.memory_allocated() / GIB
            loaded["host_peak"] = host_peak() / GIB

    other_memory = partial(staging_bytes, settings)
    engine = build_engine(settings, progress=progress, other_memory=other_memory)
    ready_s = time.monotonic() - began
    total = torch.cuda.mem_get_info()[1]
    blocks = engine.scheduler.pool.num_blocks
    expected = estimate(engine.config, settings, total).kv_blocks
    files = [file.stat().st_size / GIB for file in model.glob("*.safetensors")]
    return {
        "weights": loaded["weights"],
        "gpu_peak": loaded["gpu_peak"],
        "of_weights": loaded["gpu_peak"] / loaded["weights"],
        "host_peak": loaded["host_peak"],
        "largest_file": max(files, default=0.0),
        "blocks": blocks,
        "estimated": expected / blocks,
        "ready_s": ready_s,
    }


def measure(args: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Write and load each model; yield the rows of the table.

    Raises:
        BenchError: a model is unknown, or cannot be loaded.
    """
    for name in args.models:
        shape, _, form = name.partition(":")
        if shape not in SHAPES:
            raise BenchError(f"no shape {shape!r}: one of {', '.join(SHAPES)}")
        model = folder / name.replace(":", "-")
        if not model.exists():
            write_checkpoint(model, SHAPES[shape], form)
        for _ in range(args.times):
            yield {"model": name, **_in_a_process(model, args)}
        if not args.keep:
            for file in model.iterdir():
                file.unlink()


def _in_a_process(model: Path, args: argparse.Namespace) -> dict[str, float]:
    command = [sys.executable, "-P", "-m", PROGRAM, "--load", str(model)]
    options = ["--kv-cache-dtype", args.kv_cache_dtype]
    done = subprocess.run([*command, *options], stdout=subprocess.PIPE, check=False)
    if done.returncode:
        raise BenchError(f"{model.name} cannot be loaded")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> int:
    """Measure how each checkpoint loads, and print the rows."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", default=MODELS, help="SHAPE:bf16, :fp8 or :awq")
    parser.add_argument("--folder", type=Path, help="keep the checkpoints here")
    parser.add_argument("--times", type=int, default=2, help="loads of each model")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.load:
        print(json.dumps(load(args.load, {"kv_cache_dtype": args.kv_cache_dtype})))
        return 0
    args.keep = args.folder is not None
    with tempfile.TemporaryDirectory() as made:
        rows = measure(args, args.folder or Path(made))
        return run_bench(lambda: emit_all("loading", rows))


if __name__ == "__main__":
    sys.exit(main())
