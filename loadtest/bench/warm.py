"""Whether a cluster that says it is ready is warm, on one GPU.

    python -P -m pagewire.loadtest.bench.warm [--topologies aggregated both] [--rate 10]

Each cluster starts with an empty cache of Triton. Once it is ready, requests arrive for 15 s; one
minute after the first, requests of the same lengths with other tokens arrive for 15 s again. Then
the cluster starts once more, with the cache, to time that. `both` has a prefill and a decode worker
on the same GPU. Exit code 1: the first requests waited longer than the later ones, or a worker
compiled a kernel, loaded one or captured a CUDA graph after it was ready; its log has the names.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from pathlib import Path

from pagewire.loadtest.bench.client import Client, CompletionRequest, TimedAnswer
from pagewire.loadtest.bench.clusters import Topology, run_bench, running_cluster
from pagewire.loadtest.bench.model import write_model
from pagewire.loadtest.bench.phases import Row
from pagewire.loadtest.bench.shapes import DEFAULT_MODEL, SHAPES, vocab_used
from pagewire.loadtest.bench.tables import emit, markdown
from pagewire.loadtest.cluster import BenchError, metrics
from pagewire.loadtest.sampler import samples_of
from pagewire.services.cli.bench.load import arrival_times
from pagewire.services.cli.bench.stats import percentile

TOPOLOGIES = {"aggregated": Topology(0, 1, 2048), "both": Topology(1, 1, 2048)}
DEMO, DEMO_VOCAB = "demo", 2000
PROMPT_TOKENS, ANSWER_TOKENS = 490, 148  # medians
SPREAD = 0.8  # standard deviation of a length's logarithm
CONTEXT = 4096
MINUTE_S = 60.0  # from the first request of one window to that of the other
# Bounds of the first window's p99: this many times the other's, or this much more.
MOST_RATIO, MOST_MORE_S = 1.5, 0.150
SLOW_S = 0.5
BUILDS = "pagewire_engine_builds_total"


def lengths(count: int, context: int = CONTEXT) -> list[tuple[int, int]]:
    """Return log-normal lengths of prompts and answers, which fit into a context together."""
    rng = random.Random(0)

    def length(median: int, most: int) -> int:
        return max(1, min(most, round(median * math.exp(rng.gauss(0.0, SPREAD)))))

    most = context // 2
    return [(length(PROMPT_TOKENS, most), length(ANSWER_TOKENS, most)) for _ in range(count)]


def longest_wait(answer: TimedAnswer) -> float:
    """Return the longest time in seconds in which a request got no token."""
    return max([answer.ttft, *answer.gaps])


def compare(first: Sequence[TimedAnswer], later: Sequence[TimedAnswer]) -> Row:
    """Return TTFT of both windows in ms, and how many requests were slow in the first one only.

    Args:
        first: answers from ready on.
        later: answers to requests of the same lengths, in the same order.
    """
    row: Row = {}
    for name, answers in (("ttft", first), ("later", later)):
        ttft = [answer.ttft * 1e3 for answer in answers]
        row |= {f"{name}_p{percent}": percentile(ttft, percent) for percent in (50, 99)}
        row[f"{name}_max"] = max(ttft)
    pairs = zip(first, later, strict=True)
    row["slow"] = sum(longest_wait(a) > SLOW_S >= longest_wait(b) for a, b in pairs)
    return row


def failures(row: Row) -> list[str]:
    """Return what is wrong with a measurement, a line each."""
    problems = []
    most = max(MOST_RATIO * row["later_p99"], row["later_p99"] + MOST_MORE_S * 1e3)
    if row["ttft_p99"] > most:
        problems.append(f"TTFT p99 was {row['ttft_p99']:.0f} ms at first; {most:.0f} are allowed")
    if row["slow"]:
        problems.append(
            f"{row['slow']} requests waited for more than {SLOW_S} s at first, not later"
        )
    return problems


def late_builds(values: dict[str, float]) -> dict[str, int]:
    """Return what workers built after they were ready, by the labels of the metric's samples."""
    late = samples_of(values, BUILDS, when="late")
    return {name[len(BUILDS) :].strip("{}"): int(value) for name, value in late.items() if value}


async def _send(
    client: Client, requests: Sequence[CompletionRequest], starts: Sequence[float]
) -> list[TimedAnswer]:
    async def ask(request: CompletionRequest, start: float) -> TimedAnswer:
        await asyncio.sleep(start)
        return await client.ask(request)

    return await asyncio.gather(*map(ask, requests, starts))


async def both_windows(url: str, vocab: int, args: argparse.Namespace) -> Row:
    """Send both windows' requests; see `compare`.

    Raises:
        BenchError: a request failed.
    """
    client = Client([url], vocab=vocab)
    arrivals = arrival_times("poisson", args.rate, seed=0)
    starts = list(itertools.takewhile(lambda at: at < args.seconds, arrivals))
    requests = [
        [client.prepare(prompt, answer) for prompt, answer in lengths(len(starts))]
        for _ in range(2)
    ]
    async with aclosing(client):
        begin = time.monotonic()
        first = await _send(client, requests[0], starts)
        await asyncio.sleep(max(0.0, begin + args.minute - time.monotonic()))
        later = await _send(client, requests[1], starts)
    return {"requests": len(starts), **compare(first, later)}


def measure(name: str, model: str, vocab: int, args: argparse.Namespace) -> Iterator[Row]:
    """Start a cluster with an empty cache of Triton, and again; yield a row for each start.

    Raises:
        BenchError: it did not start or stop, or a request failed.
    """
    options = ["--device", args.device, "--max-model-len", str(CONTEXT)]
    options += ["--max-num-seqs", str(args.max_num_seqs)]
    with tempfile.TemporaryDirectory() as cache:
        env = {**os.environ, "TRITON_CACHE_DIR": cache}
        for state in ("empty", "filled"):
            logs = args.logs / state
            start = time.monotonic()
            with running_cluster(Path(model), TOPOLOGIES[name], logs, *options, env=env) as cluster:
                row: Row = {"cluster": name, "cache": state, "ready_s": time.monotonic() - start}
                if state == "empty":
                    row |= asyncio.run(both_windows(cluster.url, vocab, args))
                late = late_builds(metrics(cluster.operator_url))
                yield {**row, "late_builds": sum(late.values()), "built": late}


def wrong_in(row: Row) -> list[str]:
    """Return what is wrong with a start, a line each, with the cluster's name."""
    problems = failures(row) if "ttft_p99" in row else []
    problems += [f"{count} built after ready: {labels}" for labels, count in row["built"].items()]
    return [f"{row['cluster']}, {row['cache']} cache: {line}" for line in problems]


def main() -> int:
    """Measure each topology and return 1 if its first requests waited."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--topologies", nargs="+", choices=TOPOLOGIES, default=list(TOPOLOGIES))
    parser.add_argument("--model", choices=(*SHAPES, DEMO), default=DEFAULT_MODEL)
    parser.add_argument("--rate", type=float, default=10.0, help="requests per second")
    parser.add_argument("--seconds", type=float, default=15.0, help="length of each window")
    parser.add_argument("--minute", type=float, default=MINUTE_S, help="window to window, in s")
    parser.add_argument("--max-num-seqs", type=int, default=512, help="most sequences of a worker")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--logs", type=Path, help="folder to keep the servers' logs in")
    args = parser.parse_args()
    return run_bench(lambda: run(args))


def run(args: argparse.Namespace) -> None:
    """Measure each cluster, and print a table of what was measured.

    Raises:
        BenchError: a cluster is not warm, or did not start.
    """
    rows: list[Row] = []
    try:
        with tempfile.TemporaryDirectory() as directory:
            args.logs = args.logs or Path(directory, "logs")
            model, vocab = DEMO, DEMO_VOCAB
            if args.model != DEMO:
                write_model(Path(directory), SHAPES[args.model])
                model, vocab = directory, vocab_used(SHAPES[args.model]["vocab_size"])
            for name in args.topologies:
                for row in measure(name, model, vocab, args):
                    rows.append(row)
                    emit("warm", **row)
    finally:
        print(f"\n### TTFT in ms from ready on, and one minute later\n\n{markdown(rows)}")
        wrong = [line for row in rows for line in wrong_in(row)]
        print(*wrong, sep="\n", file=sys.stderr)
    if wrong:
        raise BenchError(f"requests had to wait: {len(wrong)} lines above say where")


if __name__ == "__main__":
    sys.exit(main())
