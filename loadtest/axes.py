"""Sets up the axes of the report's plots: ticks, wrapped text, legends."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from itertools import pairwise

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pagewire.loadtest.shapes import LoadStage

TITLE_CHARS_PER_INCH = 9
LABEL_CHARS = 44
MAX_RATE_TICKS = 8
LOG_MARGIN = 1.1  # between the outermost value and its tick


def log_ticks(values: Sequence[float]) -> list[float]:
    """Return ticks at 1, 2 and 5 times powers of ten: at least three, around all values.

    Args:
        values: above 0; others are left out.
    """
    plotted = [value for value in values if math.isfinite(value) and value > 0] or [1.0]
    decades = range(
        math.floor(math.log10(min(plotted))) - 1,
        math.ceil(math.log10(max(plotted))) + 2,
    )
    steps = [float(f"{digit}e{decade}") for decade in decades for digit in (1, 2, 5)]
    first = max(i for i, step in enumerate(steps) if step * LOG_MARGIN < min(plotted))
    last = min(i for i, step in enumerate(steps) if step > max(plotted) * LOG_MARGIN)
    return steps[min(first, last - 2) : last + 1]


def set_log_axis(axis: Axes, values: Sequence[float]) -> None:
    """Make the y axis logarithmic, with a label at each tick."""
    ticks = log_ticks(values)
    axis.set_yscale("log")
    axis.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.set_yticks([], minor=True)
    axis.set_ylim(ticks[0], ticks[-1])


def set_rate_axis(axis: Axes, rates: Sequence[float]) -> None:
    """Label the x axis with the rates that were offered, as long as there is room."""
    axis.set_xlabel("offered requests/s")
    if len(rates) <= MAX_RATE_TICKS:
        axis.set_xticks(rates, [f"{rate:g}" for rate in rates])


def set_title(figure: Figure, text: str) -> None:
    """Set the figure's title, in as many lines as its width takes."""
    width = int(figure.get_figwidth() * TITLE_CHARS_PER_INCH)
    figure.suptitle("\n".join(textwrap.wrap(text, width)))


def wrapped(label: str, width: int = LABEL_CHARS) -> str:
    """Return a run's label in lines short enough for a legend or a small plot."""
    return "\n".join(textwrap.wrap(label, width))


def legend_below(figure: Figure, axis: Axes) -> None:
    """Put the legend below all plots of the figure."""
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, fontsize=9, frameon=False)


def mark_stages(axis: Axes, schedule: Sequence[LoadStage]) -> None:
    """Draw a line where the offered rate changes."""
    for before, after in pairwise(schedule):
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
