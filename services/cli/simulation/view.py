"""Tables of `pagewire simulate` and `pagewire plan`."""

from __future__ import annotations

import math

from rich import box
from rich.table import Table

from pagewire.services.cli.simulation.results import Promise, SimulationSummary

HEADS = ("done/s", "kept/s", "kept", "TTFT p50", "p99", "TPOT p50", "gap p99", "remote", "cached")


def table_of(summaries: dict[str, SimulationSummary], promise: Promise) -> Table:
    """Return a table of simulations by the clusters' labels; times are in milliseconds."""
    has_promise = promise != Promise()
    table = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, caption=_caption(summaries), caption_justify="left"
    )
    table.add_column("workers, ms")
    heads = [head for head in HEADS if has_promise or not head.startswith("kept")]
    for head in (*heads, "busy"):
        table.add_column(head, justify="right")
    for label, summary in summaries.items():
        promised = [f"{summary.kept_per_s:.2f}", f"{summary.kept_share:.1%}"] if has_promise else []
        times = (summary.ttft.p50, summary.ttft.p99, summary.tpot.p50, summary.gap.p99)
        shares = (f"{summary.remote_share:.0%}", f"{summary.cached_share:.0%}")
        row = [f"{summary.completed_per_s:.2f}", *promised, *map(milliseconds, times), *shares]
        table.add_row(label, *row, busy_text(summary))
    return table


def milliseconds(value: float) -> str:
    """Return a time in three or more digits; - for none."""
    if math.isnan(value):
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def busy_text(summary: SimulationSummary) -> str:
    """Return the mean share of time in which devices ran steps, by the workers' roles."""
    shares: dict[str, list[float]] = {}
    for name, share in summary.busy.items():
        shares.setdefault(name.partition("-")[0], []).append(share)
    means = {role: sum(values) / len(values) for role, values in shares.items()}
    if set(means) == {"decode"}:
        return f"{means['decode']:.0%}"
    return ", ".join(f"{role[0].upper()} {means[role]:.0%}" for role in sorted(means, reverse=True))


def _caption(summaries: dict[str, SimulationSummary]) -> str:
    first = next(iter(summaries.values()))
    known = f"{first.known_share:.0%} of prompt tokens had been computed before"
    refused = sum(summary.refused for summary in summaries.values())
    return f"{first.requests} requests; {known}" + (f"; {refused} refused" if refused else "")
