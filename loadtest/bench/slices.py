"""`python -P -m pagewire.loadtest.bench.slices`: streams while long prompts arrive, on one GPU.

Eight streams, while two prompts of 8,192 tokens arrive a second, at one aggregated worker with
random weights: first with steps of fixed sizes, then with objectives for the streams' gaps, by
which the worker chooses the size. Where vLLM can be imported, it runs with the same steps. The
table has the streams' gaps and the long prompts' time to first token, in ms.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

from pagewire.loadtest.bench.client import Client
from pagewire.loadtest.bench.clusters import (
    Topology,
    run_bench,
    running_cluster,
    running_vllm,
    vllm_environment,
)
from pagewire.loadtest.bench.model import write_model
from pagewire.loadtest.bench.phases import Row, isolation_row, streams
from pagewire.loadtest.bench.shapes import SHAPES
from pagewire.loadtest.bench.tables import emit_all


async def measure(url: str, cases: Sequence[dict[str, Any]], times: int) -> list[Row]:
    """Measure the streams alone, then while long prompts arrive, in each case.

    Args:
        url: of the endpoint.
        cases: fields of the streams' requests.
        times: runs of each.
    """
    rows: list[Row] = []
    async with aclosing(Client([url])) as client:
        await streams(client, loaded=True)  # so that kernels are compiled and prices are learned
        for loaded, fields in [(False, {}), *((True, case) for case in cases)]:
            runs = [await streams(client, loaded, **fields) for _ in range(times)]
            row = isolation_row([gaps for gaps, _ in runs])
            long = [ttft for _, of_run in runs for ttft in of_run]
            ttft = {"long_p50": statistics.median(long)} if long else {}
            rows.append({"loaded": loaded, **fields, **row, **ttft})
    return rows


def results(args: argparse.Namespace) -> Iterator[Row]:
    """Yield the rows of all sizes, then those of all objectives."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        model.mkdir()
        write_model(model, SHAPES[args.model])
        for number, size in enumerate(args.sizes):
            objectives = [] if number else [{"slo_gap_s": ms / 1e3} for ms in args.objectives]
            options = ("--num-blocks", str(args.num_blocks)) if args.num_blocks else ()
            topology = Topology(0, 1, size)
            with running_cluster(model, topology, Path(folder), *options) as cluster:
                for row in asyncio.run(measure(cluster.url, [{}, *objectives], args.times)):
                    yield {"system": "Pagewire", "step": size, **row}
        environment = vllm_environment(args.vllm, pair=False)
        if environment is None:
            return
        for size in args.sizes:
            with running_vllm(model, environment, Path(folder), servers=1, budget=size) as [url]:
                for row in asyncio.run(measure(url, [{}], args.times)):
                    yield {"system": "vLLM", "step": size, **row}


def main() -> int:
    """Measure, and print a line for each result, then the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama-8b", choices=SHAPES)
    parser.add_argument("--sizes", nargs="+", type=int, default=[512, 256, 128])
    parser.add_argument("--objectives", nargs="+", type=float, default=[15, 10, 8], help="in ms")
    parser.add_argument("--times", type=int, default=3, help="runs of each case")
    parser.add_argument("--num-blocks", type=int, help="size of the KV pool")
    parser.add_argument("--vllm", type=Path, help="folder of a separate installation of vLLM")
    args = parser.parse_args()
    return run_bench(lambda: emit_all("slices", results(args)))


if __name__ == "__main__":
    sys.exit(main())
