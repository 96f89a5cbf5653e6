"""The report's figures: nothing is cut off, axes can be read, sample counts are stated."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from pagewire.loadtest.axes import log_ticks
from pagewire.loadtest.cpu import GENERATOR, MACHINE, OTHERS
from pagewire.loadtest.plots import figures
from pagewire.loadtest.records import ClusterSample, CpuSample, MeasuredRequest
from pagewire.loadtest.results import RunPlan, RunResult
from pagewire.loadtest.shapes import durations, schedule
from pagewire.loadtest.slo import summarize
from pagewire.services.cli.bench.stats import Slo

SLO = Slo(0.5, 0.05)
LONG = "http://a-rather-long-host-name.of-some-machine.example.org:8000/under/a/path"
NAMES = (MACHINE, OTHERS, GENERATOR, "router", "redis", "prefill-0", "decode-0")


def run(label: str, latency_s: float = 0.02, a_rate: int = 5, rates: Sequence[float] = (2, 4)):
    """A run with `a_rate` requests at each rate."""
    stages = schedule("steps", list(rates), 5.0)
    records = [
        MeasuredRequest("chat", rate, 0.0, [latency_s, 2 * latency_s, 3 * latency_s], outcome="ok")
        for rate in rates
        for _ in range(a_rate)
    ]
    samples = [
        ClusterSample(
            float(t),
            10.0 * t,
            5.0 * t,
            1,
            0,
            dict.fromkeys(NAMES[-2:], t / 20),
            dict.fromkeys(NAMES[-2:], 0.1),
        )
        for t in range(10)
    ]
    cpu = [CpuSample(float(t), dict.fromkeys(NAMES, 0.1)) for t in range(1, 11)]
    summary = summarize(records, SLO, durations(stages))
    return RunResult(RunPlan("run", label, ()), stages, summary, records, samples, cpu)


@pytest.mark.parametrize(
    "results", [[run(LONG)], [run("One"), run("Other")], [run(LONG), run(LONG)]]
)
def test_no_title_label_or_legend_leaves_its_figure(results: list[RunResult]) -> None:
    for name, figure in figures(results, SLO).items():
        FigureCanvasAgg(figure).draw()
        page = figure.bbox
        for text in written(figure):
            box = text.get_window_extent()
            assert page.x0 <= box.x0 and box.x1 <= page.x1, (name, text.get_text())
            assert page.y0 <= box.y0 and box.y1 <= page.y1, (name, text.get_text())


def written(figure: Figure) -> list[Text]:
    """All texts but the ticks' labels."""
    legends = [*figure.legends, *(axis.get_legend() for axis in figure.axes)]
    texts = [*figure.texts, *(text for legend in legends if legend for text in legend.get_texts())]
    for axis in figure.axes:
        texts += [axis.title, axis.xaxis.label, axis.yaxis.label, *axis.texts]
    return texts


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ([30, 80, 150], [20, 50, 100, 200]),
        ([10.0], [5, 10, 20]),
        ([120, 4985], [100, 200, 500, 1000, 2000, 5000, 10000]),
        ([0.3, 40], [0.2, 0.5, 1, 2, 5, 10, 20, 50]),
        ([math.nan, 7, 0], [2, 5, 10]),
        ([], [0.5, 1, 2]),
    ],
)
def test_a_log_axis_has_at_least_three_labels_around_its_values(values, ticks) -> None:
    assert log_ticks(values) == ticks


def test_log_axes_show_their_labels_and_all_values() -> None:
    drawn = figures([run("One", 0.02), run("Other", 0.021)], SLO)
    for name in ("ttft", "itl", "throughput"):
        for axis in drawn[name].axes:
            assert axis.get_yscale() == "log"
            low, high = axis.get_ylim()
            assert len([tick for tick in axis.get_yticks() if low <= tick <= high]) >= 3
            heights = [float(y) for line in axis.lines for y in np.asarray(line.get_ydata())]
            assert low < min(heights) <= max(heights) < high
        assert all(label.get_text() for label in drawn[name].axes[0].get_yticklabels())


def test_p99_of_few_values_names_their_number() -> None:
    few = figures([run("One", a_rate=57), run("Other", a_rate=40)], SLO)
    assert "p99 of 40 to 57 values" in few["ttft"].get_suptitle().replace("\n", " ")
    titles = [axis.get_title().replace("\n", " ") for axis in few["throughput"].axes]
    assert "p99 of 40 to 57 values" in titles[0]
    assert "p99 of 80 values" in titles[1]  # the other run has 114 gaps a rate
    assert "values" not in figures([run("One", a_rate=100)], SLO)["ttft"].get_suptitle()


def test_throughput_has_a_point_for_each_rate() -> None:
    tokens_per_s = 10 * 3 / 5.0  # 10 requests of 3 tokens in 5 s
    figure = figures([run("One", a_rate=10)], SLO)["throughput"]
    for axis in figure.axes:
        assert {text.get_text() for text in axis.texts} == {"2/s", "4/s"}
        for line in axis.lines:
            assert np.asarray(line.get_xdata()).tolist() == [tokens_per_s] * 2


def test_cpu_plot_has_a_line_for_each_process_and_is_left_out_without_samples() -> None:
    [axis] = figures([run("One")], SLO)["cpu"].axes
    assert {line.get_label() for line in axis.lines} >= set(NAMES)
    bare = run("One")
    bare = RunResult(bare.plan, bare.schedule, bare.stages, bare.records, bare.samples, [])
    assert "cpu" not in figures([bare], SLO)
