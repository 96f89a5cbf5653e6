"""The GPU benches' parts that need no GPU: topologies, tables, the errors of servers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pagewire.loadtest.gpu import phases
from pagewire.loadtest.gpu.client import Answer, Client, Request
from pagewire.loadtest.gpu.clusters import (
    Topology,
    _gist,
    vllm_environment,
)
from pagewire.loadtest.gpu.one import compare, results
from pagewire.loadtest.gpu.tables import markdown
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


def test_tables_round_and_leave_out_what_is_not_there() -> None:
    rows = [{"name": "a", "ms": 4.76812, "n": 512}, {"name": "b", "ms": 12345.6}]
    assert markdown(rows, ("name", "ms", "n")).splitlines() == [
        "| name | ms | n |",
        "| --- | --- | --- |",
        "| a | 4.77 | 512 |",
        "| b | 12,346 |  |",
    ]


def test_results_stand_beside_the_peers() -> None:
    ours = [{"what": "throughput", "inp": 1024, "out": out, "out_tok_s": 200.0} for out in (1, 2)]
    theirs = [{"what": "throughput", "inp": 1024, "out": 2, "out_tok_s": 100.0}]
    first, second = compare("throughput", ours, theirs).splitlines()[2:]
    assert first.endswith("|  |  |  |  |")
    assert second.endswith("| 100 |  |  | 2 |")


def test_a_bench_that_fails_has_no_results() -> None:
    assert results("pagewire.loadtest.gpu.no_such_bench") is None


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
    assert _gist(log).splitlines()[0] == "RuntimeError: the cause"
    assert _gist(log).splitlines()[-1] == "the end"


class Asked(Client):
    """Answers by itself; notes what is done in which order."""

    def __init__(self) -> None:
        super().__init__(["http://nowhere"])
        self.done: list[str] = []

    def prepare(self, length: int, out: int) -> Request:
        self.done.append("made up")
        return super().prepare(2, out)

    async def ask(self, request: Request) -> Answer:
        self.done.append("asked")
        return Answer([0.1, 0.2])


def test_goodputs_prompts_are_made_up_before_any_is_timed() -> None:
    async def scenario() -> list[str]:
        client = Asked()
        await phases.run(client, ["goodput"], [200.0], 0.05)
        return client.done

    done = run_async(scenario())
    count = len(done) // 2
    assert count > 1
    assert done == ["made up"] * count + ["asked"] * count


def test_a_request_is_the_json_of_its_fields_and_of_those_for_once() -> None:
    async def scenario() -> Request:
        client = Client(["http://nowhere"], vocab=50)
        try:
            return client.prepare(3, 7)
        finally:
            await client.close()

    request = run_async(scenario())
    body = json.loads(request.body({"max_tokens": 1, "stream": True}))
    assert len(body.pop("prompt")) == 3
    assert body == {
        "model": "m",
        "max_tokens": 1,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    assert request.options["max_tokens"] == 7
