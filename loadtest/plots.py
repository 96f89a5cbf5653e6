"""The report's plots: one PNG a subject, each with all runs in it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from pagewire.loadtest.records import Sample
from pagewire.loadtest.results import RunResult
from pagewire.loadtest.slo import Percentiles, Slo, StageSummary

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9")  # also apart for the colour-blind
PERCENTILES = ("p50", "p90", "p99")
MARKERS = ("o", "x", "s", "^", "v", "D")  # curves on top of each other stay visible
HIT_WINDOW_S = 10.0
DPI = 110


def draw_all(results: Sequence[RunResult], slo: Slo, directory: Path, group: str) -> list[str]:
    """Write the plots of runs that belong together.

    Returns:
        Their file names, in the order in which the report shows them; each begins with `group`.
    """
    percentile_plots: list[tuple[str, str, float, Callable[[StageSummary], Percentiles]]] = [
        ("ttft.png", "Time to first token", slo.ttft_s, lambda stage: stage.ttft),
        ("itl.png", "Time between tokens", slo.itl_s, lambda stage: stage.itl),
    ]
    figures = {
        name: _percentile_figure(results, title, limit, select)
        for name, title, limit, select in percentile_plots
    }
    figures["goodput.png"] = _goodput_figure(results)
    figures["prefix_hits.png"] = _hit_figure(results)
    figures["kv_use.png"] = _kv_figure(results)
    for name, figure in figures.items():
        figure.savefig(directory / f"{group}-{name}")
    return [f"{group}-{name}" for name in figures]


def hit_rates(samples: Sequence[Sample]) -> list[tuple[float, float]]:
    """Return (time, share of looked-up prompt tokens that were cached) over a sliding window.

    The share is NaN where nothing was looked up.
    """
    points = []
    first = 0
    for sample in samples:
        while sample.t - samples[first].t > HIT_WINDOW_S:
            first += 1
        queries = sample.queries - samples[first].queries
        hits = sample.hits - samples[first].hits
        points.append((sample.t, hits / queries if queries > 0 else math.nan))
    return points


def _percentile_figure(
    results: Sequence[RunResult],
    title: str,
    limit_s: float,
    select: Callable[[StageSummary], Percentiles],
) -> Figure:
    figure = Figure(figsize=(12, 3.8), dpi=DPI, layout="constrained")
    axes = figure.subplots(1, len(PERCENTILES), sharey=True)
    for axis, name in zip(axes, PERCENTILES, strict=True):
        for color, marker, result in zip(COLORS, MARKERS, results, strict=False):
            rates = [stage.rate for stage in result.stages]
            values = [getattr(select(stage), name) * 1000 for stage in result.stages]
            axis.plot(rates, values, marker=marker, color=color, label=result.label)
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter(NullFormatter())
        axis.set_title(name)
        axis.set_xlabel("offered requests/s")
    for axis in axes:
        axis.axhline(limit_s * 1000, color="0.4", linestyle=":", label="objective")
        axis.grid(visible=True, which="major", alpha=0.3)
    axes[0].set_ylabel("ms")
    figure.suptitle(f"{title} (dotted: the objective)")
    _legend_below(figure, axes[0])
    return figure


def _goodput_figure(results: Sequence[RunResult]) -> Figure:
    figure = Figure(figsize=(7, 4.4), dpi=DPI, layout="constrained")
    axis = figure.subplots()
    top = max(stage.rate for result in results for stage in result.stages)
    axis.plot([0, top], [0, top], color="0.6", linestyle="--", label="all good")
    for color, marker, result in zip(COLORS, MARKERS, results, strict=False):
        rates = [stage.rate for stage in result.stages]
        axis.plot(
            rates,
            [stage.goodput for stage in result.stages],
            marker=marker,
            markersize=8,
            color=color,
            label=result.label,
        )
    axis.set_xlabel("offered requests/s")
    axis.set_ylabel("requests/s within the objectives")
    axis.set_title("Goodput against rate")
    axis.grid(visible=True, alpha=0.3)
    _legend_below(figure, axis)
    return figure


def _hit_figure(results: Sequence[RunResult]) -> Figure:
    figure = Figure(figsize=(9, 4), dpi=DPI, layout="constrained")
    axis = figure.subplots()
    for color, result in zip(COLORS, results, strict=False):
        points = hit_rates(result.samples)
        axis.plot(
            [t for t, _ in points],
            [100 * share for _, share in points],
            color=color,
            label=result.label,
        )
    axis.set_ylim(0, 100)
    axis.set_xlabel("seconds")
    axis.set_ylabel("% of prompt tokens")
    axis.set_title(f"Prefix cache hits, over the last {HIT_WINDOW_S:g} s")
    _mark_stages(axis, results)
    _legend_below(figure, axis)
    return figure


def _kv_figure(results: Sequence[RunResult]) -> Figure:
    figure = Figure(figsize=(4.2 * len(results), 4), dpi=DPI, layout="constrained")
    axes = figure.subplots(1, len(results), sharey=True, squeeze=False)[0]
    for axis, result in zip(axes, results, strict=True):
        workers = sorted({worker for sample in result.samples for worker in sample.used})
        for color, worker in zip(COLORS, workers, strict=False):
            _plot_worker(axis, result.samples, worker, color)
        axis.set_title(result.label, fontsize=10)
        axis.set_xlabel("seconds")
        axis.set_ylim(0, 105)
        axis.legend(fontsize=8, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.14))
        _mark_stages(axis, [result])
    axes[0].set_ylabel("% of a worker's KV blocks")
    figure.suptitle("KV use (line: held by sequences; area: with what is cached for reuse)")
    return figure


def _plot_worker(axis: Axes, samples: Sequence[Sample], worker: str, color: str) -> None:
    shown = [sample for sample in samples if worker in sample.used]
    times = [sample.t for sample in shown]
    used = [100 * sample.used[worker] for sample in shown]
    filled = [100 * (sample.used[worker] + sample.cached[worker]) for sample in shown]
    axis.fill_between(times, filled, color=color, alpha=0.2)
    axis.plot(times, filled, color=color, linewidth=0.6)
    axis.plot(times, used, color=color, label=worker)


def _mark_stages(axis: Axes, results: Sequence[RunResult]) -> None:
    """Draw a line where the offered rate changes; all runs follow one schedule."""
    for before, after in pairwise(results[0].schedule):
        axis.axvline(before.end, color="0.8", linewidth=0.8, zorder=0)
        axis.annotate(
            f"{after.rate:g}/s",
            (before.end, 1),
            xycoords=("data", "axes fraction"),
            xytext=(2, -9),
            textcoords="offset points",
            fontsize=7,
            color="0.4",
        )
    axis.grid(visible=True, axis="y", alpha=0.3)


def _legend_below(figure: Figure, axis: Axes) -> None:
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, fontsize=9, frameon=False)
