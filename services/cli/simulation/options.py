"""Options of `pagewire simulate` and `pagewire plan`, and the load that they describe."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import typer

from pagewire.services.cli.bench import options as bench_options
from pagewire.services.cli.bench.load import Lengths, arrival_times
from pagewire.services.cli.options import with_parameters
from pagewire.services.cli.simulation import workload
from pagewire.services.cli.simulation.machine import MachinePrices, load_machine, machine_names
from pagewire.services.cli.simulation.results import Promise
from pagewire.services.cli.simulation.trace_file import read_trace
from pagewire.services.cli.simulation.worker import WorkerLimits
from pagewire.services.cli.simulation.workload import Contents, Conversation
from pagewire.shared.base.errors import ConfigError
from pagewire.shared.settings.types import Policy

DEFAULT_REQUESTS = 2000

_load = partial(typer.Option, rich_help_panel="Load")
_cluster = partial(typer.Option, rich_help_panel="Cluster")
_goal = partial(typer.Option, rich_help_panel="Goals and output")

_TRACE = (
    "File of a request trace in Mooncake's format, one JSON object a line: timestamp (ms), "
    "input_length, output_length and hash_ids (numbers of 512-token blocks)."
)
_SPEED = "With --trace: requests come this many times as fast."
_ARRIVALS = "With --rate: at random one by one, at random eight at once, or evenly spaced."
_USERS = "This many users, each with one request at a time."
_AGENTS = (
    "This many agents: 40 to 100 turns over a context that they share in part, each with 300 to "
    "600 new tokens and an answer of 300 to 450, and pauses with medians of 2 to 24 s."
)
_HOW_MANY = f"Requests to send.  [default: {DEFAULT_REQUESTS}, or all of a trace]"
_MACHINE = f"Prices of steps and transfers: a JSON file, or one of {', '.join(machine_names())}."
_STEP = "Tokens of one step.  [default: the machine's]"
_BLOCKS = "Blocks in a worker's KV pool.  [default: the machine's]"
_TTFT = "Promise: the first token within this many ms."
_ITL = "Promise: a mean time between an answer's tokens of up to this many ms."
_GAP = "Promise: 99 % of the times between an answer's tokens up to this many ms."
_KEEP = (
    "Workers have nine tenths of --slo-gap or, without it, 97.5 % of --slo-itl as their slo_gap_s "
    "(predictions err a little); with --no-keep-gap none.  [default: where one is promised]"
)
AsJson = Annotated[bool, _goal("--json", help="Print JSON, with all figures.")]


def _options(
    *,
    trace: Annotated[Path | None, _load(metavar="FILE", help=_TRACE)] = None,
    speed: Annotated[float, _load(min=0.001, max=1000, help=_SPEED)] = 1.0,
    rate: bench_options.Rate = None,
    arrivals: Annotated[Literal["poisson", "bursts", "fixed"], _load(help=_ARRIVALS)] = "poisson",
    concurrency: Annotated[int | None, _load(min=1, max=10_000, help=_USERS)] = None,
    agents: Annotated[int | None, _load(min=1, max=10_000, help=_AGENTS)] = None,
    sessions: Annotated[bool, _load(help="Agents name their sessions.")] = True,
    requests: Annotated[int | None, _load(min=1, max=1_000_000, help=_HOW_MANY)] = None,
    seed: Annotated[int, _load(help="Seed of arrivals, lengths and ties.")] = 0,
    prompt_tokens: bench_options.PromptTokens = "1024",
    output_tokens: bench_options.OutputTokens = "256",
    shared_prefix: bench_options.SharedPrefix = 0,
    machine: Annotated[str, _cluster(metavar="NAME", help=_MACHINE)] = "h200-llama-3.1-8b",
    policy: Annotated[Policy, _cluster(help="How routers place requests.")] = "predicted",
    routers: Annotated[
        int, _cluster(min=1, max=64, help="Routers; requests go to each in turn.")
    ] = 1,
    max_num_batched_tokens: Annotated[int | None, _cluster(min=16, help=_STEP)] = None,
    max_num_seqs: Annotated[
        int, _cluster(min=1, help="Most sequences that a worker runs at once.")
    ] = 512,
    num_blocks: Annotated[int | None, _cluster(min=1, help=_BLOCKS)] = None,
    enable_prefix_caching: Annotated[
        bool, _cluster(help="Reuse blocks with equal content.")
    ] = True,
    slo_ttft: Annotated[float | None, _goal(min=0.0, metavar="MS", help=_TTFT)] = None,
    slo_itl: Annotated[float | None, _goal(min=0.0, metavar="MS", help=_ITL)] = None,
    slo_gap: Annotated[float | None, _goal(min=0.0, metavar="MS", help=_GAP)] = None,
    keep_gap: Annotated[bool | None, _goal("--keep-gap/--no-keep-gap", help=_KEEP)] = None,
) -> None:
    """Hold the options that `with_load` reads from this signature; nobody calls it."""


def with_load(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of loads, machines and promises, which are in `ctx.params`."""
    return with_parameters(command, inspect.signature(_options, eval_str=True).parameters.values())


BURST = 8


def load_of(params: Mapping[str, Any]) -> list[Conversation]:
    """Return the load that the options describe.

    Raises:
        ConfigError: options contradict each other, or the trace is wrong.
    """
    kinds = [name for name in ("trace", "rate", "concurrency", "agents") if params[name]]
    if len(kinds) != 1:
        raise ConfigError(
            "give one load: --trace FILE, --rate, --concurrency or --agents; not "
            + (" and ".join(f"--{name}" for name in kinds) or "none")
        )
    seed, requests = params["seed"], params["requests"]
    if kinds == ["trace"]:
        trace = read_trace(params["trace"])
        return workload.faster(trace[:requests], params["speed"])
    if kinds == ["agents"]:
        agents = workload.agents(params["agents"], seed, named=params["sessions"])
        return workload.first_turns(agents, requests)
    contents, count = _contents(params), requests or DEFAULT_REQUESTS
    if kinds == ["concurrency"]:
        return workload.clients(params["concurrency"], count, contents, seed)
    rate, arrivals = params["rate"], params["arrivals"]
    if arrivals == "bursts":
        times = workload.bursts(rate, BURST, seed)
    else:
        times = arrival_times(arrivals, rate, seed)
    return workload.independent(times, count, contents, seed)


def _contents(params: Mapping[str, Any]) -> Contents:
    prompt = Lengths.parse(params["prompt_tokens"])
    if params["shared_prefix"] > prompt.low:
        raise ConfigError(f"--shared-prefix cannot be longer than a prompt, {prompt} tokens")
    answer = Lengths.parse(params["output_tokens"])
    return Contents(prompt.draw, answer.draw, params["shared_prefix"])


def machine_of(params: Mapping[str, Any]) -> MachinePrices:
    """Return the machine that the options name, with the pool that they give it.

    Raises:
        ConfigError: no machine has this name, or its file is not valid.
    """
    machine = load_machine(params["machine"])
    if params["num_blocks"] is None:
        return machine
    return msgspec.structs.replace(machine, kv_blocks=params["num_blocks"])


def limits_of(params: Mapping[str, Any], machine: MachinePrices, local: int) -> WorkerLimits:
    """Return the settings of the workers.

    Args:
        params: the options.
        machine: what the workers run on.
        local: prompt tokens that a decode worker computes itself.
    """
    return WorkerLimits(
        max_num_batched_tokens=params["max_num_batched_tokens"] or machine.max_step_tokens,
        max_num_seqs=params["max_num_seqs"],
        local_prefill_tokens=local,
        caching=params["enable_prefix_caching"],
        slo_gap_s=_worker_gap_s(params),
    )


def _worker_gap_s(params: Mapping[str, Any]) -> float:
    """Return the workers' own objective.

    Raises:
        ConfigError: they are to keep a gap that nothing promises.
    """
    is_promised = params["slo_gap"] is not None or params["slo_itl"] is not None
    if params["keep_gap"] and not is_promised:
        raise ConfigError("--keep-gap needs --slo-gap or --slo-itl")
    if not is_promised or params["keep_gap"] is False:
        return math.inf
    return promise_of(params).objective_s


def promise_of(params: Mapping[str, Any]) -> Promise:
    """Return the promise; a part without a bound is always kept."""
    bounds = [params[name] for name in ("slo_ttft", "slo_itl", "slo_gap")]
    return Promise(*(math.inf if bound is None else bound / 1e3 for bound in bounds))
