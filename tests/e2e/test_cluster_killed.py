"""Answers of every kind keep their tokens when the decode worker that has most of them is killed.

A third is greedy, a third seeded, half of both with every sampling parameter; a third is
constrained or has tools.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from dataclasses import dataclass, field
from typing import Any

import httpx
import jsonschema
import pytest

from pagewire.shared.model.demo import demo_model_path
from pagewire.shared.text.tokenizer import Tokenizer
from pagewire.tests.support.aio import run_async
from pagewire.tests.support.local_cluster import LocalCluster, SharedClusters
from pagewire.tests.support.shaped_requests import SHAPES
from pagewire.tests.support.sse import arriving_events

pytestmark = pytest.mark.timeout(240)

TOKENIZER = Tokenizer.from_dir(demo_model_path())
COUNT, MAX_TOKENS, TIMEOUT_S = 64, 120, 100.0
PROMPTS = [[n * 37 % 1000 + 10 + i for n in range(5 + 7 * i % 90)] for i in range(COUNT)]
# Forms of more than a hundred tokens: the worker is killed while they are being followed.
LIST = r"\[[0-9]{3}(, [0-9]{3}){29}\]"
NUMBER = {"type": "integer", "minimum": 100, "maximum": 999}
NUMBERS = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 12},
        "numbers": {"type": "array", "items": NUMBER, "minItems": 24, "maxItems": 24},
    },
    "required": ["title", "numbers"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "add", "parameters": NUMBERS}}


@dataclass
class Answer:
    """What a client has of one answer."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    calls: list[list[str]] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, choice: dict[str, Any]) -> None:
        """Take what a chunk adds."""
        self.token_ids += choice.get("token_ids", [])
        self.finish_reason = choice["finish_reason"]
        delta = choice.get("delta", choice)
        self.text += delta.get("text") or delta.get("content") or ""
        for part in delta.get("tool_calls", ()):
            if "id" in part:
                self.calls.append([part["function"]["name"], ""])
            self.calls[part["index"]][1] += part["function"].get("arguments", "")


class Arrivals:
    """Says when enough tokens have come, of all answers together."""

    def __init__(self, enough: int) -> None:
        self._missing = enough
        self.enough = asyncio.Event()

    def add(self, count: int) -> None:
        self._missing -= count
        if self._missing <= 0:
            self.enough.set()


@pytest.fixture(scope="module")
def cluster(shared_clusters: SharedClusters) -> LocalCluster:
    return shared_clusters.get(prefill=1, decode=2)


def sampling_of(index: int, greedy: bool) -> dict[str, Any]:
    return {"temperature": 0.0} if greedy else {"temperature": 0.9, "seed": index}


def asked(index: int) -> tuple[str, dict[str, Any]]:
    """Return a request: the end of its URL and its fields."""
    if index % 3 == 2:
        return asked_in_a_form(index)
    shape = SHAPES[index // 6 % len(SHAPES)] if index // 3 % 2 else {}
    body = {"prompt": PROMPTS[index], "max_tokens": MAX_TOKENS, "ignore_eos": True}
    return "completions", {**body, **sampling_of(index, greedy=index % 3 == 0), **shape}


def asked_in_a_form(index: int) -> tuple[str, dict[str, Any]]:
    """Return a request whose answer has a form; each form greedily and with a seed."""
    body = {"max_tokens": 2 * MAX_TOKENS, **sampling_of(index, greedy=index % 2 == 0)}
    if index // 3 % 3 == 0:
        return "completions", {**body, "prompt": PROMPTS[index], "guided_regex": LIST}
    question = f"{index}: What is a lambda? " * (1 + index % 8)
    body["messages"] = [{"role": "user", "content": question}]
    if index // 3 % 3 == 1:
        form = {"type": "json_schema", "json_schema": {"name": "numbers", "schema": NUMBERS}}
        return "chat/completions", {**body, "response_format": form}
    tools = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    return "chat/completions", {**body, **tools}


async def answer_of(url: str, http: httpx.AsyncClient, index: int, arrivals: Arrivals) -> Answer:
    end, body = asked(index)
    body |= {"model": "pagewire-demo", "stream": True, "return_token_ids": True}
    answer = Answer()
    async with http.stream("POST", f"{url}/v1/{end}", json=body) as response:
        assert response.is_success, (await response.aread(), body)
        async for event in arriving_events(response):
            assert "error" not in event, (event, body)
            before = len(answer.token_ids)
            answer.add(event["choices"][0])
            arrivals.add(len(answer.token_ids) - before)
    return answer


async def ask_all(cluster: LocalCluster, kill_after: int | None = None) -> list[Answer]:
    """Stream all answers at once; kill the worker with most of them after some tokens."""
    arrivals = Arrivals(kill_after or 0)
    async with httpx.AsyncClient(timeout=TIMEOUT_S) as http, asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(answer_of(cluster.url, http, index, arrivals))
            for index in range(COUNT)
        ]
        if kill_after is not None:
            await asyncio.wait_for(arrivals.enough.wait(), TIMEOUT_S)
            await asyncio.to_thread(kill_the_busiest, cluster)
    return [task.result() for task in tasks]


def kill_the_busiest(cluster: LocalCluster) -> None:
    running = {
        found[1]: value
        for name, value in cluster.metrics().items()
        if (found := re.match(r'pagewire_requests_running\{.*worker="(decode-\d)"', name))
    }
    os.kill(cluster.worker_pid(max(running, key=lambda name: running[name])), signal.SIGKILL)


def check(index: int, answer: Answer) -> None:
    """Check that an answer ended by itself, in its form."""
    if index % 3 != 2:
        assert (len(answer.token_ids), answer.finish_reason) == (MAX_TOKENS, "length")
    elif index // 3 % 3 == 0:
        assert re.fullmatch(LIST, answer.text), answer
    elif index // 3 % 3 == 1:
        jsonschema.validate(json.loads(answer.text), NUMBERS)
    else:
        ((name, arguments),) = answer.calls
        assert (name, answer.finish_reason, answer.text) == ("add", "tool_calls", "")
        jsonschema.validate(json.loads(arguments), NUMBERS)


def test_answers_keep_their_tokens_when_their_decode_worker_is_killed(
    cluster: LocalCluster,
) -> None:
    undisturbed = run_async(ask_all(cluster), TIMEOUT_S)
    for index, answer in enumerate(undisturbed):
        check(index, answer)
    migrated = cluster.total("pagewire_request_migrations_total")
    half = sum(len(answer.token_ids) for answer in undisturbed) // 2
    disturbed = run_async(ask_all(cluster, kill_after=half), TIMEOUT_S)
    different = [i for i, (a, b) in enumerate(zip(disturbed, undisturbed, strict=True)) if a != b]
    assert not different, [(asked(i), disturbed[i], undisturbed[i]) for i in different]
    assert cluster.total("pagewire_request_migrations_total") - migrated >= COUNT // 4


def test_the_timings_of_an_answer_that_changed_its_decode_worker(cluster: LocalCluster) -> None:
    """Its parts are those of the last worker, its workers all that it had."""
    cluster.wait_whole()
    body = {"model": "pagewire-demo", "prompt": [609, *range(10, 309)], "max_tokens": 600}
    body |= {"temperature": 0, "ignore_eos": True, "stream": True, "timings": True}
    url, first, last = f"{cluster.url}/v1/completions", "", {}
    with httpx.stream("POST", url, json=body, timeout=60) as response:
        for line in response.iter_lines():
            if not first:
                held = cluster.used_blocks()
                first = next(each for each in ("decode-0", "decode-1") if held.get(each))
                os.kill(cluster.worker_pid(first), signal.SIGKILL)
            if line.startswith("data: {"):
                last = json.loads(line.removeprefix("data: "))
    [choice] = last["timings"]["choices"]
    other = {"decode-0": "decode-1", "decode-1": "decode-0"}[first]
    assert choice["migrations"] == 1
    assert (first in choice["workers"], choice["decode"]["worker"]) == (True, other)
    assert choice["workers"][-1] == other
    assert choice["decode"]["steps"] == 599  # on both
    assert last["timings"]["total_ms"] >= choice["decode"]["ms"]
