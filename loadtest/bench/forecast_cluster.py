"""`python -P -m pagewire.loadtest.bench.forecast_cluster FILE`: simulated and real clusters.

Starts clusters of the demo model on this machine's CPU, one after the other, each worker pinned to
a core, and sends them requests at several rates. Simulates the same requests on the machine of a
file, which `pagewire.loadtest.bench.machine` makes. Prints one row a rate, and for each cluster the
rate at which 90 % of the requests kept the promise. Each cell is: measured / simulated.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

from pagewire.loadtest.bench.tables import markdown
from pagewire.loadtest.cluster import running_cluster
from pagewire.loadtest.cpu import pin
from pagewire.services.cli.bench.load import Lengths, TokenRatio, Workload, arrival_times
from pagewire.services.cli.bench.runner import BenchRun, EndpointTarget, RequestPace
from pagewire.services.cli.bench.stats import Results, Slo
from pagewire.services.cli.client.openai_client import COMPLETIONS, OpenAIClient
from pagewire.services.cli.simulation.cluster import ClusterPlan, SimulatedCluster
from pagewire.services.cli.simulation.command import parse_workers
from pagewire.services.cli.simulation.machine import MachinePrices, load_machine
from pagewire.services.cli.simulation.results import Promise
from pagewire.services.cli.simulation.worker import WorkerLimits
from pagewire.services.cli.simulation.workload import Conversation, PromptPart, Turn

KEPT = 0.9
Figures = dict[str, float]


def conversations_of(workload: Workload, rate: float, seconds: float) -> list[Conversation]:
    """Return a workload's requests as the simulator takes them."""
    ratio = workload.ratio
    conversations: list[Conversation] = []
    times = arrival_times("poisson", rate, workload.seed)
    for number, time_s in enumerate(takewhile(lambda time_s: time_s < seconds, times)):
        request = workload.request(number)
        words = len(request.prompt.split())
        tokens = round(ratio.fixed + ratio.per_word * words)
        turn = Turn((PromptPart(number + 1, tokens),), request.output_tokens)
        conversations.append(Conversation(time_s, (turn,)))
    return conversations


async def measure(
    url: str, workload: Workload, rates: Sequence[float], seconds: float, slo: Slo
) -> tuple[Workload, list[Figures]]:
    """Send requests at each rate; returns their workload and the figures."""
    answers = []
    async with OpenAIClient(url, timeout_s=60.0, keep_text=False) as client:
        model = await client.choose_model(None)
        target = EndpointTarget(client, COMPLETIONS, {"model": model, "temperature": 0})
        ratio = await target.measure_ratio(workload.seed)
        workload = replace(workload, ratio=ratio)
        for rate in rates:
            results = Results(slo)
            run = BenchRun(target, workload, RequestPace(rate=rate, duration_s=seconds), results)
            await run.run()
            ttft, gap = results.ttft.summary(1e3) or {}, results.itl.summary(1e3) or {}
            answers.append(
                {
                    "done_s": results.ok / run.seconds,
                    "ttft_p50": ttft["p50"],
                    "gap_p50": gap["p50"],
                    "kept": results.good / results.sent,
                }
            )
    return workload, answers


def simulate(
    plan: ClusterPlan, machine: MachinePrices, load: Sequence[Conversation], slo: Slo
) -> Figures:
    """Return the figures of the same requests by simulation."""
    limits = WorkerLimits(machine.max_step_tokens, caching=False)
    cluster = SimulatedCluster(plan, machine, limits)
    cluster.run(load)
    summary = cluster.summary(Promise(slo.ttft_s or 1e9, slo.itl_s or 1e9))
    return {
        "done_s": summary.completed_per_s,
        "ttft_p50": summary.ttft.p50,
        "gap_p50": summary.gap.p50,
        "kept": summary.kept_share,
    }


def rate_kept(rates: Sequence[float], shares: Sequence[float]) -> float:
    """Return the rate up to which `KEPT` of the requests keep the promise, between two rates."""
    points = list(zip(rates, shares, strict=True))
    for (rate, share), (next_rate, next_share) in pairwise(points):
        if share >= KEPT > next_share:
            return rate + (next_rate - rate) * (share - KEPT) / (share - next_share)
    return rates[-1] if shares[-1] >= KEPT else float("nan")


def options_of(plan: ClusterPlan, machine: MachinePrices) -> list[str]:
    """Return the options of `pagewire up` for the cluster that is simulated."""
    workers = ("--prefill", str(plan.prefill), "--decode", str(plan.decode))
    sizes = ("--num-blocks", str(machine.kv_blocks), "--max-num-seqs", "512")
    steps = ("--max-num-batched-tokens", str(machine.max_step_tokens))
    engine = ("--device", "cpu", "--dtype", "float32", "--no-enable-prefix-caching")
    routers = ("--routers", "1", "--policy", plan.policy)
    return [*workers, *routers, *sizes, *steps, *engine]


def compare(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the rows of the table."""
    machine, slo = load_machine(args.machine), Slo(args.slo_ttft / 1e3, args.slo_itl / 1e3)
    lengths = Lengths.parse(args.prompt_tokens), Lengths.parse(args.output_tokens)
    for text in args.workers:
        plan = parse_workers(text, args.policy, 1)
        workload = Workload(*lengths, 0, TokenRatio(0.0, 1.0), args.seed)
        with (
            tempfile.TemporaryDirectory() as logs,
            running_cluster(options_of(plan, machine), Path(logs)) as cluster,
        ):
            pin(cluster.pid)
            measuring = measure(cluster.url, workload, args.rates, args.seconds, slo)
            workload, measured = asyncio.run(measuring)
        loads = [conversations_of(workload, rate, args.seconds) for rate in args.rates]
        summaries = [simulate(plan, machine, load, slo) for load in loads]
        for rate, real, simulated in zip(args.rates, measured, summaries, strict=True):
            pairs = {name: f"{real[name]:.3g} / {simulated[name]:.3g}" for name in real}
            yield {"cluster": plan.label, "rate": rate, **pairs}
        ends = [
            rate_kept(args.rates, [figures["kept"] for figures in side])
            for side in (measured, summaries)
        ]
        yield {"cluster": plan.label, "rate": f"{KEPT:.0%} kept: {ends[0]:.3g} / {ends[1]:.3g}"}


def main() -> int:
    """Measure real clusters, simulate the same ones, and compare them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("machine", help="JSON file of the machine's prices")
    parser.add_argument("--workers", nargs="+", default=["1P1D", "2"])
    parser.add_argument("--policy", default="predicted")
    parser.add_argument("--rates", nargs="+", type=float, default=[2, 4, 6, 8])
    parser.add_argument("--seconds", type=float, default=20.0, help="length of each rate")
    parser.add_argument("--prompt-tokens", default="64:1024")
    parser.add_argument("--output-tokens", default="16:64")
    parser.add_argument("--slo-ttft", type=float, default=400.0, help="bound in ms")
    parser.add_argument("--slo-itl", type=float, default=20.0, help="ms, mean of an answer")
    parser.add_argument("--seed", type=int, default=0)
    print(markdown(list(compare(parser.parse_args()))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
