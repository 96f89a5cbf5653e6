"""Puts the same load on one kind of cluster after another, and writes a report.

python -P -m pagewire.loadtest.compare             disaggregated, aggregated, by prefix, in turn
python -P -m pagewire.loadtest.compare --quick     one small run
python -P -m pagewire.loadtest.compare --host http://127.0.0.1:8000     a cluster that is running
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import msgspec

from pagewire.loadtest.cluster import BenchError, running_cluster, say, wait_idle
from pagewire.loadtest.cpu import CpuSampler, pin
from pagewire.loadtest.records import BEGAN_FILE
from pagewire.loadtest.report import write_report
from pagewire.loadtest.results import CPU_FILE, Manifest, RunPlan, RunResult, load_results
from pagewire.loadtest.shapes import SHAPES, schedule
from pagewire.loadtest.versions import versions
from pagewire.services.cli.bench.stats import Slo
from pagewire.services.cli.client.endpoint_url import usual_operator_url

HERE = Path(__file__).resolve().parent
LOCUSTFILE = HERE / "locustfile.py"
STOP_TIMEOUT_S = 15
SPARE_S = 60  # for locust, over the load's duration

# Small enough that one worker cannot keep all shared prompts and conversations at once.
NUM_BLOCKS = 1024
RATES = "4,8,16"
STAGE_S = 20.0
QUICK_RATES = "4"
QUICK_STAGE_S = 6.0

SHARING = ("ChatUser", "SharedPromptUser")
TWO = ("--prefill", "0", "--decode", "2")
PAIR = ("--prefill", "1", "--decode", "1")
DISAGGREGATED = RunPlan("disaggregated", "1 prefill + 1 decode", (*PAIR, "--policy", "predicted"))
BY_PREFIX = "1 prefill + 1 decode, each prompt to the prefill worker"
PLANS = (
    DISAGGREGATED,
    RunPlan("static", BY_PREFIX, (*PAIR, "--policy", "prefix")),
    RunPlan("aggregated", "2 aggregated", (*TWO, "--policy", "prefix")),
    RunPlan("prefix-aware", "prefix-aware placement", (*TWO, "--policy", "prefix"), SHARING),
    RunPlan("round-robin", "round robin placement", (*TWO, "--policy", "round_robin"), SHARING),
)
COMPARISONS = (
    ("disaggregated", "aggregated"),
    ("disaggregated", "static"),
    ("prefix-aware", "round-robin"),
)


class Urls(NamedTuple):
    """The URLs of a cluster's HTTP endpoint and of its operator port."""

    endpoint: str
    operator: str


@dataclass(frozen=True)
class LoadOptions:
    """The options of the load, equal for every run.

    Attributes:
        shape: name of the load shape.
        rates: as given, separated by commas.
        stage_s: seconds a rate.
        slo_ttft_ms: latest first token of a good request.
        slo_itl_ms: largest mean time between its tokens.
        pins: whether each worker gets a core of its own.
    """

    shape: str
    rates: str
    stage_s: float
    slo_ttft_ms: float
    slo_itl_ms: float
    pins: bool = False

    @property
    def slo(self) -> Slo:
        """The bounds, in seconds, that a good request stays within."""
        return Slo(self.slo_ttft_ms / 1000, self.slo_itl_ms / 1000)

    def locust_command(self, urls: Urls, out: Path, users: Sequence[str]) -> list[str]:
        """Return the command line of a run against a router, with all users if none is named."""
        command = [sys.executable, "-P", "-m", "locust", "-f", str(LOCUSTFILE), *users]
        command += ["--headless", "--only-summary", "--host", urls.endpoint, "--out", str(out)]
        command += ["--operator-url", urls.operator]
        command += ["--stop-timeout", str(STOP_TIMEOUT_S), "--html", str(out / "locust.html")]
        command += ["--json-file", str(out / "locust"), "--load-shape", self.shape]
        command += ["--rates", self.rates, "--stage-s", str(self.stage_s)]
        command += ["--slo-ttft-ms", str(self.slo_ttft_ms), "--slo-itl-ms", str(self.slo_itl_ms)]
        return command


def plans(options: argparse.Namespace) -> tuple[RunPlan, ...]:
    """Return the runs that the command line asks for."""
    users = tuple(filter(None, options.users.split(",")))
    if options.host:
        return (RunPlan("cluster", options.host, (), users),)
    more = ("--num-blocks", str(options.num_blocks), *shlex.split(options.up))
    return tuple(
        replace(plan, options=(*plan.options, *more), users=users or plan.users)
        for plan in ((DISAGGREGATED,) if options.quick else PLANS)
    )


def run(
    plan: RunPlan, load: LoadOptions, duration_s: float, directory: Path, given: Urls | None
) -> bool:
    """Put the load on one cluster; returns whether all requests were answered.

    Args:
        plan: of the run.
        load: to put on it.
        duration_s: of the load.
        directory: gets what the run writes.
        given: a cluster that runs; None starts one.

    Raises:
        BenchError: the cluster did not come up, did not stop, or still holds blocks at the end.
        subprocess.TimeoutExpired: locust hangs.
    """
    directory.mkdir(parents=True)
    say(f"{plan.label}: {duration_s:.0f} s of load")
    with (
        _endpoint(plan, load, directory, given) as urls,
        (directory / "locust.log").open("wb") as log,
        CpuSampler() as cpu,
    ):
        done = subprocess.run(
            load.locust_command(urls, directory, plan.users),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            timeout=duration_s + STOP_TIMEOUT_S + SPARE_S,
            check=False,
        )
        if given is None:
            wait_idle(urls.operator)
    if not (directory / "records.jsonl").exists():
        raise BenchError(f"locust did not start; {directory / 'locust.log'} says why")
    began = float((directory / BEGAN_FILE).read_text(encoding="utf-8"))
    cpu.save(directory / CPU_FILE, began)
    return done.returncode == 0


@contextlib.contextmanager
def _endpoint(
    plan: RunPlan, load: LoadOptions, directory: Path, given: Urls | None
) -> Iterator[Urls]:
    if given is not None:
        yield given
    else:
        with running_cluster(plan.options, directory / "logs") as cluster:
            if load.pins:
                pin(cluster.pid)
            yield Urls(cluster.url, cluster.operator_url)


def table(result: RunResult) -> list[str]:
    """Return the lines of a run's table for the terminal."""
    lines = [
        "",
        result.label,
        "  req/s  requests  errors  TTFT p50/p90/p99 ms  ITL p50/p90/p99 ms  goodput  cached",
    ]
    for stage in result.stages:
        ttft, itl = (
            "/".join(
                f"{1000 * value:.0f}"
                for value in (percentiles.p50, percentiles.p90, percentiles.p99)
            )
            for percentiles in (stage.ttft, stage.itl)
        )
        lines.append(
            f"  {stage.rate:5g}  {stage.requests:8}  {stage.errors:6}  {ttft:>19}  {itl:>18}"
            f"  {stage.goodput:7.2f}  {stage.cached_share:6.0%}"
        )
    few = [f"{stage.rate:g}" for stage in result.stages if stage.ttft.p99_is_largest]
    if few:
        lines.append(f"  p99 of TTFT at {', '.join(few)} req/s: the largest of fewer than 100")
    busy = [f"{rate:g}" for rate in result.busy_generator_rates]
    if busy:
        lines.append(f"  at {', '.join(busy)} req/s the load generator was the bottleneck")
    return lines


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line of this program."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--host", default="", help="URL of a running cluster to test")
    parser.add_argument("--operator-url", default="", help="default: the host's port plus 1000")
    parser.add_argument("--quick", action="store_true", help="test one cluster for a few seconds")
    parser.add_argument("--shape", choices=SHAPES, default="steps", help="shape of the load")
    parser.add_argument("--rates", default="", help=f"requests/s of the stages; default {RATES}")
    parser.add_argument("--stage-s", type=float, help=f"seconds a rate; default {STAGE_S:g}")
    parser.add_argument("--slo-ttft-ms", type=float, default=500.0, help="bound of the first token")
    parser.add_argument("--slo-itl-ms", type=float, default=50.0, help="bound of the mean gap")
    parser.add_argument("--users", default="", help="kinds, such as ChatUser,DocumentUser")
    parser.add_argument("--num-blocks", type=int, default=NUM_BLOCKS, help="KV blocks a worker")
    parser.add_argument("--pin", dest="pins", action="store_true", help="give each worker a core")
    parser.add_argument("--up", default="", help='more options of pagewire up: "--device cpu"')
    parser.add_argument("--out", type=Path, default=HERE / "report", help="folder of reports")
    options = parser.parse_args(arguments)
    options.rates = options.rates or (QUICK_RATES if options.quick else RATES)
    options.stage_s = options.stage_s or (QUICK_STAGE_S if options.quick else STAGE_S)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run everything; returns the exit code: 1 if any request failed."""
    options = parse(arguments)
    words = sys.argv[1:] if arguments is None else arguments
    load = msgspec.convert(options, LoadOptions, from_attributes=True)
    stages = tuple(schedule(options.shape, [float(r) for r in load.rates.split(",")], load.stage_s))
    chosen = plans(options)
    names = {plan.name for plan in chosen}
    manifest = Manifest(
        command=shlex.join(["python", "-m", "pagewire.loadtest.compare", *words]),
        date=time.strftime("%Y-%m-%d %H:%M %z"),
        versions=versions(),
        slo=load.slo,
        schedule=stages,
        plans=chosen,
        comparisons=tuple(pair for pair in COMPARISONS if names.issuperset(pair)),
    )
    directory = options.out / time.strftime("%Y%m%d-%H%M%S")
    directory.mkdir(parents=True)
    manifest.save(directory)
    given = None
    if options.host:
        given = Urls(options.host, options.operator_url or usual_operator_url(options.host))
    fine = [run(plan, load, stages[-1].end, directory / plan.name, given) for plan in chosen]
    report = write_report(directory)
    for result in load_results(directory, manifest):
        print(*table(result), sep="\n")
    say(f"report: {report}")
    if not all(fine):
        say("some requests failed; the report names the errors")
    return 0 if all(fine) else 1


def end_cleanly(signum: int, _frame: FrameType | None) -> None:
    """Take a signal as the end of the program: cluster and locust are stopped on the way out."""
    signal.signal(signum, signal.SIG_IGN)  # another one would interrupt just that
    sys.exit(128 + signum)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, end_cleanly)
    try:
        sys.exit(main())
    except BenchError as exc:
        sys.exit(f"error: {exc}")
