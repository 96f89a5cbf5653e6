"""The GPU benches' parts that need no GPU: topologies, tables, the errors of servers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pagewire.loadtest.bench import phases
from pagewire.loadtest.bench.client import Client, CompletionRequest, TimedAnswer
from pagewire.loadtest.bench.clusters import Topology, vllm_environment
from pagewire.loadtest.bench.handover import PAIRS, WARM_UP_PAIRS, ask_in_turn, ratios
from pagewire.loadtest.bench.one_gpu import compare, results
from pagewire.loadtest.bench.tables import markdown
from pagewire.loadtest.cluster import BenchError, gist
from pagewire.tests.support.aio import run_async


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("1:1", "1P1D, steps of 2048"),
        ("1:2:512", "1P2D, steps of 512"),
        ("0:2", "2 aggregated, steps of 2048"),
    ],
)
def test_topologies(text: str, label: str) -> None:
    assert Topology.parse(text, budget=2048).label == label


@pytest.mark.parametrize("text", ["", "1", "1:x", "1:2:3:4"])
def test_a_topology_of_another_form_is_named(text: str) -> None:
    with pytest.raises(BenchError, match=f"'{text}' is not PREFILL:DECODE"):
        Topology.parse(text, budget=2048)


def test_tables_round_and_leave_out_what_is_not_there() -> None:
    rows = [{"name": "a", "ms": 4.76812, "n": 512, "parts": [1.0]}, {"name": "b", "ms": 12345.6}]
    assert markdown(rows).splitlines() == [
        "| name | ms | n |",
        "| --- | --- | --- |",
        "| a | 4.77 | 512 |",
        "| b | 12,346 |  |",
    ]


def test_results_stand_next_to_the_peers() -> None:
    ours = [{"what": "throughput", "inp": 1024, "out": out, "out_tok_s": 200.0} for out in (1, 2)]
    theirs = [{"what": "throughput", "inp": 1024, "out": 2, "out_tok_s": 100.0}]
    first, second = compare("throughput", ours, theirs).splitlines()[2:]
    assert first.endswith("| 200 |  |  |")
    assert second.endswith("| 200 | 100 | 2 |")


def test_a_bench_that_fails_has_no_results() -> None:
    assert results("pagewire.loadtest.bench.no_such_bench") is None


def test_vllm_is_found_where_it_is_installed(tmp_path: Path) -> None:
    assert vllm_environment(tmp_path, pair=False) is None
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").touch()
    found = vllm_environment(tmp_path, pair=False)
    assert found is not None
    assert found["PYTHONPATH"].split(":")[0] == str(tmp_path)
    assert vllm_environment(tmp_path, pair=True) is None  # its connector is not there


def test_a_servers_errors_are_named() -> None:
    log = "\n".join(["fine", "RuntimeError: the cause", *["noise"] * 50, "the end"])
    assert gist(log).splitlines()[0] == "RuntimeError: the cause"
    assert gist(log).splitlines()[-1] == "the end"


class Asked(Client):
    """Answers by itself; notes what is done in which order."""

    def __init__(self, done: list[str] | None = None, name: str = "asked") -> None:
        super().__init__(["http://nowhere"])
        self.done = [] if done is None else done
        self.name = name

    def prepare(self, length: int, out: int, **more: Any) -> CompletionRequest:
        self.done.append("made up")
        return super().prepare(2, out, **more)

    async def ask(self, request: CompletionRequest) -> TimedAnswer:
        self.done.append(self.name)
        return TimedAnswer([0.1, 0.2])


def test_a_request_is_the_json_of_its_fields_and_of_those_for_once() -> None:
    async def scenario() -> CompletionRequest:
        client = Client(["http://nowhere"], vocab=50)
        try:
            return client.prepare(3, 7)
        finally:
            await client.aclose()

    request = run_async(scenario())
    body = json.loads(msgspec.json.encode(request.fields(max_tokens=1, stream=True)))
    assert len(body.pop("prompt")) == 3
    assert body == {
        "model": "m",
        "max_tokens": 1,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    assert request.options["max_tokens"] == 7


def test_two_clusters_take_turns_in_being_the_first() -> None:
    async def scenario() -> list[str]:
        done: list[str] = []
        clients = [Asked(done, "apart"), Asked(done, "aggregated")]
        row = await ask_in_turn(clients, 1024)
        assert (row["prompt"], row["requests"], row["ttft_ratio"]) == (1024, PAIRS, 1)
        for client in clients:
            await client.aclose()
        return [word for word in done if word != "made up"]

    done = run_async(scenario())
    assert done[:4] == ["apart", "aggregated", "aggregated", "apart"]
    assert len(done) == 2 * (WARM_UP_PAIRS + PAIRS)


def test_ratios_are_of_medians() -> None:
    apart = [TimedAnswer([0.1 * n, 0.3 * n, 9.0]) for n in (3, 1, 2, 5, 4)]
    aggregated = [TimedAnswer([0.2, 0.3])] * 5
    row = ratios(apart, aggregated)
    assert row["ttft"] == pytest.approx(300)
    assert row["ttft_quartiles"] == pytest.approx([200, 400])
    assert row["aggregated_second"] == pytest.approx(300)
    assert row["ttft_ratio"] == pytest.approx(1.5)
    assert row["second_ratio"] == pytest.approx(3)


def test_isolation_pools_the_gaps_of_runs_that_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    class Streams(Client):
        """Gaps grow by the run; long prompts take a while."""

        def __init__(self) -> None:
            super().__init__(["http://nowhere"])
            self.runs: list[str] = []

        async def complete(self, length: int, out: int, **more: Any) -> TimedAnswer:
            self.runs.append("stream")
            run = len(self.runs) // phases.STREAMS
            await asyncio.sleep(0.6)
            return TimedAnswer([0.001 * run * n for n in range(phases.FIRST_GAPS + 100)])

        async def ask(self, request: CompletionRequest) -> TimedAnswer:
            return TimedAnswer([0.2, 0.3])

    monkeypatch.setattr(phases, "STREAMS", 1)
    monkeypatch.setattr(phases, "LONG_PROMPT", 2)

    async def scenario() -> list[phases.Row]:
        return await phases.run(Streams(), ["isolation"])

    alone, loaded = run_async(scenario())
    assert (alone["loaded"], loaded["loaded"]) == (False, True)
    assert alone["p99_of_runs"] == pytest.approx([1, 3, 5])
    assert loaded["p99_of_runs"] == pytest.approx([2, 4, 6])
    assert (alone["p50"], loaded["p99"]) == (pytest.approx(3), pytest.approx(6))
    assert loaded["of_alone"] == pytest.approx(6 / 5)
    assert loaded["long_ttft"] == pytest.approx(200)
