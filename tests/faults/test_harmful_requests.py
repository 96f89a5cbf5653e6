"""Requests that take long, hang a step, or fail it, next to requests that must not notice."""

from __future__ import annotations

import asyncio
import functools
import json
import random
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

import pagewire
from pagewire import LLM, SamplingParams
from pagewire.tests.support.aio import eventually, run_async
from pagewire.tests.support.greedy_prompts import GreedyPrompts, greedy_prompts
from pagewire.tests.support.local_cluster import LocalCluster, local_cluster
from pagewire.tests.support.trapped_workers import POISONS, PROGRAM

pytestmark = pytest.mark.timeout(240)

DEMO = Path(pagewire.__file__).parent / "shared" / "model" / "demo"
LONG_CONTEXT = 262_144
LONG_PROMPT = 3000
IN_FLIGHT = 4
MAX_TOKENS = 24
OPTIONS = ("--device", "cpu", "--dtype", "float32", "--num-blocks", "4096")
# The default is 10 s. The longer one is for clusters that must lose exactly one worker.
SHORT, LONGER = ({"PAGEWIRE_STEP_TIMEOUT_S": seconds} for seconds in ("0.5", "2"))
ANSWER = {"max_tokens": 400, "temperature": 0, "ignore_eos": True}
PROMPTS = [[5 + number] * 40 for number in range(6)]
# Numbers of prefill and decode workers.
LAYOUTS = {"3P1D": (3, 1), "aggregated": (0, 3)}


@pytest.fixture(scope="module")
def small() -> GreedyPrompts:
    return greedy_prompts(MAX_TOKENS)


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """The answers to `PROMPTS` by one process that nothing disturbs."""
    llm = LLM("demo", device="cpu", dtype="float32")
    return [output.text for output in llm.generate(PROMPTS, SamplingParams(**ANSWER))]


class Trapped:
    """A cluster whose workers have traps, and what has happened since a test began."""

    def __init__(self, cluster: LocalCluster, workers: int) -> None:
        self.cluster, self.workers = cluster, workers
        cluster.wait_whole()
        self._num_deaths = len(deaths(cluster))
        names = [each["id"] for each in cluster.health()["services"]]
        self._log_ends = {name: len(cluster.log_of(name)) for name in names}

    def deaths(self) -> list[str]:
        return deaths(self.cluster)[self._num_deaths :]

    def wait_for_a_death(self) -> str:
        """Wait until the supervisor reports a worker's end, and return the line."""
        run_async(eventually(self.deaths), 30)
        return self.deaths()[0]

    def log_of_dead(self, death: str) -> str:
        """Return the log of a worker that died, as far as this test has seen it."""
        name = death.partition(" ")[0]
        return self.cluster.log_of(name)[self._log_ends[name] :]

    def story(self) -> str:
        """Say what happened."""
        return "\n".join([self.cluster.output, *map(self.log_of_dead, self.deaths())])

    def wait_idle(self) -> None:
        self.cluster.wait_idle(self.workers, timeout=60)


@pytest.fixture(scope="module")
def clusters() -> Iterator[Callable[[str], LocalCluster]]:
    """Returns the cluster of a layout; all tests with that layout have the same one."""
    with ExitStack() as stack:

        @functools.cache
        def start(layout: str) -> LocalCluster:
            prefill, decode = map(str, LAYOUTS[layout])
            options = ("--prefill", prefill, "--decode", decode, *OPTIONS)
            return stack.enter_context(local_cluster(*options, env=LONGER, program=PROGRAM))

        yield start


@pytest.fixture
def layout() -> str:
    """Of tests for which one is enough."""
    return "aggregated"


@pytest.fixture
def trapped(clusters: Callable[[str], LocalCluster], layout: str) -> Trapped:
    return Trapped(clusters(layout), sum(LAYOUTS[layout]))


async def post(cluster: LocalCluster, prompt: list[int], **fields: Any) -> httpx.Response:
    async with httpx.AsyncClient(timeout=120) as client:
        body = {"model": "pagewire-demo", "prompt": prompt, "max_tokens": 4} | fields
        return await client.post(f"{cluster.url}/v1/completions", json=body)


def text_of(response: httpx.Response) -> str:
    text: str = response.json()["choices"][0]["text"]
    return text


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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_that_hangs_ends_one_worker_and_its_request(
    trapped: Trapped, texts: list[str]
) -> None:
    """Other requests are being answered; none of them has a prompt in that step."""
    cluster = trapped.cluster

    async def scenario() -> httpx.Response:
        running = [asyncio.create_task(post(cluster, prompt, **ANSWER)) for prompt in PROMPTS[:4]]
        await eventually(lambda: cluster.total("vllm:num_requests_running") >= len(running))
        poisoned = await post(cluster, POISONS["hang"], n=2)
        assert [text_of(await each) for each in running] == texts[:4]
        return poisoned

    error = check_refusal(run_async(scenario(), 110))
    died = trapped.wait_for_a_death()
    assert "exit code 1" in died
    log = trapped.log_of_dead(died)
    [line] = [line for line in log.splitlines() if "counts as hanging" in line]
    # On a busy machine, an earlier step may have had the first tokens of the prompt.
    assert re.search(r"[1-9]\d* prompt tokens", line)
    for part in ("PAGEWIRE_STEP_TIMEOUT_S=2", error["request_id"]):
        assert part in line
    assert "in spring" in log  # the stack of the engine's thread
    trapped.wait_idle()
    assert trapped.deaths() == [died], trapped.story()


def test_a_step_that_hangs_among_prompts_costs_none_of_them(
    trapped: Trapped, small: GreedyPrompts
) -> None:
    """If others' prompts are in the step, those run alone from then on: a second worker may end."""
    check_refusal(run_async(amid_small_requests(trapped.cluster, small, POISONS["hang"]), 110))
    trapped.wait_for_a_death()
    trapped.wait_idle()
    assert len(trapped.deaths()) <= 2, trapped.story()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_request_that_crashes_workers_ends_two_of_them(
    trapped: Trapped, small: GreedyPrompts
) -> None:
    """One crash proves nothing: a second worker gets the request, and no third one."""
    response = run_async(amid_small_requests(trapped.cluster, small, POISONS["crash"]), 110)
    check_refusal(response, "crashed (Segmentation fault) in a step of")
    run_async(eventually(lambda: len(trapped.deaths()) == 2), 30)
    assert all("SIGSEGV" in line for line in trapped.deaths()), trapped.deaths()
    log = trapped.log_of_dead(trapped.deaths()[0])
    assert "Fatal Python error: Segmentation fault" in log
    assert "in spring" in log  # the stack of the engine's thread
    trapped.wait_idle()
    assert len(trapped.deaths()) == 2, trapped.story()


def test_a_crash_in_a_decode_step_is_blamed_on_its_request_alone(
    trapped: Trapped, texts: list[str]
) -> None:
    """It is the oldest row, and all rows are suspected once."""
    cluster = trapped.cluster

    async def scenario() -> httpx.Response:
        poisoned = asyncio.create_task(post(cluster, POISONS["later"], **ANSWER))
        await asyncio.sleep(0.1)
        answers = await asyncio.gather(*(post(cluster, prompt, **ANSWER) for prompt in PROMPTS))
        assert [text_of(response) for response in answers] == texts
        return await poisoned

    check_refusal(run_async(scenario(), 110), "crashed (Segmentation fault) in a step")
    trapped.wait_idle()
    assert len(trapped.deaths()) == 2, trapped.story()


def test_a_stream_that_hangs_a_step_ends_with_the_same_error(trapped: Trapped) -> None:
    response = run_async(post(trapped.cluster, POISONS["hang"], stream=True), 60)
    assert "request_harms_workers" in response.text
    trapped.wait_for_a_death()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_that_fails_costs_its_request_alone(trapped: Trapped, small: GreedyPrompts) -> None:
    cluster = trapped.cluster

    async def try_again() -> None:
        for _ in range(4):  # as clients do
            assert (await post(cluster, POISONS["fail"])).status_code == 500

    response = run_async(amid_small_requests(cluster, small, POISONS["fail"]), 110)
    assert response.status_code == 500
    run_async(try_again(), 60)
    assert run_async(post(cluster, [5, 6, 7]), 60).status_code == 200
    assert not trapped.deaths()
    trapped.wait_idle()
