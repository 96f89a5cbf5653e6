"""Serving on two GPUs of one host: prefill and decode apart, against aggregated replicas.

    python -P -m pagewire.loadtest.bench.two_gpus [--topologies 1:1 0:2:512 ...] [--phases ...]
    python -P -m pagewire.loadtest.bench.two_gpus --no-wire --phases goodput --seconds 30 ...

First the kernels that move blocks, each against its reference, then the KV wire between the GPUs,
then one cluster after another over HTTP, on Llama-3.1-8B's shape with random weights. The phase
`handover` has two clusters of its own, asked in turn; `idle` measures the workers of each cluster
without requests; `crowd` has many clients in a closed loop; `goodput` has requests that come at
random times, where placement is by prediction once more with an objective for gaps. The first load
of each mix and rate is sent once unmeasured. Where vLLM can be imported, two vLLM servers get the
same requests, as two replicas, and with the NIXL connector as one for prefill and one for decode.
The output ends with the tables of docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import get_args

from pagewire.loadtest.bench import phases
from pagewire.loadtest.bench.client import Client
from pagewire.loadtest.bench.clusters import (
    Topology,
    run_bench,
    running_cluster,
    running_vllm,
    vllm_environment,
)
from pagewire.loadtest.bench.crowd import crowd
from pagewire.loadtest.bench.goodput import goodput
from pagewire.loadtest.bench.handover import handover
from pagewire.loadtest.bench.idle import idle
from pagewire.loadtest.bench.model import write_model
from pagewire.loadtest.bench.open_load import FORM, PROMISE, WITH_OBJECTIVE, OpenLoad
from pagewire.loadtest.bench.phases import Row
from pagewire.loadtest.bench.tables import emit, markdown
from pagewire.loadtest.cluster import BenchError
from pagewire.shared.settings.types import KvTransport

TOPOLOGIES = ("1:1:2048", "0:2:512", "0:2:2048", "0:2:8192")
PHASES = ("handover", "unloaded", "isolation", "idle", "crowd", "goodput")
USUAL_PHASES = PHASES[:4]
LOADS = ("6144/256@6.5", "mixed@36")
OWN_CLUSTERS = ("handover",)  # phases that start what they measure


def check_and_time_the_wire() -> None:
    """Run the kernels' and the wire's benches.

    Raises:
        BenchError: a kernel gives wrong results, or blocks arrive corrupt.
    """
    for module, *options in (
        ("pagewire.kernels.bench.run", "--ops", "kv_pack"),
        ("pagewire.loadtest.bench.wire", "--transport", "ipc", "--senders", "4"),
        ("pagewire.loadtest.bench.wire", "--transport", "ipc", "--stepping"),
        ("pagewire.loadtest.bench.wire", "--transport", "ucx", "--senders", "4"),
    ):
        done = subprocess.run([sys.executable, "-P", "-m", module, *options], check=False)
        if done.returncode != 0:
            raise BenchError(f"{module} failed: nothing else is timed")


def measure(args: argparse.Namespace, model: Path, logs: Path, rows: list[Row]) -> None:
    """Run the phases on each cluster; adds the results to `rows`, and prints one JSON line each.

    Raises:
        BenchError: a server did not start, or an answer was wrong.
    """

    def note(label: str, new_rows: list[Row]) -> None:
        for row in new_rows:
            rows.append({"cluster": label, **row})
            emit(**rows[-1])

    def ask(
        label: str, urls: list[str], prefill_url: str | None = None, *, predicted: bool = False
    ) -> None:
        note(label, asyncio.run(phases.run(Client(urls, prefill_url), args.phases)))
        if "crowd" in args.phases and prefill_url is None:
            for clients in args.clients:
                note(label, [crowd(urls, clients, args.seconds)])
        if "goodput" in args.phases and prefill_url is None:
            warm = set[tuple[str, float]]()
            for load in args.loads:
                is_warm = (load.mix, load.rate) in warm
                warm.add((load.mix, load.rate))
                note(label, [goodput(urls, load, args.seconds, warm_up=not is_warm)])
                if predicted:
                    note(label + WITH_OBJECTIVE, [_with_objective(args, urls, load)])

    options: tuple[str, ...] = ("--kv-transport", args.kv_transport)
    options += ("--max-num-seqs", str(args.max_num_seqs))
    options += ("--tensor-parallel-size", str(args.tensor_parallel_size))
    if "handover" in args.phases:
        label = f"1P1D by {args.kv_transport}, 1 aggregated"
        note(label, handover(model, args.budget, logs, options))
    if set(args.phases) <= set(OWN_CLUSTERS):
        return
    for topology in args.topologies:
        with running_cluster(model, topology, logs, *options) as cluster:
            ask(topology.label, [cluster.url], predicted=topology.policy == "predicted")
            if "idle" in args.phases:
                note(topology.label, idle())
    if args.peer:
        _measure_vllm(args, model, logs, ask)


def _with_objective(args: argparse.Namespace, urls: list[str], load: OpenLoad) -> Row:
    objective_s = PROMISE.objective_s
    return goodput(urls, load, args.seconds, warm_up=False, slo_gap_s=objective_s)


def _measure_vllm(
    args: argparse.Namespace, model: Path, logs: Path, ask: Callable[..., None]
) -> None:
    is_pair = args.tensor_parallel_size == 1
    linked = is_pair and vllm_environment(args.vllm, pair=True) is not None
    environment = vllm_environment(args.vllm, pair=False)
    if environment is None:
        print("vLLM cannot be imported: no peer", file=sys.stderr)
        return
    for api_servers in args.vllm_api_servers:
        more = "" if api_servers == 1 else f", {api_servers} API servers each"
        with running_vllm(
            model,
            environment,
            logs,
            gpus_each=args.tensor_parallel_size,
            servers=2 // args.tensor_parallel_size,
            linked=linked,
            max_num_seqs=args.max_num_seqs,
            api_servers=api_servers,
        ) as urls:
            ask(f"vLLM, {len(urls)} aggregated{more}", urls)
            if linked:
                ask(f"vLLM, 1P1D{more}", urls[1:], urls[0])


def main() -> int:
    """Measure each topology in each phase and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--topologies", nargs="*", default=list(TOPOLOGIES))
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=list(USUAL_PHASES))
    parser.add_argument("--seconds", type=float, default=12.0, help="length of each crowd or load")
    parser.add_argument("--loads", nargs="+", default=LOADS, help=FORM)
    parser.add_argument("--clients", nargs="+", type=int, default=[512, 1024], help="of each crowd")
    parser.add_argument("--budget", type=int, default=2048, help="tokens of a step")
    parser.add_argument("--max-num-seqs", type=int, default=256, help="most sequences of a worker")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="GPUs of each worker")
    parser.add_argument("--kv-transport", default="auto", choices=get_args(KvTransport))
    parser.add_argument("--logs", type=Path, help="folder to keep the servers' logs in")
    parser.add_argument("--vllm", type=Path, help="folder of a separate installation of vLLM")
    parser.add_argument(
        "--vllm-api-servers",
        nargs="+",
        type=int,
        default=[1],
        help="processes of a vLLM server that take requests; measured one after the other",
    )
    parser.add_argument("--no-peer", dest="peer", action="store_false")
    parser.add_argument("--no-wire", dest="wire", action="store_false")
    args = parser.parse_args()
    return run_bench(lambda: run(args))


def run(args: argparse.Namespace) -> None:
    """Measure, and print the tables, of what was measured before an error, too.

    Raises:
        BenchError: a server did not start, or an answer was wrong.
    """
    rows: list[Row] = []
    args.loads = [OpenLoad.parse(text) for text in args.loads]
    args.topologies = [Topology.parse(text, args.budget) for text in args.topologies]
    try:
        if args.wire:
            check_and_time_the_wire()
        with tempfile.TemporaryDirectory() as directory:
            write_model(Path(directory))
            logs = args.logs or Path(directory, "logs")
            logs.mkdir(parents=True, exist_ok=True)
            measure(args, Path(directory), logs, rows)
    finally:
        for phase in args.phases:
            print(f"\n### {phase}{'' if phase == 'idle' else ', ms'}\n")
            print(markdown([row for row in rows if row["what"] == phase]))


if __name__ == "__main__":
    sys.exit(main())
