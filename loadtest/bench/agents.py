"""`python -P -m pagewire.loadtest.bench.agents CLUSTER ...`: agents with many turns.

Starts clusters of the demo model on this machine's CPU, one after the other, each worker pinned to
a core, and lets the same agents work on each; with `--gpu`, clusters of Llama-3.1-8B's shape with
random weights, each worker on a GPU (then `--scale 1` has the lengths of real agents). CLUSTER is
the options of `pagewire up`, as one argument: "--prefill 1 --decode 1 --policy predicted". Prints
one row a cluster:

    turns            answers, of the first turns, too
    TTFT             of the turns after each agent's first, ms
    gap p99          longest gap between two tokens of each answer, ms, 99th percentile
    hits             cached prompt tokens of those turns, as a share of the whole blocks of their
                     agents' last prompts and answers
    prefilled        share of those turns whose prompt a prefill worker computed
    busy             mean share of their cores that prefill and decode workers used
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

from pagewire.loadtest.bench.clusters import READY_TIMEOUT_S
from pagewire.loadtest.bench.model import write_model
from pagewire.loadtest.bench.tables import emit_all
from pagewire.loadtest.cluster import running_cluster
from pagewire.loadtest.cpu import CpuSampler, pin
from pagewire.services.cli.bench.stats import percentile
from pagewire.services.cli.client.openai_client import COMPLETIONS, OpenAIClient, Reply
from pagewire.services.cli.simulation.workload import AgentShape, Conversation, PromptPart, agents
from pagewire.shared.model.demo import demo_model_path

BLOCK_TOKENS = 16
WORDS = range(64, 2048)  # ids of the demo model's tokens that are text
LONG_CONTEXT = 262_144
ON_CPU = ("--device", "cpu", "--dtype", "float32", "--routers", "1", "--num-blocks", "65536")
ON_GPU = ("--device", "cuda", "--load-format", "dummy")


@dataclass(slots=True)
class Findings:
    """The measurements of a cluster, in seconds; all but `turns` and `gaps` are of later turns."""

    turns: int = 0
    gaps: list[float] = field(default_factory=list)
    ttft: list[float] = field(default_factory=list)
    cached: int = 0
    known: int = 0
    prefilled: int = 0

    def add(self, reply: Reply, known: int | None) -> None:
        """Add an answer; `known` is the number of tokens that its agent had sent or got before."""
        self.turns += 1
        self.gaps.append(max(reply.gaps(), default=0.0))
        if known is None:
            return
        self.ttft.append(reply.ttft or 0.0)
        self.cached += reply.cached_tokens or 0
        self.known += known // BLOCK_TOKENS * BLOCK_TOKENS
        answer = json.loads(reply.timings)["choices"][0]
        self.prefilled += answer["prefill"]["worker"] != answer["decode"]["worker"]

    def row(self) -> dict[str, Any]:
        """Return the columns of the table."""
        later = len(self.ttft)
        return {
            "turns": self.turns,
            "TTFT p50": 1e3 * percentile(self.ttft, 50),
            "TTFT p95": 1e3 * percentile(self.ttft, 95),
            "gap p99": 1e3 * percentile(self.gaps, 99),
            "hits": self.cached / max(1, self.known),
            "prefilled": self.prefilled / max(1, later),
        }


def tokens_of(part: PromptPart) -> list[int]:
    """Return a part's tokens, always the same for the same part."""
    return random.Random(part.content).choices(WORDS, k=part.tokens)


def long_model(directory: Path, is_gpu: bool) -> Path:
    """Make a model with a context that agents fit in: of the demo model, or of random weights."""
    model = directory / "model"
    if is_gpu:
        model.mkdir()
        write_model(model)
        return model
    shutil.copytree(demo_model_path(), model)
    config = json.loads((model / "config.json").read_bytes())
    config["max_position_embeddings"] = LONG_CONTEXT
    (model / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return model


async def measure(url: str, load: Sequence[Conversation]) -> Findings:
    """Let the agents work; returns what was measured."""
    found = Findings()
    async with OpenAIClient(url, timeout_s=120.0, keep_text=False, asks_timings=True) as client:
        model = await client.choose_model(None)

        async def work(agent: Conversation, name: str) -> None:
            await asyncio.sleep(agent.start_s)
            history: list[int] = []
            for turn in agent.turns:
                await asyncio.sleep(turn.pause_s)
                known = len(history) if turn.continues else None
                history += [token for part in turn.new for token in tokens_of(part)]
                body = {"model": model, "prompt": history, "temperature": 0}
                body["max_tokens"] = turn.answer_tokens
                more = {"ignore_eos": True, "session_id": name}
                reply = await client.stream(COMPLETIONS, body, more)
                history += reply.token_ids
                found.add(reply, known)

        async with asyncio.TaskGroup() as tasks:
            for number, agent in enumerate(load):
                tasks.create_task(work(agent, f"agent-{number}"))
    return found


def compare(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the rows of the table."""
    load = agents(args.agents, args.seed, shape_of(args))
    with tempfile.TemporaryDirectory() as made:
        model = long_model(Path(made), args.gpu)
        for number, text in enumerate(args.clusters):
            options = [*(ON_GPU if args.gpu else ON_CPU), "--model", str(model), *shlex.split(text)]
            with running_cluster(options, Path(made) / str(number), READY_TIMEOUT_S) as cluster:
                if not args.gpu:
                    pin(cluster.pid)
                sampler = CpuSampler()
                sampler.sample()  # CPU time used before does not count
                measured = asyncio.run(measure(cluster.url, load))
                cores = sampler.sample_workers()
            by_role = groupby(cores.items(), key=lambda used: used[0].partition("-")[0])
            busy = [f"{role} {fmean(used for _, used in group):.0%}" for role, group in by_role]
            yield {"cluster": text, **measured.row(), "busy": " ".join(busy)}


def shape_of(args: argparse.Namespace) -> AgentShape:
    """Return the agents that the command line asks for."""
    usual = AgentShape()

    def scaled(pair: tuple[int, int]) -> tuple[int, int]:
        return pair[0] // args.scale, pair[1] // args.scale

    return replace(
        usual,
        shared_tokens=usual.shared_tokens // args.scale,
        own_tokens=scaled(usual.own_tokens),
        new_tokens=scaled(usual.new_tokens),
        answer_tokens=scaled(usual.answer_tokens),
        turns=(args.turns, args.turns),
        pause_s=(usual.pause_s[0] / args.faster, usual.pause_s[1] / args.faster),
        spread_s=usual.spread_s / args.faster,
    )


def main() -> int:
    """Measure the agents on each cluster and print the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("clusters", nargs="+", metavar="CLUSTER")
    parser.add_argument("--gpu", action="store_true", help="an 8B shape, each worker on a GPU")
    parser.add_argument("--agents", type=int, default=1)
    parser.add_argument("--turns", type=int, default=12, help="turns of each agent")
    parser.add_argument("--scale", type=int, default=5, help="divisor of all lengths")
    parser.add_argument("--faster", type=float, default=1.0, help="divisor of all pauses")
    parser.add_argument("--seed", type=int, default=0)
    emit_all("agents", compare(parser.parse_args()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
