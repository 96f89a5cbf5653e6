"""The report's plots: one figure a subject, each with all runs in it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from pagewire.loadtest.axes import (
    legend_below,
    mark_stages,
    set_log_axis,
    set_rate_axis,
    set_title,
    wrapped,
)
from pagewire.loadtest.cpu import GENERATOR, MACHINE, OTHERS
from pagewire.loadtest.records import ClusterSample
from pagewire.loadtest.results import RunResult
from pagewire.loadtest.slo import FEWEST_FOR_P99, Percentiles, StageSummary
from pagewire.services.cli.bench.stats import Slo

# Also apart for the colour-blind.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")
PERCENTILES = ("p50", "p90", "p99")
MARKERS = ("o", "x", "s", "^", "v", "D")  # curves on top of each other stay visible
LINES: tuple[tuple[str, Literal["-", "--"]], ...] = (("p50", "-"), ("p99", "--"))
HIT_WINDOW_S = 10.0
DPI = 110

Select = Callable[[StageSummary], Percentiles]


@dataclass(frozen=True)
class Plot:
    """One of the report's pictures.

    Attributes:
        file: name of its PNG; begins with the name of the runs' group.
        title: what it shows.
    """

    file: str
    title: str


def draw_all(results: Sequence[RunResult], slo: Slo, directory: Path, group: str) -> list[Plot]:
    """Write the plots of runs that belong together; returns them in the report's order."""
    plots = []
    for name, figure in figures(results, slo).items():
        plots.append(Plot(f"{group}-{name}.png", figure.get_suptitle().replace("\n", " ")))
        figure.savefig(directory / plots[-1].file)
    return plots


def figures(results: Sequence[RunResult], slo: Slo) -> dict[str, Figure]:
    """Return the figures of runs that belong together, by name."""
    drawn = {
        "ttft": _percentile_figure(results, "Time to first token", slo.ttft_s, _ttft),
        "itl": _percentile_figure(results, "Time between tokens", slo.itl_s, _itl),
        "goodput": _goodput_figure(results),
        "throughput": _throughput_figure(results),
        "prefix_hits": _hit_figure(results),
        "kv_use": _kv_figure(results),
    }
    if any(result.cpu for result in results):
        drawn["cpu"] = _cpu_figure(results)
    return drawn


def hit_rates(samples: Sequence[ClusterSample]) -> list[tuple[float, float]]:
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


def count_note(results: Sequence[RunResult], select: Select) -> str:
    """Return what a reader must know of p99 where it is taken from few values; else nothing."""
    few = [
        select(stage).count
        for result in results
        for stage in result.stages
        if select(stage).p99_is_largest
    ]
    if not few:
        return ""
    counts = f"{min(few)}" if min(few) == max(few) else f"{min(few)} to {max(few)}"
    return f"p99 of {counts} values (fewer than {FEWEST_FOR_P99}) is the largest of them"


def _ttft(stage: StageSummary) -> Percentiles:
    return stage.ttft


def _itl(stage: StageSummary) -> Percentiles:
    return stage.itl


def _new_figure(width: float, height: float) -> Figure:
    return Figure(figsize=(width, height), dpi=DPI, layout="constrained")


def _styled(results: Sequence[RunResult]) -> Iterator[tuple[str, str, RunResult]]:
    """Yield a colour and a marker with each run."""
    yield from zip(cycle(COLORS), cycle(MARKERS), results, strict=False)


def _percentile_figure(
    results: Sequence[RunResult], title: str, limit_s: float | None, select: Select
) -> Figure:
    figure = _new_figure(12, 4.4)
    axes = figure.subplots(1, len(PERCENTILES), sharey=True)
    limits = [] if limit_s is None else [limit_s * 1000]
    drawn = [*limits]
    for axis, name in zip(axes, PERCENTILES, strict=True):
        for color, marker, result in _styled(results):
            rates = [stage.rate for stage in result.stages]
            values = [getattr(select(stage), name) * 1000 for stage in result.stages]
            axis.plot(rates, values, marker=marker, color=color, label=wrapped(result.label))
            drawn += values
        for limit in limits:
            axis.axhline(limit, color="0.4", linestyle=":", label="objective")
        axis.set_title(name)
        set_rate_axis(axis, [stage.rate for stage in results[0].stages])
        axis.grid(visible=True, alpha=0.3)
    set_log_axis(axes[0], drawn)
    axes[0].set_ylabel("ms")
    note = count_note(results, select)
    set_title(figure, f"{title}; {note}" if note else title)
    legend_below(figure, axes[0])
    return figure


def _goodput_figure(results: Sequence[RunResult]) -> Figure:
    figure = _new_figure(7, 4.4)
    axis = figure.subplots()
    rates = [stage.rate for stage in results[0].stages]
    axis.plot([0, max(rates)], [0, max(rates)], color="0.6", linestyle="--", label="all good")
    for color, marker, result in _styled(results):
        axis.plot(
            [stage.rate for stage in result.stages],
            [stage.goodput for stage in result.stages],
            marker=marker,
            markersize=8,
            color=color,
            label=wrapped(result.label),
        )
    set_rate_axis(axis, rates)
    axis.set_ylabel("requests/s within the objectives")
    axis.grid(visible=True, alpha=0.3)
    set_title(figure, "Goodput over offered rate")
    legend_below(figure, axis)
    return figure


def _throughput_figure(results: Sequence[RunResult]) -> Figure:
    """Latency against the tokens that came for it: a point a rate."""
    figure = _new_figure(12, 4.6)
    axes = figure.subplots(1, 2)
    stages = [stage for result in results for stage in result.stages]
    fastest = max(stage.tokens / stage.duration_s for stage in stages)
    for axis, name, select in zip(
        axes, ("time to first token", "time between tokens"), (_ttft, _itl), strict=True
    ):
        drawn = []
        for color, marker, result in _styled(results):
            tokens = [stage.tokens / stage.duration_s for stage in result.stages]
            for percentile, line in LINES:
                values = [getattr(select(stage), percentile) * 1000 for stage in result.stages]
                axis.plot(tokens, values, marker=marker, color=color, linestyle=line)
                drawn += values
            for stage, x in zip(result.stages, tokens, strict=True):
                _name_point(axis, f"{stage.rate:g}/s", x, select(stage).p99 * 1000)
        axis.set_title("\n".join(filter(None, (name, count_note(results, select)))), fontsize=10)
        axis.set_xlabel("output tokens/s")
        axis.set_ylabel("ms")
        axis.set_xlim(0, 1.1 * fastest or 1)  # room for the points' names
        set_log_axis(axis, drawn)
        axis.grid(visible=True, alpha=0.3)
    set_title(figure, "Latency over throughput, with the offered requests/s at each point")
    handles = [
        Line2D([], [], color=color, marker=marker, label=wrapped(result.label))
        for color, marker, result in _styled(results)
    ]
    for percentile, line in LINES:
        handles.append(Line2D([], [], color="0.3", linestyle=line, label=percentile))
    figure.legend(handles=handles, loc="outside lower center", ncols=2, fontsize=9, frameon=False)
    return figure


def _name_point(axis: Axes, text: str, x: float, y: float) -> None:
    if math.isfinite(y):
        axis.annotate(
            text, (x, y), xytext=(4, 4), textcoords="offset points", fontsize=8, color="0.3"
        )


def _hit_figure(results: Sequence[RunResult]) -> Figure:
    figure = _new_figure(9, 4)
    axis = figure.subplots()
    for color, _, result in _styled(results):
        points = hit_rates(result.samples)
        axis.plot(
            [t for t, _ in points],
            [100 * share for _, share in points],
            color=color,
            label=wrapped(result.label),
        )
    axis.set_ylim(0, 100)
    axis.set_xlabel("seconds")
    axis.set_ylabel("% of prompt tokens")
    set_title(figure, f"Prefix cache hits, over the last {HIT_WINDOW_S:g} s")
    mark_stages(axis, results[0].schedule)
    legend_below(figure, axis)
    return figure


def _kv_figure(results: Sequence[RunResult]) -> Figure:
    figure, axes = _axis_for_each(results)
    for axis, result in zip(axes, results, strict=True):
        workers = sorted({worker for sample in result.samples for worker in sample.used})
        for color, worker in zip(cycle(COLORS), workers, strict=False):
            _plot_worker(axis, result.samples, worker, color)
        axis.set_ylim(0, 105)
        _finish_time_axis(axis, result)
    axes[0].set_ylabel("% of a worker's KV blocks")
    set_title(figure, "KV use (line: held by sequences; area: with cached)")
    return figure


def _plot_worker(axis: Axes, samples: Sequence[ClusterSample], worker: str, color: str) -> None:
    filtered = [sample for sample in samples if worker in sample.used]
    times = [sample.t for sample in filtered]
    used = [100 * sample.used[worker] for sample in filtered]
    filled = [100 * (sample.used[worker] + sample.cached[worker]) for sample in filtered]
    axis.fill_between(times, filled, color=color, alpha=0.2)
    axis.plot(times, filled, color=color, linewidth=0.6)
    axis.plot(times, used, color=color, label=worker)


def _cpu_figure(results: Sequence[RunResult]) -> Figure:
    figure, axes = _axis_for_each(results)
    for axis, result in zip(axes, results, strict=True):
        colors = cycle(COLORS)
        for name in result.cpu_names:
            axis.plot(
                [sample.t for sample in result.cpu],
                [sample.cores.get(name, math.nan) for sample in result.cpu],
                color="0.6" if name in (MACHINE, OTHERS) else next(colors),
                linestyle={MACHINE: "--", OTHERS: ":"}.get(name, "-"),
                linewidth=2.5 if name == GENERATOR else 1.3,
                label=name,
            )
        axis.set_ylim(bottom=0)
        _finish_time_axis(axis, result)
    axes[0].set_ylabel("busy cores")
    set_title(figure, "Use of the processor (load generator: at most one core)")
    return figure


def _axis_for_each(results: Sequence[RunResult]) -> tuple[Figure, Sequence[Axes]]:
    """Return a figure with a plot for each run, all of one scale."""
    figure = _new_figure(max(7.0, 5.5 * len(results)), 4.6)
    axes: Sequence[Axes] = figure.subplots(1, len(results), sharey=True, squeeze=False)[0]
    return figure, axes


def _finish_time_axis(axis: Axes, result: RunResult) -> None:
    axis.set_title(wrapped(result.label), fontsize=10)
    axis.set_xlabel("seconds")
    mark_stages(axis, result.schedule)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=8, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.14))
