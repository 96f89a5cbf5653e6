"""A finished comparison: its runs, and at which rates the load generator was the bottleneck."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pagewire.loadtest.cpu import GENERATOR, MACHINE, OTHERS
from pagewire.loadtest.records import ClusterSample, CpuSample, MeasuredRequest, read_lines
from pagewire.loadtest.shapes import LoadStage, durations
from pagewire.loadtest.slo import StageSummary, summarize
from pagewire.services.cli.bench.stats import Slo

MANIFEST = "manifest.json"
CPU_FILE = "cpu.jsonl"
BUSY_GENERATOR_CORES = 0.8  # locust has one thread: its own delays count as the server's then


@dataclass(frozen=True)
class RunPlan:
    """A cluster to measure: how it is started, and which users send requests.

    Attributes:
        name: of its directory.
        label: in plots and tables.
        options: of `pagewire up`; empty for an endpoint that was there before.
        users: names of locust's user classes; empty means all.
    """

    name: str
    label: str
    options: tuple[str, ...]
    users: tuple[str, ...] = ()


@dataclass(frozen=True)
class Manifest:
    """The facts that the report needs in addition to the measurements.

    Attributes:
        command: that made it.
        date: of the start, with the time zone.
        versions: of programs, and the machine, by name.
        slo: the objectives.
        schedule: the load that every run was given.
        plans: the runs, in order.
        comparisons: pairs of run names: one to look at, and the one it is compared with.
    """

    command: str
    date: str
    versions: dict[str, str]
    slo: Slo
    schedule: tuple[LoadStage, ...]
    plans: tuple[RunPlan, ...]
    comparisons: tuple[tuple[str, str], ...]

    def save(self, directory: Path) -> None:
        """Write it where `load` finds it."""
        text = msgspec.json.format(msgspec.json.encode(self), indent=2)
        (directory / MANIFEST).write_bytes(text + b"\n")

    @classmethod
    def load(cls, directory: Path) -> Manifest:
        """Read the manifest that `save` wrote to a folder."""
        return msgspec.json.decode((directory / MANIFEST).read_bytes(), type=cls)


@dataclass(frozen=True)
class RunResult:
    """The measurements of one cluster under load.

    Attributes:
        cpu: empty in reports of runs whose processes were not sampled.
    """

    plan: RunPlan
    schedule: Sequence[LoadStage]
    stages: Sequence[StageSummary]
    records: Sequence[MeasuredRequest]
    samples: Sequence[ClusterSample]
    cpu: Sequence[CpuSample]

    @property
    def label(self) -> str:
        """The name of the run's cluster in the report."""
        return self.plan.label

    @property
    def errors(self) -> list[str]:
        """The texts of the run's errors, each once."""
        return sorted({record.error for record in self.records if record.error})

    @property
    def cpu_names(self) -> list[str]:
        """Names of the processes whose use of the processor was sampled, in a fixed order."""
        return sorted({name for sample in self.cpu for name in sample.cores}, key=_cpu_order)

    def mean_cores(self, name: str, rate: float) -> float:
        """Return the mean number of cores that a process used at an offered rate; NaN if none."""
        spans = [(stage.start, stage.end) for stage in self.schedule if stage.rate == rate]
        values = [
            sample.cores.get(name, 0.0)
            for sample in self.cpu
            if any(start < sample.t <= end for start, end in spans)
        ]
        return sum(values) / len(values) if values else math.nan

    @property
    def busy_generator_rates(self) -> list[float]:
        """Offered rates at which the load generator was close to the one core that it can use."""
        rates = [stage.rate for stage in self.stages]
        return [rate for rate in rates if self.mean_cores(GENERATOR, rate) > BUSY_GENERATOR_CORES]


def _cpu_order(name: str) -> tuple[int, str]:
    """The whole machine first, then what isn't a service, then the services by name."""
    first = (MACHINE, OTHERS, GENERATOR)
    return (first.index(name) if name in first else len(first), name)


def load_results(directory: Path, manifest: Manifest) -> list[RunResult]:
    """Read the measurements of all runs."""
    return [_load_result(directory / plan.name, plan, manifest) for plan in manifest.plans]


def _load_result(directory: Path, plan: RunPlan, manifest: Manifest) -> RunResult:
    with_cpu = (directory / CPU_FILE).exists()
    records = read_lines(directory / "records.jsonl", MeasuredRequest)
    return RunResult(
        plan=plan,
        schedule=manifest.schedule,
        stages=summarize(records, manifest.slo, durations(manifest.schedule)),
        records=records,
        samples=read_lines(directory / "samples.jsonl", ClusterSample),
        cpu=read_lines(directory / CPU_FILE, CpuSample) if with_cpu else [],
    )
