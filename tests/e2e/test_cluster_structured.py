"""Structured output over the cluster, by the official client; it survives its worker's death."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import httpx
import openai
import pydantic
import pytest

from pagewire.shared.model.demo import demo_model_path
from pagewire.shared.text.tokenizer import Tokenizer
from pagewire.tests.support.local_cluster import LocalCluster, local_cluster
from pagewire.tests.support.sse import events_of

pytestmark = pytest.mark.timeout(240)

MODEL = "pagewire-demo"
TOKENIZER = Tokenizer.from_dir(demo_model_path())
TEXT = "The with statement is used to wrap the execution of a block. " * 6
MESSAGES: list[Any] = [{"role": "user", "content": TEXT}]
LIST = r"\[[0-9]{3}(, [0-9]{3}){59}\]"  # of some hundred tokens

LAYOUTS = {
    "prefill-and-decode": ("--prefill", "1", "--decode", "2"),
    "aggregated": ("--prefill", "0", "--decode", "2"),
}


class Part(pydantic.BaseModel):
    """What the answer is to be."""

    model_config = pydantic.ConfigDict(extra="forbid")
    kind: Literal["list", "tuple", "set"]
    size: int = pydantic.Field(ge=0, le=99)
    tags: list[Literal["a", "b"]] = pydantic.Field(max_length=3)


@pytest.fixture(scope="module", params=LAYOUTS.values(), ids=LAYOUTS)
def cluster(request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    with local_cluster(*request.param, "--device", "cpu", "--dtype", "float32") as running:
        yield running


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_openai_client_parses_typed_answers(client: openai.OpenAI) -> None:
    for temperature in (0.0, 1.0):
        answer = client.chat.completions.parse(
            model=MODEL,
            messages=MESSAGES,
            response_format=Part,
            temperature=temperature,
            seed=5,
            max_tokens=400,
        )
        (choice,) = answer.choices
        assert choice.finish_reason == "stop"
        assert isinstance(choice.message.parsed, Part)


def test_openai_client_streams_typed_answers(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=MESSAGES, response_format=Part, max_tokens=400
    ) as stream:
        for _event in stream:
            pass
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Part)


def test_json_object_and_several_choices(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        response_format={"type": "json_object"},
        n=3,
        seed=8,
        temperature=0.8,
        max_tokens=12,
    )
    for choice in answer.choices:
        assert (choice.message.content or "").lstrip().startswith("{")


def test_extra_fields_of_vllm(client: openai.OpenAI) -> None:
    for extra in ({"guided_choice": ["yes", "no"]}, {"structured_outputs": {"regex": "yes|no"}}):
        answer = client.completions.create(
            model=MODEL, prompt=TEXT, max_tokens=8, seed=1, extra_body=extra
        )
        assert answer.choices[0].text in ("yes", "no")
        assert answer.choices[0].finish_reason == "stop"


def test_hostile_grammar_is_a_400_and_the_cluster_goes_on(client: openai.OpenAI) -> None:
    chain = "\n".join(f"a{i}: a{i + 1} a{i + 1}" for i in range(3000))
    for grammar in (f'start: a0\n{chain}\na3000: "x"', "start: missing"):
        with pytest.raises(openai.BadRequestError, match="guided_grammar: the grammar"):
            client.completions.create(
                model=MODEL, prompt=TEXT, max_tokens=8, extra_body={"guided_grammar": grammar}
            )
    test_extra_fields_of_vllm(client)


def _stream(cluster: LocalCluster, body: dict[str, Any], begun: threading.Semaphore) -> list[int]:
    tokens: list[int] = []
    asked = {
        "model": MODEL,
        "prompt": TEXT,
        "stream": True,
        "return_token_ids": True,
        "max_tokens": 400,
        "structured_outputs": {"regex": LIST},
        **body,
    }
    url = f"{cluster.url}/v1/completions"
    with httpx.stream("POST", url, json=asked, timeout=120) as response:
        for event in events_of(response.iter_bytes()):
            assert "error" not in event, event
            for choice in event["choices"]:
                tokens += choice.get("token_ids") or []
            if len(tokens) >= 8:
                begun.release()
    return tokens


def test_answers_survive_their_decode_worker(cluster: LocalCluster) -> None:
    bodies = [
        {"temperature": 0.0 if row % 2 else 1.0, "seed": row, "prompt": f"{row}: {TEXT}"}
        for row in range(8)
    ]
    with ThreadPoolExecutor(len(bodies)) as pool:

        def run(begun: threading.Semaphore) -> list[Any]:
            return [pool.submit(_stream, cluster, body, begun) for body in bodies]

        undisturbed = [each.result() for each in run(threading.Semaphore(0))]
        begun = threading.Semaphore(0)
        disturbed = run(begun)
        for _ in range(40):
            begun.acquire(timeout=60)
        used = {n: blocks for n, blocks in cluster.used_blocks().items() if n.startswith("decode-")}
        os.kill(cluster.worker_pid(max(used, key=lambda name: used[name])), signal.SIGKILL)
        again = [each.result() for each in disturbed]
    assert again == undisturbed
    assert cluster.total("pagewire_request_migrations_total") > 0
    assert any(re.fullmatch(LIST, TOKENIZER.decode(tokens[:-1])) for tokens in again)
