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
from pagewire.tests.support.aio import eventually, run_async
from pagewire.tests.support.greedy_prompts import GreedyPrompts, greedy_prompts
from pagewire.tests.support.local_cluster import LocalCluster, local_cluster
from pagewire.tests.support.trapped_workers import POISON, PROGRAM, TRAP

DEMO = Path(pagewire.__file__).parent / "shared" / "model" / "demo"
LONG_CONTEXT = 262_144
LONG_PROMPT = 3000
IN_FLIGHT = 4
MAX_TOKENS = 24
OPTIONS = ("--device", "cpu", "--dtype", "float32", "--num-blocks", "4096")
# The default is 10 s. The longer one is for clusters that must lose exactly one worker.
SHORT, LONGER = ({"PAGEWIRE_STEP_TIMEOUT_S": seconds} for seconds in ("0.5", "2"))
ANSWER = {"max_tokens": 400, "temperature": 0, "ignore_eos": True}


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


def check_refusal(response: httpx.Response, why: str = "counts as hanging") -> dict[str, Any]:
    """Check that a request is to blame, and must not be sent again; returns the error."""
    assert response.status_code == 500
    assert response.headers["x-should-retry"] == "false"
    error: dict[str, Any] = response.json()["error"]
    assert error["code"] == "request_harms_workers"
    assert why in error["message"]
    assert "Do not send it again" in error["message"]
    return error


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


def wait_for_a_death(cluster: LocalCluster) -> str:
    """Wait until the supervisor reports a worker's end, and return the line."""
    run_async(eventually(lambda: deaths(cluster)), 30)
    return deaths(cluster)[0]


@pytest.mark.parametrize(("prefill", "decode"), [(2, 2), (0, 2)], ids=["2P2D", "aggregated"])
def test_a_step_that_hangs_ends_one_worker_and_its_request(prefill: int, decode: int) -> None:
    """Other requests are being answered; none of them has a prompt in that step."""

    async def scenario(cluster: LocalCluster) -> httpx.Response:
        prompts = [[5 + number] * 40 for number in range(4)]
        calm = [await post(cluster, prompt, **ANSWER) for prompt in prompts]
        running = [asyncio.create_task(post(cluster, prompt, **ANSWER)) for prompt in prompts]
        await eventually(lambda: cluster.total("vllm:num_requests_running") >= len(running))
        poisoned = await post(cluster, POISON, n=2)
        texts = [response.json()["choices"][0]["text"] for response in calm]
        assert [(await each).json()["choices"][0]["text"] for each in running] == texts
        return poisoned

    with trapped_cluster("hang", prefill, decode) as cluster:
        response = run_async(scenario(cluster), 110)
        error = check_refusal(response)
        died = wait_for_a_death(cluster)
        assert "exit code 1" in died
        log = cluster.log_of(died.partition(" ")[0])
        [line] = [line for line in log.splitlines() if "counts as hanging" in line]
        for part in ("201 prompt tokens", "PAGEWIRE_STEP_TIMEOUT_S=2", error["request_id"]):
            assert part in line
        assert "in spring" in log  # the stack of the engine's thread
        cluster.wait_idle(prefill + decode, timeout=60)
        assert deaths(cluster) == [died], what_happened(cluster)


def test_a_step_that_hangs_among_prompts_costs_none_of_them(small: GreedyPrompts) -> None:
    """If others' prompts are in the step, those run alone from then on: a second worker may end."""
    with trapped_cluster("hang", 0, 2) as cluster:
        check_refusal(run_async(amid_small_requests(cluster, small, POISON), 110))
        wait_for_a_death(cluster)
        cluster.wait_idle(2, timeout=60)
        assert len(deaths(cluster)) <= 2, what_happened(cluster)


@pytest.mark.parametrize(("prefill", "decode"), [(3, 1), (0, 3)], ids=["3P1D", "aggregated"])
def test_a_request_that_crashes_workers_ends_two_of_them(
    small: GreedyPrompts, prefill: int, decode: int
) -> None:
    """One crash proves nothing: a second worker gets the request, and no third one."""
    with trapped_cluster("crash", prefill, decode) as cluster:
        response = run_async(amid_small_requests(cluster, small, POISON), 110)
        check_refusal(response, "crashed (Segmentation fault) in a step of")
        run_async(eventually(lambda: len(deaths(cluster)) == 2), 30)
        assert all("SIGSEGV" in line for line in deaths(cluster)), deaths(cluster)
        log = cluster.log_of(deaths(cluster)[0].partition(" ")[0])
        assert "Fatal Python error: Segmentation fault" in log
        assert "in spring" in log  # the stack of the engine's thread
        cluster.wait_idle(prefill + decode, timeout=60)
        assert len(deaths(cluster)) == 2, what_happened(cluster)


def test_a_crash_in_a_decode_step_is_blamed_on_its_request_alone() -> None:
    """It is the oldest row, and all rows are suspected once."""

    async def scenario(cluster: LocalCluster) -> httpx.Response:
        prompts = [[5 + number] * 40 for number in range(4)]
        calm = [await post(cluster, prompt, **ANSWER) for prompt in prompts]
        poisoned = asyncio.create_task(post(cluster, POISON, **ANSWER))
        await asyncio.sleep(0.1)
        answers = await asyncio.gather(*(post(cluster, prompt, **ANSWER) for prompt in prompts))
        texts = [response.json()["choices"][0]["text"] for response in calm]
        assert [response.json()["choices"][0]["text"] for response in answers] == texts
        return await poisoned

    with trapped_cluster("later", 0, 2) as cluster:
        check_refusal(run_async(scenario(cluster), 110), "crashed (Segmentation fault) in a step")
        cluster.wait_idle(2, timeout=60)
        assert len(deaths(cluster)) == 2, what_happened(cluster)


def test_a_stream_that_hangs_a_step_ends_with_the_same_error() -> None:
    with trapped_cluster("hang", 0, 1) as cluster:
        response = run_async(post(cluster, POISON, stream=True), 60)
        assert "request_harms_workers" in response.text
        wait_for_a_death(cluster)


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
