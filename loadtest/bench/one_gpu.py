"""Kernels and engine on one GPU: `python -P -m pagewire.loadtest.bench.one_gpu`.

Every kernel is compared with its reference before it is timed, next to FlashAttention 3 where vLLM
can be imported; a wrong one ends the bench. Then the engine is timed on the shape of `--model`, by
default Llama-3.1-8B, with random weights: time to the first token, decode step, throughput, start;
and vLLM's in the same way, in the same run. The output ends with the tables of docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from pagewire.loadtest.bench.clusters import run_bench, vllm_environment
from pagewire.loadtest.bench.engine import read_options
from pagewire.loadtest.bench.phases import Row
from pagewire.loadtest.bench.tables import markdown
from pagewire.loadtest.cluster import BenchError

VALUES = {
    "ttft": ("prompt", "ms"),
    "decode": ("batch", "ms"),
    "throughput": ("inp", "out_tok_s"),
    "start": ("what", "s"),
}


def results(
    module: str, *options: str, environment: dict[str, str] | None = None
) -> list[Row] | None:
    """Run a bench, passing its output on; return its results, or None if it failed."""
    command = [sys.executable, "-P", "-m", module, *options]
    rows: list[Row] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            if line.startswith("RESULT "):
                rows.append(json.loads(line.removeprefix("RESULT ")))
    return rows if process.returncode == 0 else None


def compare(what: str, ours: list[Row], theirs: list[Row]) -> str:
    """Return a table of one kind of result, with vLLM's figures if there are any.

    `ratio` is ours / vLLM's: higher is better for tokens per second, lower for times.
    """
    key, value = VALUES[what]
    by_key = {(row[key], row.get("out")): row for row in theirs if row["what"] == what}
    rows = []
    for row in (row for row in ours if row["what"] == what):
        peer = by_key.get((row[key], row.get("out")))
        if peer is not None:
            spread = {f"vllm_{end}": peer[end] for end in ("low", "high") if end in peer}
            row = row | spread | {"vllm": peer[value], "ratio": row[value] / peer[value]}
        rows.append(row)
    return markdown(rows)


def main() -> int:
    """Measure kernels and engine and print the tables."""
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--no-kernels", dest="kernels", action="store_false")
    own.add_argument("--vllm", type=Path, help="folder of a separate installation of vLLM")
    _, options = own.parse_known_args()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], parents=[own])
    args = read_options(parser)
    return run_bench(lambda: measure(args, options))


def measure(args: argparse.Namespace, options: list[str]) -> None:
    """Run the benches and print the tables.

    Args:
        args: the command line's options.
        options: those of an engine's bench, as given.

    Raises:
        BenchError: a bench failed, perhaps since a kernel is wrong.
    """
    with_peer = vllm_environment(args.vllm, pair=False)
    if args.kernels and results("pagewire.kernels.bench.run", environment=with_peer) is None:
        raise BenchError("a kernel is wrong, or cannot be timed: no engine bench")
    ours = results("pagewire.loadtest.bench.engine", *options)
    theirs: list[Row] | None = []
    if with_peer is not None:
        peer = "pagewire.loadtest.bench.vllm_offline"
        theirs = results(peer, *options, environment=with_peer)
    else:
        print("vLLM cannot be imported: no peer", file=sys.stderr)
    if ours is None or theirs is None:
        raise BenchError("an engine's bench failed")
    for what in ("start", *args.parts):
        print(f"\n### {what}\n\n{compare(what, ours, theirs)}")


if __name__ == "__main__":
    sys.exit(main())
