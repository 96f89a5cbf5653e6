"""`pagewire plan`: how to divide GPUs between prefill and decode for a load and a promise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from pagewire.services.cli.error_exit import one_line_errors
from pagewire.services.cli.simulation import options
from pagewire.services.cli.simulation.capacity import highest_factor, in_words
from pagewire.services.cli.simulation.cluster import ClusterPlan, SimulatedCluster
from pagewire.services.cli.simulation.command import print_json
from pagewire.services.cli.simulation.machine import MachinePrices
from pagewire.services.cli.simulation.results import Promise, SimulationSummary
from pagewire.services.cli.simulation.view import table_of
from pagewire.services.cli.simulation.worker import WorkerLimits
from pagewire.services.cli.simulation.workload import Conversation, faster
from pagewire.services.cli.terminal import print_whole
from pagewire.shared.base.errors import ConfigError

KEPT_SHARE = 0.9  # share of requests that must get the promise, or it counts as broken
EQUAL_SHARE = 0.005  # differences up to this are noise
WORDS = {"ttft": "first tokens", "tpot": "mean times between tokens", "gap": "gaps"}

_GPUS = "GPUs to divide, one for each worker."
Gpus = Annotated[int, typer.Option(min=1, max=64, help=_GPUS, rich_help_panel="Cluster")]
_LOCAL = "Uncached prompt tokens that a decode worker computes itself; several values are tried."
Locals = Annotated[
    list[int],
    typer.Option("--local-prefill-tokens", min=0, help=_LOCAL, rich_help_panel="Cluster"),
]
_CAPACITY = "Also find how many times this load each division carries; takes 8 times as long."
FindCapacity = Annotated[
    bool, typer.Option("--capacity", help=_CAPACITY, rich_help_panel="Goals and output")
]


@dataclass(frozen=True, slots=True)
class GpuDivision:
    """A division of the GPUs, and how it did.

    Attributes:
        local: prompt tokens that a decode worker computes itself.
        factor: how many times the load it carries; None: this was not looked for.
        slo_gap_s: the workers' objective for gaps.
        broken_alone: parts of the promise that a request of median length breaks without others.
    """

    plan: ClusterPlan
    local: int
    summary: SimulationSummary
    factor: float | None = None
    slo_gap_s: float = math.inf
    broken_alone: frozenset[str] = frozenset()

    @property
    def rank(self) -> tuple[float, float, float]:
        """The best choice has the highest: what it carries, or keeps, and then first tokens."""
        share, ttft = round(self.summary.kept_share / EQUAL_SHARE), self.summary.ttft.p50
        return self.factor or 0.0, share, -math.inf if math.isnan(ttft) else -ttft


@options.with_load
def plan(
    ctx: typer.Context,
    gpus: Gpus,
    local_prefill_tokens: Locals = [32],  # noqa: B006 - typer does not change it
    *,
    capacity: FindCapacity = False,
    as_json: options.AsJson = False,
) -> None:
    """Choose how many GPUs prefill and how many decode, by simulation.

    Tries every division, and aggregated workers, on the same load.

    Example: pagewire plan --gpus 4 --rate 12 --slo-ttft 600 --slo-gap 30
    """
    with one_line_errors():
        params = ctx.params
        promise = options.promise_of(params)
        if promise == Promise():
            raise ConfigError("give a promise to keep: --slo-ttft, --slo-itl or --slo-gap")
        load, machine = options.load_of(params), options.machine_of(params)
        trial = TrialLoad(load, machine, promise, params["seed"], capacity)
        policy, routers = params["policy"], params["routers"]
        divisions = [  # aggregated workers first
            ClusterPlan(prefill, gpus - prefill, policy, routers) for prefill in range(gpus)
        ]
        choices = [
            trial.run(division, options.limits_of(params, machine, local))
            for division in divisions
            for local in dict.fromkeys(local_prefill_tokens[: None if division.prefill else 1])
        ]
        if as_json:
            print_json([_report(choice) for choice in _best_first(choices)])
        else:
            _show(choices, promise)


@dataclass(frozen=True, slots=True)
class TrialLoad:
    """A load that each choice is tried on."""

    load: Sequence[Conversation]
    machine: MachinePrices
    promise: Promise
    seed: int = 0
    finds_capacity: bool = False

    def run(self, plan: ClusterPlan, limits: WorkerLimits) -> GpuDivision:
        """Return how a division of the GPUs does."""
        summary, alone = self._simulate(plan, limits, 1.0), self._broken_alone(plan, limits)
        local, gap_s = limits.local_prefill_tokens, limits.slo_gap_s
        choice = GpuDivision(plan, local, summary, slo_gap_s=gap_s, broken_alone=alone)
        if not self.finds_capacity:
            return choice

        def keeps(factor: float) -> bool:
            done = choice.summary if factor == 1 else self._simulate(plan, limits, factor)
            return done.kept_share >= KEPT_SHARE

        return replace(choice, factor=highest_factor(keeps))

    def _broken_alone(self, plan: ClusterPlan, limits: WorkerLimits) -> frozenset[str]:
        firsts = sorted((each.turns[0] for each in self.load), key=lambda turn: turn.new_tokens)
        cluster = SimulatedCluster(plan, self.machine, limits, self.seed)
        [answer] = cluster.run([Conversation(0.0, (firsts[len(firsts) // 2],))])
        return frozenset(answer.breaks(self.promise) if answer.outcome == "ok" else ())

    def _simulate(
        self, plan: ClusterPlan, limits: WorkerLimits, factor: float
    ) -> SimulationSummary:
        cluster = SimulatedCluster(plan, self.machine, limits, self.seed)
        cluster.run(faster(list(self.load), factor))
        return cluster.summary(self.promise)


def _best_first(choices: Sequence[GpuDivision]) -> list[GpuDivision]:
    return sorted(choices, key=lambda each: each.rank, reverse=True)


def _report(choice: GpuDivision) -> dict[str, object]:
    return {
        "workers": choice.plan.label,
        "local_prefill_tokens": choice.local,
        "slo_gap_s": None if choice.slo_gap_s == math.inf else choice.slo_gap_s,
        "capacity": choice.factor,
        "carries": None if choice.factor is None else in_words(choice.factor),
        "why": reason(choice),
        **msgspec.to_builtins(choice.summary),
    }


def _show(choices: Sequence[GpuDivision], promise: Promise) -> None:
    ranked = _best_first(choices)
    has_locals = len({choice.local for choice in choices}) > 1
    labels = [_label(choice, has_locals) for choice in ranked]
    console = Console()
    summaries = {label: each.summary for label, each in zip(labels, ranked, strict=True)}
    print_whole(console, table_of(summaries, promise))
    console.print(verdict(ranked[0]), soft_wrap=True)
    for label, each in zip(labels, ranked, strict=True):
        carries = "" if each.factor is None else f"carries {in_words(each.factor)}; "
        console.print(f"  {label}: {carries}{reason(each)}", soft_wrap=True)


def _label(choice: GpuDivision, has_locals: bool) -> str:
    is_mixed = has_locals and choice.plan.prefill
    return f"{choice.plan.label}, {choice.local} local" if is_mixed else choice.plan.label


def verdict(best: GpuDivision) -> str:
    """Return in words what to do."""
    share, label = best.summary.kept_share, best.plan.label
    if best.slo_gap_s < math.inf:
        label += f" with --slo-gap-s {best.slo_gap_s:g}"
    if share >= KEPT_SHARE:
        return f"Take {label}: {share:.1%} of the requests get what they are promised."
    return (
        f"No division keeps the promise for {KEPT_SHARE:.0%} of the requests. "
        f"{label} keeps it for {share:.1%}: {_advice(best)}."
    )


def _advice(best: GpuDivision) -> str:
    summary = best.summary
    if 2 * summary.too_long >= (1 - summary.kept_share) * summary.requests:
        return "give workers more KV blocks (--num-blocks), or send shorter prompts"
    return "promise less" if best.broken_alone else "use more GPUs, or promise less"


def reason(choice: GpuDivision) -> str:
    """Return which part of the promise a choice broke most often, and why."""
    summary = choice.summary
    part, share = max(summary.broken.items(), key=lambda item: item[1])
    if share == 0:
        return "keeps every part of the promise"
    why = "queues were full"
    if summary.too_long:
        others = "; queues were full for the others" if summary.too_long < summary.refused else ""
        why = f"{summary.too_long} need more KV blocks than a worker has{others}"
    refusals = f"{summary.refused} of {summary.requests} requests were refused: {why}"
    if 2 * summary.refused >= share * summary.requests:  # these are most of those that broke it
        return refusals
    why = f"{WORDS[part]} are too long for {share:.1%} of the requests: {_cause(choice, part)}"
    return f"{why}; {refusals}" if summary.refused else why


def _cause(choice: GpuDivision, part: str) -> str:
    if part in choice.broken_alone:
        return "they are even for a request of median length that is alone"
    busy = choice.summary.busy
    prefill = max((each for name, each in busy.items() if name.startswith("prefill")), default=0.0)
    decode = max((each for name, each in busy.items() if name.startswith("decode")), default=0.0)
    if part == "ttft":
        who, share = ("a prefill worker", prefill) if choice.plan.prefill else ("a worker", decode)
        return f"{who} is busy {share:.0%} of the time"
    if not choice.plan.prefill:
        return "prompts are computed in the same steps as answers"
    return f"decode workers have many answers at once (one is busy {decode:.0%} of the time)"
