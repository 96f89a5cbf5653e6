"""Which kernels requests would have to wait for: those that traffic needs and no first step ran.

    python -P -m pagewire.tests.support.late_kernels [--shapes ...] [--device cuda] [--full]

An engine on a Hopper GPU that does not exist (`unlaunched`), or on this machine's GPU, prepares
itself as a worker does, and then gets requests and steps of many kinds. Exit code 1: it needed
another kernel, which is printed with what it is specialised on. `--full` takes the published sizes,
and only counts the kernels of the preparation.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from triton import knobs

from pagewire.loadtest.bench import shapes
from pagewire.shared.engine.build import BuiltEngine
from pagewire.shared.engine.execution.builds import BUILDS, Builds, count_kernels
from pagewire.shared.engine.warm_up import prepare
from pagewire.tests.support.padded_steps import Reruns
from pagewire.tests.support.unlaunched import Launches, build, hopper
from pagewire.tests.support.varied_traffic import Traffic

_PUBLISHED = Path(__file__).parent / "published_configs"
CONTEXT = 4096
_SMALL = {
    "num_hidden_layers": 2,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "vocab_size": 9216,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}


def _published(name: str) -> dict[str, Any]:
    shape: dict[str, Any] = json.loads((_PUBLISHED / f"{name}.json").read_text())
    shape.pop("quantization_config", None)
    return shape


def _in_fp8(**fields: Any) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": "fp8", **fields}}


_MXFP4 = {"quantization_config": {"quant_method": "mxfp4"}}
_AWQ = {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}}
SHAPES: dict[str, dict[str, Any]] = {
    **{name: shape for name, shape in shapes.SHAPES.items() if name != "qwen2-7b"},
    "gemma2-9b": _published("gemma-2-9b-it"),
    "deepseek-v3": _published("deepseek-v3"),
    "phi3-mini": _published("phi-3-mini-4k-instruct"),
    "mixtral": _published("mixtral-8x7b-instruct-v0.1"),
    "granite-moe": _published("granite-3.1-3b-a800m-instruct"),
    "olmo2": _published("olmo-2-1124-7b-instruct"),
    "qwen3-30b-a3b-fp8": _published("qwen3-30b-a3b") | _in_fp8(weight_block_size=[128, 128]),
    "gpt-oss-20b-mxfp4": _published("gpt-oss-20b") | _MXFP4,
    "qwen3-30b-a3b-int4": _published("qwen3-30b-a3b") | _AWQ,
    "phi3-mini-int4": _published("phi-3-mini-4k-instruct") | _AWQ,
    "phi3-mini-fp8": _published("phi-3-mini-4k-instruct") | _in_fp8(activation_scheme="static"),
}


def small(shape: dict[str, Any]) -> dict[str, Any]:
    """Return a shape with the same heads and experts, and less of everything else."""
    heads = shape["num_attention_heads"]
    own = {"head_dim": shape.get("head_dim") or shape["hidden_size"] // heads}
    changes = {name: value for name, value in _SMALL.items() if name in shape or "id" in name}
    kinds = shape.get("layer_types")
    if kinds is not None:
        changes["layer_types"] = [kinds[0], kinds[-1]]
    if "first_k_dense_replace" in shape:
        changes |= {"first_k_dense_replace": 1, "num_hidden_layers": 3}
        own = {}
    return shape | own | changes


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of an engine."""
    return {
        "num_blocks": 1600,
        "max_model_len": CONTEXT,
        "max_num_seqs": args.max_num_seqs,
        "max_num_batched_tokens": args.budget,
        "cuda_graphs": args.cuda_graphs,
        "batch_invariant": args.batch_invariant,
        "kv_cache_dtype": args.kv_cache_dtype,
    }


def prepared(shape: dict[str, Any], args: argparse.Namespace) -> tuple[BuiltEngine, Builds]:
    """Return an engine on this machine's GPU, and what it has built."""
    with tempfile.TemporaryDirectory() as directory:
        built, _ = build(Path(directory), shape, device="cuda", **options_of(args))
    return built, BUILDS


def prepared_without_gpu(
    launches: Launches, shape: dict[str, Any], args: argparse.Namespace
) -> tuple[BuiltEngine, Builds]:
    """Return an engine on the GPU that does not exist, and what it has built."""
    launches.forget()
    with tempfile.TemporaryDirectory() as directory:
        built, settings = build(Path(directory), shape, device="cpu", **options_of(args))
    built.runner.round_steps()
    launches.vocab_size = built.config.vocab_size
    knobs.compilation.listener, builds = None, Builds()
    count_kernels(builds)
    if args.prepare:
        context = built.max_model_len
        prepare(built.runner, built.config, settings, context, lambda _stage: None, Reruns)
    return built, builds


def watch(name: str, built: BuiltEngine, builds: Builds, args: argparse.Namespace) -> int:
    """Send traffic to an engine; return how many kernels were compiled or loaded for it."""
    builds.record_ready()
    counts = ", ".join(f"{kind} {n} in {builds.seconds[kind]:.1f} s" for kind, n in builds.parts)
    print(f"{name}: {counts}", flush=True)
    if not args.full:
        traffic = Traffic(built)
        traffic.run(args.waves)
        traffic.run_steps(args.steps)
    return sum(builds.late.values())


def main(arguments: list[str] | None = None) -> int:
    """Run engines of these shapes, one after the other; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="one shape on cuda"
    )
    parser.add_argument("--full", action="store_true", help="published sizes; without traffic")
    parser.add_argument("--no-cuda-graphs", dest="cuda_graphs", action="store_false")
    parser.add_argument("--batch-invariant", action="store_true")
    parser.add_argument("--kv-cache-dtype", choices=("auto", "fp8"), default="auto")
    parser.add_argument(
        "--unprepared", dest="prepare", action="store_false", help="run no first step"
    )
    parser.add_argument("--max-num-seqs", type=int, default=512)
    parser.add_argument("--budget", type=int, default=2048, help="tokens of a step")
    parser.add_argument("--waves", type=int, default=10, help="of requests")
    parser.add_argument("--steps", type=int, default=100, help="that no scheduler chose")
    args = parser.parse_args(arguments)
    if args.device == "cuda" and len(args.shapes) > 1:
        parser.error("--device cuda takes one shape: a process keeps its kernels")
    logging.basicConfig(level="WARNING", format="%(message)s", stream=sys.stdout)
    torch.set_num_threads(1)
    late = 0
    with nullcontext(None) if args.device == "cuda" else hopper() as launches:
        for name in args.shapes:
            shape = SHAPES[name] | {"num_hidden_layers": 2} if args.full else small(SHAPES[name])
            gc.collect()
            made = (
                prepared(shape, args)
                if launches is None
                else prepared_without_gpu(launches, shape, args)
            )
            late += watch(name, *made, args)
            del made
    print(f"{late} kernels were compiled or loaded for traffic")
    return 1 if late else 0


if __name__ == "__main__":
    raise SystemExit(main())
