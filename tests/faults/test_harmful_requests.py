"""Requests that take long, hang a step, or fail it, next to requests that must not notice."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

import pagewire
from pagewire.tests.support.aio import run_async
from pagewire.tests.support.greedy_prompts import GreedyPrompts, greedy_prompts
from pagewire.tests.support.local_cluster import LocalCluster, local_cluster
from pagewire.tests.support.trapped_workers import PROGRAM, TRAP, TRAP_TOKEN

DEMO = Path(pagewire.__file__).parent / "shared" / "model" / "demo"
LONG_CONTEXT = 262_144
LONG_PROMPT = 3000
IN_FLIGHT = 4
MAX_TOKENS = 24
OPTIONS = ("--device", "cpu", "--dtype", "float32", "--num-blocks", "4096")
# The default is 10 s. The longer one is for clusters that must lose exactly one worker.
SHORT, LONGER = ({"PAGEWIRE_STEP_TIMEOUT_S": seconds} for seconds in ("0.5", "2"))
POISON = [TRAP_TOKEN, *[9] * 200]


@pytest.fixture(scope="module")
def small() -> GreedyPrompts:
    return greedy_prompts(MAX_TOKENS)


@contextmanager
def trapped_cluster(trap: str, prefill: int, decode: int) -> Iterator[LocalCluster]:
    workers = ("--prefill", str(prefill), "--decode", str(decode))
    env = LONGER | {TRAP: trap}
    with local_cluster(*workers, *OPTIONS, env=env, program=PROGRAM) as cluster:
        yield cluster


async def post(cluster: LocalCluster, prompt: list[int], **fields: Any) -> httpx.Response:
    async with httpx.AsyncClient(timeout=120) as client:
        body = {"model": "pagewire-demo", "prompt": prompt, "max_tokens": 4} | fields
        return await client.post(f"{cluster.url}/v1/completions", json=body)


async def amid_small_requests(
    cluster: LocalCluster, small: GreedyPrompts, prompt: list[int], **fields: Any
) -> httpx.Response:
    """Send a request while others run, all of which must be answered as usual."""
    others = asyncio.create_task(small.ask(cluster.url, IN_FLIGHT, timeout=120))
    await asyncio.sleep(0.3)
    response = await post(cluster, prompt, **fields)
    await others
    return response


def what_happened(cluster: LocalCluster) -> str:
    names = [line.partition(" ")[0] for line in deaths(cluster)]
    return "\n".join([cluster.output, *(cluster.log_of(name) for name in names)])


def deaths(cluster: LocalCluster) -> list[str]:
    return [line for line in cluster.lines if " died: " in line]


def test_a_long_prompt_is_slow_and_ends_no_worker(small: GreedyPrompts, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(DEMO, model)
    config = json.loads((model / "config.json").read_text())
    config["max_position_embeddings"] = LONG_CONTEXT
    (model / "config.json").write_text(json.dumps(config))
    rng = random.Random(1)
    prompt = [rng.randrange(5, 2000) for _ in range(LONG_PROMPT)]
    options = ("--prefill", "1", "--decode", "1", "--model", str(model), *OPTIONS)
    with local_cluster(*options, "--served-model-name", "pagewire-demo", env=SHORT) as cluster:
        response = run_async(amid_small_requests(cluster, small, prompt), 170)
        assert response.status_code == 200, response.text
        assert response.json()["usage"]["prompt_tokens"] == LONG_PROMPT
        assert not deaths(cluster)
        cluster.wait_idle(2)


@pytest.mark.parametrize(("prefill", "decode"), [(2, 2), (0, 2)], ids=["2P2D", "aggregated"])
def test_a_step_that_hangs_ends_one_worker_and_its_request(
    small: GreedyPrompts, prefill: int, decode: int
) -> None:
    with trapped_cluster("hang", prefill, decode) as cluster:
        response = run_async(amid_small_requests(cluster, small, POISON, n=2), 110)
        assert response.status_code == 500
        assert response.headers["x-should-retry"] == "false"
        error = response.json()["error"]
        assert error["code"] == "request_harms_workers"
        assert "counts as hanging" in error["message"]
        assert "Do not send it again" in error["message"]
        assert len(deaths(cluster)) == 1, what_happened(cluster)
        [died] = deaths(cluster)
        assert "exit code 1" in died
        log = cluster.log_of(died.partition(" ")[0])
        [line] = [line for line in log.splitlines() if "counts as hanging" in line]
        for part in ("201 prompt tokens", "PAGEWIRE_STEP_TIMEOUT_S=2", error["request_id"]):
            assert part in line
        assert "in spring" in log  # the stack of the engine's thread
        cluster.wait_idle(prefill + decode, timeout=60)


def test_a_stream_that_hangs_a_step_ends_with_the_same_error(small: GreedyPrompts) -> None:
    with trapped_cluster("hang", 0, 2) as cluster:
        response = run_async(amid_small_requests(cluster, small, POISON, stream=True), 110)
        assert "request_harms_workers" in response.text
        assert len(deaths(cluster)) == 1


@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (0, 1)], ids=["1P1D", "aggregated"])
def test_a_step_that_fails_costs_its_request_alone(
    small: GreedyPrompts, prefill: int, decode: int
) -> None:
    async def try_again(cluster: LocalCluster) -> None:
        for _ in range(4):  # as clients do
            assert (await post(cluster, POISON)).status_code == 500

    with trapped_cluster("fail", prefill, decode) as cluster:
        response = run_async(amid_small_requests(cluster, small, POISON), 110)
        assert response.status_code == 500
        run_async(try_again(cluster), 60)
        assert run_async(post(cluster, [5, 6, 7]), 60).status_code == 200
        assert not deaths(cluster)
        cluster.wait_idle(prefill + decode)
