"""Faults at named points of transfers, in a cluster of two prefill and two decode workers.

A cell is a point of `fault_points`, a signal, and the side of the transfer whose process gets the
signal from the worker that reaches the point. Meanwhile, clients ask for completions whose tokens
are known. A cell with SIGSTOP stops a process twice: for a moment, and until its peer has closed
the link. The second time, a sender stays stopped until another one has filled its staging slot.

    python -P -m pagewire.tests.support.transfer_faults --device cuda \\
        --transport ipc --transport ucx --clusters 2 --out FOLDER
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pagewire.shared.worker.kv import TRANSPORTS
from pagewire.tests.support.aio import run_async
from pagewire.tests.support.fault_board import FaultBoard
from pagewire.tests.support.fault_cells import CELLS, Cell, CellResult
from pagewire.tests.support.fault_cluster import CELL_TIMEOUT_S, FaultyCluster
from pagewire.tests.support.fault_points import DIRECTORY, PROGRAM, TRANSPORT
from pagewire.tests.support.greedy_prompts import GreedyPrompts, greedy_prompts
from pagewire.tests.support.local_cluster import LocalCluster, local_cluster
from pagewire.tests.support.memory_transport import MemoryTransport

MEMORY = MemoryTransport.name
MAX_TOKENS = 12
PROMPT_TOKENS = range(33, 701)
START_TIMEOUT_S = 240.0  # several clusters that compile their kernels at once
MAX_FAILURES = 3  # failed cells of a cluster; then the rest is skipped
SLOT_BYTES = 4 * 32 << 10  # four blocks of the demo model: most jobs have several segments
SETTINGS = {
    "PAGEWIRE_HEARTBEAT_S": "0.5",
    "PAGEWIRE_LEASE_S": "2",
    "PAGEWIRE_TRANSFER_TIMEOUT_S": "2",
    "PAGEWIRE_PREFILL_TIMEOUT_S": "4",
    "PAGEWIRE_STEP_TIMEOUT_S": "2",
    "PAGEWIRE_STAGING_SLOTS": "8",
    "PAGEWIRE_STAGING_SLOT_BYTES": str(SLOT_BYTES),
}


@dataclass(frozen=True)
class Options:
    """The options of a run.

    Attributes:
        device: "cpu" or "cuda".
        transport: one of `TRANSPORTS`, or on the CPU "memory".
        num_requests: least number of requests of a cell.
        seed: seed of the random choices.
        out: folder for results, and for the logs of clusters in which a cell failed.
        cuda_graphs: whether workers capture CUDA graphs, with which they take longer to start.
    """

    device: str
    transport: str
    num_requests: int
    seed: int
    out: Path | None = None
    cuda_graphs: bool = False

    def cluster_options(self) -> list[str]:
        """Return the options of `pagewire up`."""
        return [
            *("--prefill", "2", "--decode", "2", "--device", self.device, "--dtype", "float32"),
            *("--kv-transport", "zmq" if self.transport == MEMORY else self.transport),
            *("--kv-network", "private"),
            *("--num-blocks", "2048", "--no-enable-prefix-caching", "--local-prefill-tokens", "0"),
            "--cuda-graphs" if self.cuda_graphs else "--no-cuda-graphs",
        ]


def known_answers() -> GreedyPrompts:
    """Return the prompts, with their answers."""
    known = greedy_prompts(MAX_TOKENS)
    fit = [index for index, each in enumerate(known.prompts) if len(each) in PROMPT_TOKENS]
    return GreedyPrompts(
        [known.prompts[index] for index in fit], [known.tokens[index] for index in fit], MAX_TOKENS
    )


def run_cells(cells: Sequence[Cell], options: Options, prompts: GreedyPrompts) -> list[CellResult]:
    """Play cells in one cluster, or in a new one after a cell that failed."""
    results: list[CellResult] = []
    remaining = list(cells)
    while remaining and sum(bool(each.problem) for each in results) < MAX_FAILURES:
        results += _run_until_failure(remaining, options, prompts)
        remaining = list(cells)[len(results) :]
    return results


def _run_until_failure(
    cells: list[Cell], options: Options, prompts: GreedyPrompts
) -> list[CellResult]:
    results: list[CellResult] = []
    with tempfile.TemporaryDirectory(prefix="pw-faults-") as directory:
        env = {**SETTINGS, DIRECTORY: directory, TRANSPORT: options.transport}
        with local_cluster(
            *options.cluster_options(), env=env, program=PROGRAM, start_timeout=START_TIMEOUT_S
        ) as cluster:
            board = FaultBoard(Path(directory))
            faulty = FaultyCluster(cluster, board, prompts, options.seed)
            run_async(faulty.warm_up(), CELL_TIMEOUT_S)
            for cell in cells:
                result = run_async(faulty.play(cell, options.num_requests), CELL_TIMEOUT_S + 60)
                results.append(result)
                print(f"{options.transport:4} {result}", flush=True)
                if result.problem:
                    _keep_logs(cluster, Path(directory), options, cell)
                    break
    return results


def _keep_logs(cluster: LocalCluster, board: Path, options: Options, cell: Cell) -> None:
    print(cluster.output)
    if options.out is not None:
        name = "-".join([options.transport, cell.point, cell.signal.name, cell.side])
        target = options.out / name
        shutil.copytree(cluster.directory.name, target, dirs_exist_ok=True)
        shutil.copy(board / "events", target)


def summary(transport: str, results: Sequence[CellResult]) -> dict[str, Any]:
    """Return a transport's totals."""
    counts = Counter[str]()
    for result in results:
        counts.update(result.counts)
    return {
        "transport": transport,
        "cells": len(results),
        "requests": sum(result.num_requests for result in results),
        "reused": sum(result.num_reused for result in results),
        "failed": [result.cell for result in results if result.problem],
        "counts": dict(counts),
    }


def run_transports(
    cells: Sequence[Cell], options: Sequence[Options], clusters: int = 1
) -> dict[str, list[CellResult]]:
    """Play cells with several transports at the same time, each in several clusters.

    Returns:
        The results by transport.
    """
    prompts = known_answers()
    with ThreadPoolExecutor(clusters * len(options)) as pool:
        running = {
            each.transport: [
                pool.submit(run_cells, cells[shard::clusters], each, prompts)
                for shard in range(clusters)
            ]
            for each in options
        }
        return {
            transport: [result for future in futures for result in future.result()]
            for transport, futures in running.items()
        }


def main(argv: list[str]) -> int:
    """Run all cells with each transport; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--transport", action="append", choices=[*TRANSPORTS, MEMORY])
    parser.add_argument("--requests", type=int, default=32, help="of a cell, at least")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clusters", type=int, default=1, help="of a transport, at the same time")
    parser.add_argument("--cells", type=int, default=len(CELLS), help="only the first of these")
    parser.add_argument("--cuda-graphs", action="store_true")
    parser.add_argument("--out", type=Path, help="a folder for results and logs")
    given = parser.parse_args(argv)
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
    cells = random.Random(given.seed).sample(CELLS, given.cells)
    options = [
        Options(given.device, transport, given.requests, given.seed, given.out, given.cuda_graphs)
        for transport in given.transport or ["zmq"]
    ]
    began, has_failed = time.monotonic(), False
    for transport, results in run_transports(cells, options, given.clusters).items():
        total = summary(transport, results)
        print(json.dumps(total), flush=True)
        has_failed |= bool(total["failed"]) or total["cells"] < len(cells)
        if given.out is not None:
            lines = [json.dumps(each) for each in (*map(asdict, results), total)]
            (given.out / f"{transport}.jsonl").write_text("\n".join(lines) + "\n")
    print(f"{time.monotonic() - began:.0f} s")
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
