"""`pagewire simulate` and `pagewire plan`: loads, errors, and what they advise."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner, Result

from pagewire.services.cli.main import app
from pagewire.services.cli.simulation.machine import load_machine
from pagewire.services.cli.simulation.trace_file import read_trace
from pagewire.services.cli.simulation.workload import PromptPart, Turn
from pagewire.shared.base.errors import ConfigError

LINES = [
    {"timestamp": 27, "input_length": 600, "output_length": 52, "hash_ids": [46, 47]},
    {"timestamp": 5, "input_length": 512, "output_length": 1, "hash_ids": [46], "chat_id": 3},
    {"timestamp": 90.5, "input_length": 10, "output_length": 2},
]


def pagewire(*arguments: str) -> Result:
    env = {"COLUMNS": "120", "NO_COLOR": "1"}
    return CliRunner().invoke(app, arguments, env=env, prog_name="pagewire")


def write(path: Path, lines: list[object]) -> Path:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def test_traces_are_read_in_the_order_of_their_times(tmp_path: Path) -> None:
    file = write(tmp_path / "trace.jsonl", LINES)
    load = read_trace(file)
    assert [each.start_s for each in load] == pytest.approx([0.0, 0.022, 0.0855])
    assert load[1].turns == (Turn((PromptPart(47, 512), PromptPart(48, 88)), 52),)
    assert load[0].turns[0].new == (PromptPart(47, 512),)
    packed = tmp_path / "trace.jsonl.gz"
    packed.write_bytes(gzip.compress(file.read_bytes() + b"\n"))
    assert read_trace(packed) == load
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())  # as some editors save it
    assert read_trace(file) == load


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ('{"timestamp": 1', "line 4: Input data was truncated"),
        ("[1]", "line 4: Expected `object`, got `array`"),
        ('{"timestamp": 1, "input_length": 5}', "missing required field `output_length`"),
        ('{"timestamp": 1, "input_length": 0, "output_length": 5}', "$.input_length"),
        ('{"timestamp": -1, "input_length": 9, "output_length": 5}', "$.timestamp"),
        (
            '{"timestamp": 1, "input_length": 513, "output_length": 5, "hash_ids": [1]}',
            "1 hash_ids",
        ),
        ('{"timestamp": 1, "input_length": 9, "output_length": 5, "hash_ids": [-1]}', "$.hash_ids"),
        ("\xff", "line 4"),
    ],
)
def test_wrong_lines_are_named(tmp_path: Path, line: str, error: str) -> None:
    file = write(tmp_path / "trace", LINES)
    file.write_bytes(file.read_bytes() + line.encode("latin-1") + b"\n")
    with pytest.raises(ConfigError) as caught:
        read_trace(file)
    assert error in str(caught.value)
    assert f"{file}, line 4" in str(caught.value)


def test_files_that_are_no_traces_are_refused(tmp_path: Path) -> None:
    empty, cut = tmp_path / "empty", tmp_path / "cut"
    empty.write_text("\n")
    cut.write_bytes(gzip.compress(b"{}" * 1000)[:30])
    for file, error in [
        (empty, "no requests"),
        (cut, "cannot be read"),
        (tmp_path, "cannot be read"),
    ]:
        with pytest.raises(ConfigError, match=error):
            read_trace(file)


def test_a_trace_is_simulated_on_several_clusters(tmp_path: Path) -> None:
    file = write(tmp_path / "trace", LINES)
    workers = ("--workers", "1p1d, 2", "--policy", "prefix")
    done = pagewire("simulate", "--trace", str(file), *workers, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert list(found) == ["1P1D", "2 aggregated"]
    assert found["1P1D"]["requests"] == 3
    assert found["1P1D"]["remote_share"] == pytest.approx(2 / 3)  # a short one is computed locally
    assert found["2 aggregated"]["remote_share"] == 0
    assert found["1P1D"]["ttft"]["p50"] > 0


def test_the_table_has_the_figures(tmp_path: Path) -> None:
    done = pagewire("simulate", "--rate", "20", "--requests", "40", "--slo-ttft", "500")
    assert done.exit_code == 0, done.output
    assert "1P1D" in done.stdout
    assert "100.0%" in done.stdout
    assert "40 requests" in done.stdout
    agents = ("--agents", "2", "--requests", "6", "--workers", "1")
    assert "6 requests" in pagewire("simulate", *agents).stdout


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ((), "give one load"),
        (("--rate", "1", "--agents", "2"), "--rate and --agents"),
        (("--rate", "1", "--workers", "1P"), "--workers 1P: give 1P1D"),
        (("--rate", "1", "--workers", "1P0D"), "there must be a decode worker"),
        (("--rate", "1", "--workers", "300"), "at most 256 workers"),
        (("--rate", "1", "--machine", "abacus"), "no machine 'abacus'"),
        (("--rate", "1", "--prompt-tokens", "x"), "'x' is not a number of tokens"),
        (("--rate", "1", "--prompt-tokens", "9", "--shared-prefix", "10"), "--shared-prefix"),
        (("--trace", "/nowhere"), "No such file"),
    ],
)
def test_wrong_options_are_one_line(options: tuple[str, ...], error: str) -> None:
    done = pagewire("simulate", *options)
    assert done.exit_code == 2
    assert error in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_wrong_machine_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    file.write_text('{"source": "me", "kv_blocks": 0}')
    done = pagewire("simulate", "--rate", "1", "--machine", str(file))
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert "$.kv_blocks" in done.stderr


@pytest.mark.parametrize(
    ("part", "field", "value", "error"),
    [
        ("steps", "row_ms", 1, "unknown field `row_ms` - at `$.steps`"),
        ("wire", "gbs", 1, "unknown field `gbs` - at `$.wire`"),
        ("host", "hop_us", 1, "unknown field `hop_us` - at `$.host`"),
        ("steps", "curve", [[1, 100], [10, 1]], "must ascend - at `$.steps`"),
        ("steps", "curve", [[1, 1], [20, 2], [10, 3]], "must ascend - at `$.steps`"),
        ("steps", "curve", [[1, 1], [1, 2]], "must ascend - at `$.steps`"),
    ],
)
def test_all_parts_of_a_machine_are_checked(
    tmp_path: Path, part: str, field: str, value: Any, error: str
) -> None:
    machine = msgspec.to_builtins(load_machine("h200-llama-3.1-8b"))
    machine[part][field] = value
    file = tmp_path / "machine.json"
    file.write_text(json.dumps(machine))
    for command in (("simulate",), ("plan", "--gpus", "2", "--slo-ttft", "600")):
        done = pagewire(*command, "--rate", "1", "--requests", "2", "--machine", str(file))
        assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
        assert error in done.stderr


LONG_PROMPTS = ("--prompt-tokens", "6000", "--output-tokens", "64", "--requests", "60")


def best(*arguments: str) -> dict[str, Any]:
    done = pagewire("plan", *arguments, "--json")
    assert done.exit_code == 0, done.output
    choice: dict[str, Any] = json.loads(done.stdout)[0]
    return choice


def test_short_gaps_under_long_prompts_need_prefill_workers_or_an_objective() -> None:
    load = ("--gpus", "2", "--rate", "3", *LONG_PROMPTS, "--slo-ttft", "900", "--slo-gap", "15")
    fixed = best(*load, "--policy", "prefix", "--no-keep-gap")
    assert fixed["workers"] == "1P1D"
    assert fixed["kept_share"] > 0.9
    assert fixed["slo_gap_s"] is None
    kept = best(*load)
    assert kept["kept_share"] > 0.9 > best(*load, "--no-keep-gap")["kept_share"]
    assert kept["slo_gap_s"] == pytest.approx(0.0135)
    assert "with --slo-gap-s 0.0135: " in pagewire("plan", *load).stdout


def test_first_tokens_alone_need_all_workers_for_prompts() -> None:
    choice = best("--gpus", "2", "--rate", "8", *LONG_PROMPTS, "--slo-ttft", "900")
    assert choice["workers"] == "2 aggregated"


def test_the_plan_says_why() -> None:
    load = ("--gpus", "2", "--rate", "6", *LONG_PROMPTS)
    fixed = ("--policy", "prefix", "--no-keep-gap")
    done = pagewire("plan", *load, "--slo-ttft", "400", "--slo-gap", "15", *fixed)
    assert "prompts are computed in the same steps as answers" in done.stdout
    assert "a prefill worker is busy" in done.stdout
    assert "No division keeps the promise" in done.stdout
    assert "use more GPUs, or promise less" in done.stdout
    assert pagewire("plan", "--gpus", "2", "--rate", "1").exit_code == 2


@pytest.mark.parametrize("promise", [("--slo-ttft", "5"), ("--slo-itl", "1"), ("--slo-gap", "1")])
def test_a_plan_says_that_no_number_of_workers_keeps_a_promise(promise: tuple[str, str]) -> None:
    done = pagewire("plan", "--gpus", "2", "--rate", "1", *LONG_PROMPTS, *promise)
    assert done.stdout.count("they are even for a request of median length that is alone") == 2
    assert "0.0%: promise less." in done.stdout


def test_a_plan_tries_local_prompts_and_finds_what_each_division_carries() -> None:
    load = ("--gpus", "2", "--rate", "4", "--prompt-tokens", "2000", "--output-tokens", "16")
    tried = ("--local-prefill-tokens", "32", "--local-prefill-tokens", "4000", "--requests", "24")
    done = pagewire("plan", *load, *tried, "--slo-ttft", "500", "--capacity", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    choices = {(each["workers"], each["local_prefill_tokens"]) for each in found}
    assert choices == {("2 aggregated", 32), ("1P1D", 32), ("1P1D", 4000)}
    capacities = [each["capacity"] for each in found]
    assert capacities == sorted(capacities, reverse=True)
    assert found[0]["workers"] == "2 aggregated"
    assert found[-1]["capacity"] > 1
    assert found[-1]["carries"] == f"{found[-1]['capacity']:.2f} times this load"


def test_a_plan_names_the_end_of_its_search_as_one() -> None:
    load = ("--gpus", "1", "--rate", "0.01", "--requests", "2", "--slo-ttft", "9000", "--capacity")
    assert "carries at least 64 times this load; " in pagewire("plan", *load).stdout
    assert best(*load)["carries"] == "at least 64 times this load"
    assert best(*load[:-1])["carries"] is None


def test_workers_may_try_to_keep_the_promised_gap() -> None:
    load = ("--rate", "4", "--prompt-tokens", "6144", "--requests", "60", "--slo-gap", "30")

    def longest(*arguments: str) -> float:
        result = pagewire("simulate", "--workers", "1", *load, "--json", *arguments)
        found: dict[str, Any] = json.loads(result.stdout)
        return float(found["1 aggregated"]["gap"]["p99"])

    assert longest() == longest("--keep-gap") <= 30 < longest("--no-keep-gap")


def test_a_gap_to_keep_must_be_promised() -> None:
    result = pagewire("simulate", "--rate", "4", "--requests", "5", "--keep-gap")
    assert result.exit_code != 0
    assert "--keep-gap needs --slo-gap or --slo-itl" in result.output


def test_there_may_be_fewer_requests_than_agents() -> None:
    result = pagewire("simulate", "--agents", "4", "--requests", "2", "--json")
    assert json.loads(result.stdout)["1P1D"]["requests"] == 2


def test_a_plan_of_refused_requests_says_so() -> None:
    load = ("--gpus", "2", "--rate", "4", "--requests", "3", "--prompt-tokens", "4000")
    done = pagewire("plan", *load, "--num-blocks", "100", "--slo-ttft", "600")
    assert done.exit_code == 0, done.output
    assert "No division keeps the promise" in done.stdout
    assert "1P1D: 3 of 3 requests were refused: 3 need more KV blocks than a worker" in done.stdout
    assert "0.0%: give workers more KV blocks (--num-blocks), or send shorter" in done.stdout
    assert "more GPUs" not in done.stdout


def test_the_same_cluster_is_simulated_once() -> None:
    load = ("--rate", "4", "--requests", "3", "--prompt-tokens", "100")
    done = pagewire("simulate", *load, "--workers", "1,1P1D,1p1d,1")
    assert done.stdout.count("1P1D") == 1
    locals_ = ("--local-prefill-tokens", "32", "--local-prefill-tokens", "32")
    done = pagewire("plan", "--gpus", "2", *load, *locals_, "--slo-ttft", "600", "--json")
    assert [each["workers"] for each in json.loads(done.stdout)].count("1P1D") == 1
