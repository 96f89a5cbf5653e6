"""Writes `report.html`, its plots and `summary.json` from the raw data of a comparison.

python -P -m pagewire.loadtest.report loadtest/report/20260101-120000
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
from jinja2 import Environment, StrictUndefined

from pagewire.loadtest.plots import draw_all
from pagewire.loadtest.results import Manifest, RunResult, load_results
from pagewire.loadtest.slo import FEWEST_FOR_P99, Percentiles, StageSummary

TEMPLATE = Path(__file__).with_name("report.html.jinja")
REPORT = "report.html"
SUMMARY = "summary.json"


@dataclass(frozen=True)
class Ratio:
    """Two runs at one rate: quotients of the first by the second; NaN where that has no value."""

    rate: float
    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float
    goodput: float


def write_report(directory: Path) -> Path:
    """Write the report next to the raw data; returns the page's path."""
    manifest = Manifest.load(directory)
    results = load_results(directory, manifest)
    groups = [
        {**group, "plots": draw_all(group["results"], manifest.slo, directory, group["name"])}
        for group in _groups(manifest, results)
    ]
    summary = msgspec.json.encode(_summary(manifest, results))  # null where JSON has no number
    (directory / SUMMARY).write_bytes(msgspec.json.format(summary, indent=2) + b"\n")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters.update(ms=_ms, number=_number, percent=_percent, p99=_p99)
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    page = template.render(manifest=manifest, groups=groups, fewest=FEWEST_FOR_P99)
    (directory / REPORT).write_text(page, encoding="utf-8")
    return directory / REPORT


def ratios(ours: Sequence[StageSummary], theirs: Sequence[StageSummary]) -> list[Ratio]:
    """Compare two runs, rate by rate."""
    by_rate = {stage.rate: stage for stage in theirs}
    return [_ratio(stage, by_rate[stage.rate]) for stage in ours if stage.rate in by_rate]


def _ratio(one: StageSummary, other: StageSummary) -> Ratio:
    return Ratio(
        rate=one.rate,
        ttft_p50=_quotient(one.ttft.p50, other.ttft.p50),
        ttft_p99=_quotient(one.ttft.p99, other.ttft.p99),
        itl_p50=_quotient(one.itl.p50, other.itl.p50),
        itl_p99=_quotient(one.itl.p99, other.itl.p99),
        goodput=_quotient(one.goodput, other.goodput),
    )


def _quotient(one: float, other: float) -> float:
    return one / other if other else math.nan


def _groups(manifest: Manifest, results: Sequence[RunResult]) -> list[dict[str, Any]]:
    """Return the runs that are shown together: each comparison, or all where nothing is compared.

    The name begins the plots' file names.
    """
    by_name = {result.plan.name: result for result in results}
    groups: list[dict[str, Any]] = []
    for pair in manifest.comparisons:
        one, other = (by_name[name] for name in pair)
        title = f"{one.label} against {other.label}"
        rows = ratios(one.stages, other.stages)
        groups.append({"name": pair[0], "title": title, "results": [one, other], "rows": rows})
    return groups or [{"name": "all", "title": "", "results": list(results), "rows": []}]


def _summary(manifest: Manifest, results: Sequence[RunResult]) -> dict[str, Any]:
    return {
        "command": manifest.command,
        "date": manifest.date,
        "versions": manifest.versions,
        "slo": manifest.slo,
        "runs": [
            {
                "name": result.plan.name,
                "options": result.plan.options,
                "stages": [
                    asdict(stage)
                    | {"cores": {n: result.mean_cores(n, stage.rate) for n in result.cpu_names}}
                    for stage in result.stages
                ],
                "errors": result.errors,
            }
            for result in results
        ],
    }


def _ms(seconds: float) -> str:
    return "-" if math.isnan(seconds) else f"{seconds * 1000:.{0 if seconds >= 0.1 else 1}f}"


def _p99(values: Percentiles) -> str:
    """Return the milliseconds, and where they are taken from few values, from how many."""
    return f"{_ms(values.p99)} of {values.count}" if values.p99_is_largest else _ms(values.p99)


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2f}"


def _percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{share:.0%}"


def main() -> None:
    """Write the report of a finished run again, from its data."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, help="folder that `compare` has written")
    print(write_report(parser.parse_args().directory))


if __name__ == "__main__":
    main()
