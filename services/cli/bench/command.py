"""The command `pagewire bench`: puts load on a server and reports its latencies."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from pagewire.services.cli.bench import options as bench_options
from pagewire.services.cli.bench.load import Lengths, Workload
from pagewire.services.cli.bench.runner import BenchRun, EndpointTarget, RequestPace
from pagewire.services.cli.bench.stats import Results, Slo
from pagewire.services.cli.bench.view import run_with_bar, show_report
from pagewire.services.cli.client import client_options
from pagewire.services.cli.client.openai_client import CHAT, COMPLETIONS, OpenAIClient
from pagewire.services.cli.ctrl_c import CtrlC
from pagewire.services.cli.error_exit import EXIT_FAILURE, EXIT_INTERRUPTED, one_line_errors
from pagewire.shared.base.errors import ConfigError

CLOSE_S = 5.0
STDOUT = "-"


@dataclass(frozen=True)
class BenchPlan:
    """A checked command line.

    Attributes:
        params: the options' values as given, by name.
    """

    params: dict[str, Any]
    pace: RequestPace
    slo: Slo
    prompt_tokens: Lengths
    output_tokens: Lengths
    seed: int
    path: str

    def config(self, model: str, url: str) -> dict[str, Any]:
        """Return the settings that are needed to repeat the run, without the API key."""
        options = {name: value for name, value in self.params.items() if name != "api_key"}
        ends = {"requests": self.pace.requests, "concurrency": self.pace.concurrency}
        if self.pace.rate is not None:
            ends["concurrency"] = None
        return {**options, **ends, "seed": self.seed, "model": model, "url": url}


def bench(
    ctx: typer.Context,
    url: client_options.Url = None,
    model: client_options.ClientModel = None,
    api_key: client_options.ApiKey = None,
    rate: bench_options.Rate = None,
    arrivals: bench_options.ArrivalKind = "poisson",
    concurrency: bench_options.Concurrency = None,
    requests: bench_options.Requests = None,
    duration: bench_options.Duration = None,
    max_in_flight: bench_options.MaxInFlight = 1024,
    endpoint: bench_options.Endpoint = "completions",
    prompt_tokens: bench_options.PromptTokens = "128",
    output_tokens: bench_options.OutputTokens = "64",
    shared_prefix: bench_options.SharedPrefix = 0,
    temperature: bench_options.Temperature = 0.0,
    seed: bench_options.LoadSeed = None,
    slo_ttft: bench_options.SloTtft = None,
    slo_itl: bench_options.SloItl = None,
    json_file: bench_options.JsonFile = None,
    timeout: client_options.Timeout = 120.0,
) -> None:
    """Measure an OpenAI-compatible endpoint under load.

    Prompts are random words; their lengths are in the endpoint's own tokens.
    Answers have their full length if the endpoint supports `ignore_eos`.
    Exit code 1 if no request was answered.

    Example: pagewire bench --rate 4 --duration 30 --slo-ttft 500 --slo-itl 50 --json out.json
    """
    with one_line_errors():
        plan = make_plan(ctx.params)
        target = client_options.endpoint(url, api_key)
        if json_file is not None and json_file != STDOUT:
            _require_writable(json_file)
        results = Results(plan.slo)
        with asyncio.Runner() as runner, CtrlC(runner.get_loop()) as ctrl_c:
            report = runner.run(_measure(plan, target, model, results, ctrl_c))
            if report is not None:
                _hand_out(report, json_file)
    if ctrl_c.pressed or not results.ok:
        raise typer.Exit(EXIT_INTERRUPTED if ctrl_c.pressed else EXIT_FAILURE)


def make_plan(params: dict[str, Any]) -> BenchPlan:
    """Check the options.

    Raises:
        ConfigError: options contradict each other, or a length is not valid.
    """
    rate, concurrency = params["rate"], params["concurrency"]
    if rate is not None and concurrency is not None:
        raise ConfigError("--rate and --concurrency exclude each other; see pagewire bench --help")
    requests, duration = params["requests"], params["duration"]
    if requests is None and duration is None:
        requests = bench_options.DEFAULT_REQUESTS
    slo_ttft, slo_itl = params["slo_ttft"], params["slo_itl"]
    prompt_tokens = Lengths.parse(params["prompt_tokens"])
    if params["shared_prefix"] > prompt_tokens.low:
        raise ConfigError(f"--shared-prefix cannot be longer than a prompt, {prompt_tokens} tokens")
    return BenchPlan(
        params=params,
        pace=RequestPace(
            rate=rate,
            arrivals=params["arrivals"],
            concurrency=concurrency or bench_options.DEFAULT_CONCURRENCY,
            max_in_flight=params["max_in_flight"],
            requests=requests,
            duration_s=duration,
        ),
        slo=Slo(
            None if slo_ttft is None else slo_ttft / 1e3, None if slo_itl is None else slo_itl / 1e3
        ),
        prompt_tokens=prompt_tokens,
        output_tokens=Lengths.parse(params["output_tokens"]),
        seed=secrets.randbelow(1 << 32) if params["seed"] is None else params["seed"],
        path=CHAT if params["endpoint"] == "chat" else COMPLETIONS,
    )


async def _measure(
    plan: BenchPlan,
    endpoint: tuple[str, str | None],
    model: str | None,
    results: Results,
    ctrl_c: CtrlC,
) -> dict[str, Any] | None:
    """Run the load until its end or Ctrl-C; return the report, or None if it did not start."""
    client = OpenAIClient(*endpoint, timeout_s=plan.params["timeout"], keep_text=False)
    try:
        prepared = await ctrl_c.ends(_prepare(plan, client, model, results))
        if prepared is None:
            return None
        run, name = prepared
        await ctrl_c.ends(run_with_bar(run, Console(stderr=True)))
    finally:
        with contextlib.suppress(TimeoutError):  # a lost connection must not delay the results
            async with asyncio.timeout(CLOSE_S):
                await client.aclose()
    return {"config": plan.config(name, client.url), **results.report(run.seconds)}


async def _prepare(
    plan: BenchPlan, client: OpenAIClient, model: str | None, results: Results
) -> tuple[BenchRun, str]:
    """Warm up and measure how the endpoint counts tokens; return the run and the model's name."""
    name = await client.choose_model(model)
    fields = {"model": name, "temperature": plan.params["temperature"]}
    target = EndpointTarget(client, plan.path, fields)
    ratio = await target.measure_ratio(plan.seed)
    shared_prefix = plan.params["shared_prefix"]
    workload = Workload(plan.prompt_tokens, plan.output_tokens, shared_prefix, ratio, plan.seed)
    return BenchRun(target, workload, plan.pace, results), name


def _require_writable(file: str) -> None:
    """Check before the load that the results can be written; the file is not changed.

    Raises:
        ConfigError: the file cannot be written.
    """
    target = Path(os.path.realpath(file))  # create and remove a link's target, not the link
    try:
        if not target.exists():
            target.touch(exist_ok=False)
            target.unlink()
        elif target.is_file() or target.is_dir():
            target.open("ab").close()
        elif not os.access(target, os.W_OK):  # opening a FIFO would wait for its reader
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as exc:
        raise _unwritable(file, exc) from exc


def _hand_out(report: dict[str, Any], json_file: str | None) -> None:
    """Write and show the report; if one fails, still do the other."""
    try:
        if json_file is not None:
            _write(json_file, report)
    finally:
        show_report(Console(stderr=json_file == STDOUT), report)


def _write(file: str, report: dict[str, Any]) -> None:
    text = json.dumps(report, indent=2, ensure_ascii=False)
    if file == STDOUT:
        print(text, flush=True)
        return
    try:
        Path(file).write_text(f"{text}\n", encoding="utf-8")
    except OSError as exc:
        raise _unwritable(file, exc) from exc


def _unwritable(file: str, exc: OSError) -> ConfigError:
    return ConfigError(f"--json {file} cannot be written: {exc.strerror}")
