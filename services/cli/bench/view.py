"""Shows a progress bar while a bench runs, then a table of its results."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from pagewire.services.cli.bench.runner import BenchRun
from pagewire.services.cli.bench.stats import PERCENTS
from pagewire.services.cli.terminal import can_redraw, print_whole, printable, run_watched

REFRESH_S = 0.2
LATENCIES = (
    ("Time to first token", "ttft_ms"),
    ("Between tokens", "itl_ms"),
    ("End to end", "e2e_ms"),
)


async def run_with_bar(run: BenchRun, console: Console) -> None:
    """Run a bench to its end, with a progress bar if the output is a terminal."""
    columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not can_redraw(console)) as bar:
        task = bar.add_task("", total=1.0)

        def redraw() -> None:
            bar.update(task, completed=run.progress, description=_status(run))

        try:
            await run_watched(run.run(), redraw, REFRESH_S)
        finally:
            redraw()


def _status(run: BenchRun) -> str:
    results = run.results
    failed = f", [red]{results.failed} failed[/red]" if results.failed else ""
    return f"{results.ok} done{failed}, {run.in_flight} in flight"


def show_report(console: Console, report: dict[str, Any]) -> None:
    """Print the results of a bench."""
    if report["requests"]["ok"]:
        print_whole(console, _latencies(report))
    for line in summary_lines(report):
        console.print(Text(printable(line)), soft_wrap=True)


def _latencies(report: dict[str, Any]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("ms")
    names = ["mean", *(f"p{percent}" for percent in PERCENTS), "max"]
    for name in names:
        table.add_column(name, justify="right")
    for label, key in LATENCIES:
        latency = report[key]
        table.add_row(
            label, *("-" if latency is None else f"{latency[name]:.1f}" for name in names)
        )
    return table


def summary_lines(report: dict[str, Any]) -> Iterator[str]:
    """Yield the results other than latencies, and warnings."""
    requests, tokens, speed = report["requests"], report["tokens"], report["throughput"]
    yield (
        f"{requests['ok']} of {requests['sent']} requests answered in {report['duration_s']:.2f} s"
    )
    if requests["ok"]:
        yield (
            f"{_number(speed['requests_per_s'])} requests/s, "
            f"{_number(speed['output_tokens_per_s'])} output tokens/s, "
            f"{_number(speed['total_tokens_per_s'])} tokens/s with prompts"
        )
    if tokens["prompt_per_request"] is not None:
        mean = tokens["prompt_per_request"]["mean"]
        cached = tokens["cached"]
        share = "" if cached is None else f", {cached / max(1, tokens['prompt']):.0%} of it cached"
        out = tokens["output"] / max(1, requests["ok"])
        yield f"{mean:.0f} prompt tokens{share}, {out:.0f} output tokens a request"
    if (goodput := report["goodput"]) is not None:
        yield f"Goodput: {_number(goodput['requests_per_s'])} requests/s keep {_slo(goodput)}" + (
            "" if goodput["share"] is None else f", {goodput['share']:.1%} of those sent"
        )
    yield from _warnings(requests, tokens)


def _warnings(requests: dict[str, Any], tokens: dict[str, Any]) -> Iterator[str]:
    for kind, count in requests["errors"].items():
        yield f"failed, {kind}: {count} ({requests['first_messages'][kind]})"
    if requests["unfinished"]:
        yield f"{requests['unfinished']} not ended when the bench was stopped"
    if tokens["counted_by_chunks"]:
        yield "the server reports neither token ids nor usage: each chunk of text counts as one"
    if tokens["miscounted"]:
        yield f"{tokens['miscounted']} replies had another number of token ids than their usage"


def _slo(goodput: dict[str, Any]) -> str:
    bounds = (("TTFT", goodput["slo_ttft_ms"]), ("time between tokens", goodput["slo_itl_ms"]))
    return " and ".join(f"{name} <= {bound:g} ms" for name, bound in bounds if bound is not None)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if value < 100 else f"{value:,.0f}"
