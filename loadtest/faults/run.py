"""Runs the fault benchmark against a system that a TOML file describes, and writes the results.

python -P -m pagewire.loadtest.faults.run pagewire-1p1d
python -P -m pagewire.loadtest.faults.run my-system.toml --scenario "kill decode" --seconds 60

Exit code 0 if the benchmark ran, whatever it found; with --require, 1 if requests failed, answers
differ, KV was not freed, or the system was not whole again.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from pagewire.loadtest.bench.tables import markdown
from pagewire.loadtest.cluster import BenchError
from pagewire.loadtest.faults.benchmark import Benchmark, Report, first_error
from pagewire.loadtest.faults.results import row, summary_row
from pagewire.loadtest.faults.scenarios import (
    SCENARIOS,
    BenchmarkSettings,
    ScenarioLoad,
    choose,
)
from pagewire.loadtest.faults.system import System, parse_settings, read_system
from pagewire.loadtest.versions import versions
from pagewire.services.cli.bench.load import Lengths
from pagewire.services.cli.client.client_options import key_in_environment
from pagewire.shared.base.errors import ConfigError, PagewireError

EXIT_WRONG, EXIT_CONFIG = 1, 2
POSITIVE = ("seconds", "rate", "long_rate", "storm_stay_s", "freeze_s", "timeout", "probe_clients")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line of this program."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ", ".join(scenario.name for scenario in SCENARIOS)
    parser.add_argument("system", type=Path, help="a TOML file, or the name of one of ours")
    parser.add_argument("--scenario", action="append", default=[], help=f"only this one: {names}")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a variable of the system"
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="time in which streams start")
    parser.add_argument("--rate", type=float, default=4.0, help="streams that start in a second")
    add_lengths = partial(parser.add_argument, type=Lengths.parse)
    add_lengths("--prompt-tokens", default="64:512", help="of each stream: N, or LOW:HIGH")
    add_lengths("--output-tokens", default="64:256", help="of each stream: N, or LOW:HIGH")
    add_lengths("--long-prompt-tokens", default="2048", help="length of long prompts")
    parser.add_argument("--long-rate", type=float, default=2.0, help="long prompts in a second")
    parser.add_argument("--storm-clients", type=int, default=64, help="clients that leave early")
    parser.add_argument("--storm-stay-s", type=float, default=2.0, help="longest stay of these")
    parser.add_argument("--freeze-s", type=float, default=8.0, help="length of freezes and cuts")
    parser.add_argument("--temperature", type=float, default=0.0, help="above 0, with seeds")
    parser.add_argument(
        "--timeout", type=float, default=60.0, help="seconds to wait for a silent server"
    )
    parser.add_argument("--retry", type=int, default=0, help="retries of a failed request")
    parser.add_argument("--probe-clients", type=int, default=16, help="clients that probe capacity")
    parser.add_argument("--recovery-s", type=float, default=120.0, help="longest wait after a run")
    parser.add_argument("--seed", type=int, default=1, help="seed of requests and times")
    parser.add_argument("--out", type=Path, help="folder for results and logs")
    parser.add_argument("--require", action="store_true", help="fail if anything went wrong")
    return parser.parse_args(arguments)


def load_of(options: argparse.Namespace) -> ScenarioLoad:
    """Return the load that the command line describes.

    Raises:
        ConfigError: a number is out of range.
    """
    for name in POSITIVE:
        if getattr(options, name) <= 0:
            raise ConfigError(f"--{name.replace('_', '-')} must be greater than 0")
    return msgspec.convert(options, ScenarioLoad, from_attributes=True)


def table(report: Report, unit: str) -> str:
    """Return the results as a Markdown table, the calm run first."""
    calm = summary_row("calm", report.calm) | {"different": len(report.unstable)}
    return markdown([calm, *(row(result, unit) for result in report.results)])


def record(
    system: System,
    report: Report,
    load: ScenarioLoad,
    settings: BenchmarkSettings,
    words: Sequence[str],
) -> dict[str, Any]:
    """Return the content of the JSON file."""
    fields = msgspec.to_builtins(settings)
    del fields["api_key"]
    return {
        "system": system.name,
        "command": shlex.join(["python", "-P", "-m", "pagewire.loadtest.faults.run", *words]),
        "date": time.strftime("%Y-%m-%d %H:%M %z"),
        "versions": {"system": report.version, **versions()},
        "load": msgspec.to_builtins(load),
        "settings": fields,
        "kv_unit": system.kv.unit if system.kv else None,
        "report": msgspec.to_builtins(report),
        "problems": {result.scenario: result.problems for result in report.results},
    }


def run(words: Sequence[str]) -> int:
    """Run the benchmark; returns the exit code.

    Raises:
        BenchError: the system could not be measured.
        PagewireError: the command line, the description or the endpoint is wrong.
    """
    options = parse(words)
    load, scenarios = load_of(options), choose(options.scenario)
    system = read_system(options.system, parse_settings(options.set))
    settings = BenchmarkSettings(
        seed=options.seed,
        timeout_s=options.timeout,
        retries=options.retry,
        probe_clients=options.probe_clients,
        recovery_s=options.recovery_s,
        api_key=key_in_environment(),
    )
    folder = options.out or Path(tempfile.mkdtemp(prefix="pagewire-faults-"))
    folder.mkdir(parents=True, exist_ok=True)

    def save(report: Report) -> None:
        content = record(system, report, load, settings, words)
        text = msgspec.json.format(msgspec.json.encode(content), indent=2)
        (folder / "faults.json").write_bytes(text + b"\n")

    benchmark = Benchmark(system, load, settings, folder.resolve())
    report = asyncio.run(benchmark.run(scenarios, save))
    print(f"\n{system.name}, {time.strftime('%Y-%m-%d %H:%M %z')}\n")
    print(table(report, system.kv.unit if system.kv else "by capacity"))
    say_errors(report)
    print(f"\nresults and logs: {folder}")
    return EXIT_WRONG if options.require and any(r.problems for r in report.results) else 0


def say_errors(report: Report) -> None:
    """Print the first error of each scenario whose requests failed."""
    for result in report.results:
        if result.summary is not None and result.summary.failed:
            print(f"{result.scenario}: {result.summary.errors} {result.summary.first_errors[0]}")


def main() -> int:
    """Run the benchmark as a program; errors are one line."""
    # A job in the background ignores SIGINT, and so would the processes that it starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        return run(sys.argv[1:])
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except ExceptionGroup as group:
        expected, others = group.split((BenchError, PagewireError))
        if others is not None:
            raise
        return fail(first_error(expected or group))
    except (BenchError, PagewireError) as exc:
        return fail(exc)


def fail(error: BaseException) -> int:
    """Print an error; returns the exit code."""
    print(f"error: {error}", file=sys.stderr)
    return EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_WRONG


if __name__ == "__main__":
    sys.exit(main())
