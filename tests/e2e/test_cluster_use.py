"""The cluster as its users meet it: the printed curl line, the OpenAI client, the prefix cache."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from pagewire.loadtest.bench.client import Client, TimedAnswer
from pagewire.tests.support.aio import run_async
from pagewire.tests.support.local_cluster import LocalCluster, local_cluster

pytestmark = pytest.mark.timeout(180)

MODEL = "pagewire-demo"
KV_TOKEN_BYTES = 2048  # 4 layers of 2 heads of 32 floats, keys and values
LONG_TEXT = "The with statement is used to wrap the execution of a block. " * 40


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with local_cluster("--prefill", "2", "--decode", "1", "--device", "cpu") as running:
        yield running


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def received_bytes(cluster: LocalCluster) -> float:
    """KV bytes that the decode worker has received, as the router's metrics say."""
    return sum(
        value
        for name, value in cluster.metrics().items()
        if name.startswith("pagewire_kv_transfer_bytes_total{")
        and 'direction="received"' in name
        and 'transport="zmq"' in name
        and 'worker="decode-0"' in name
    )


def test_the_printed_commands_show_an_answer_of_two_workers(cluster: LocalCluster) -> None:
    """The first one's prompt crosses; then its blocks are where the second one's answer is."""
    words = shlex.split(cluster.wait_for_line("pagewire chat "))
    chat = [sys.executable, "-P", "-m", "pagewire.services.cli.main", *words[1:]]
    done = subprocess.run(chat, capture_output=True, text=True, timeout=60, check=True)
    assert "with open(" in done.stdout
    [*_, anatomy] = done.stderr.splitlines()
    crossed = r"prefill-\d computed the prompt in [\d.]+ ms · ([\d.]+) kB of KV crossed by zmq"
    found = re.fullmatch(rf"{crossed} · decode-0 wrote the answer, [\d.]+ ms a token", anatomy)
    assert found is not None, done.stderr
    assert 15 * KV_TOKEN_BYTES <= 1000 * float(found[1]) <= 32 * KV_TOKEN_BYTES + 1000

    line = cluster.wait_for_line("curl ")
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60)
    answer = json.loads(done.stdout)
    [choice] = answer["choices"]
    assert choice["finish_reason"] == "stop"
    assert "with open(" in choice["message"]["content"]
    assert answer["timings"]["choices"][0]["decode"]["worker"] == "decode-0"


def test_a_second_cluster_needs_another_port_alone(cluster: LocalCluster) -> None:
    with local_cluster("--prefill", "0", "--device", "cpu") as second:
        for each, workers in ((cluster, 3), (second, 1)):
            assert len(each.health()["services"]) == workers
            body = {"model": MODEL, "prompt": "Lambda expressions", "max_tokens": 4}
            assert httpx.post(f"{each.url}/v1/completions", json=body, timeout=60).is_success
    assert len(cluster.health()["services"]) == 3
    assert " died" not in cluster.output


def test_a_taken_port_is_refused_with_who_has_it(cluster: LocalCluster) -> None:
    up = [sys.executable, "-P", "-m", "pagewire.services.cli.main", "up", "--port"]
    done = subprocess.run([*up, str(cluster.port)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert f"port {cluster.port}" in line
    assert f"a Pagewire that serves {MODEL}" in line
    assert "--port " in line


def test_the_ready_box_names_workers_and_measured_transport(cluster: LocalCluster) -> None:
    cluster.wait_for_line("Ctrl-C stops everything")
    assert "decode-0" in cluster.output
    links = re.findall(r"(prefill-\d) -> decode-0: (\w+)", cluster.output)
    assert set(links) == {("prefill-0", "zmq"), ("prefill-1", "zmq")}  # on a CPU


def test_openai_client_streams_a_chat_answer(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": LONG_TEXT + "What is a lambda?"}]
    whole = client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=96, temperature=0
    )
    stream = client.chat.completions.create(
        model=MODEL,
        messages=messages,
        max_tokens=96,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    text, usage = "", None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
    assert text == whole.choices[0].message.content
    assert usage is not None
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens == whole.usage.prompt_tokens


def test_a_streams_first_text_comes_while_the_answer_is_generated(
    cluster: LocalCluster, client: openai.OpenAI
) -> None:
    stream = client.completions.create(
        model=MODEL, prompt="def", max_tokens=1900, stream=True, extra_body={"ignore_eos": True}
    )
    with stream:
        assert next(chunk for chunk in stream if chunk.choices[0].text)
        assert cluster.total("vllm:num_requests_running") == 1
    cluster.wait_idle(workers=3)


def test_metrics_name_the_kv_bytes_that_crossed(
    cluster: LocalCluster, client: openai.OpenAI
) -> None:
    before = received_bytes(cluster)
    client.completions.create(model=MODEL, prompt="A new text. " + LONG_TEXT, max_tokens=2)
    assert received_bytes(cluster) > before


def test_the_second_time_a_long_prompt_is_cached(
    cluster: LocalCluster, client: openai.OpenAI
) -> None:
    def computed() -> dict[str, float]:
        return {
            name: value
            for name, value in cluster.metrics().items()
            if name.startswith("pagewire_prompt_tokens_computed_total")
        }

    prompt = "Twice the same long prompt. " + LONG_TEXT
    first = client.completions.create(model=MODEL, prompt=prompt, max_tokens=4, temperature=0)
    before = computed()
    second = client.completions.create(model=MODEL, prompt=prompt, max_tokens=4, temperature=0)
    assert first.usage is not None
    assert second.usage is not None
    assert first.choices[0].text == second.choices[0].text
    length = second.usage.prompt_tokens
    assert second.usage.prompt_tokens_details is not None
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached is not None
    assert length - 16 <= cached < length
    if before:  # the tail alone was computed, whoever did it
        assert sum(computed().values()) - sum(before.values()) <= 16


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"model": "no-such", "prompt": "x"}, 404, "model"),
        ({"model": MODEL, "prompt": [5] * 4096}, 400, "prompt"),
        ({"model": MODEL, "prompt": "x", "temperature": -1}, 400, "temperature"),
        ({"model": MODEL, "prompt": "x", "max_tokens": "ten"}, 400, "max_tokens"),
        ({"model": MODEL, "prompt": [99999]}, 400, "prompt"),
    ],
    ids=["unknown-model", "too-long", "negative", "not-a-number", "token-out-of-range"],
)
def test_bad_input_names_the_field(
    cluster: LocalCluster, body: dict[str, Any], status: int, param: str
) -> None:
    response = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=30)
    assert response.status_code == status
    error = response.json()["error"]
    assert error["param"] == param
    assert error["message"]


def test_the_gpu_benches_client_times_every_token(cluster: LocalCluster) -> None:
    async def ask() -> tuple[TimedAnswer, float]:
        client = Client([cluster.url], model="pagewire-demo", vocab=1000)
        try:
            answer = await client.complete(200, 24)
            _, transfers = await client.transfer_seconds()
        finally:
            await client.aclose()
        return answer, transfers

    answer, transfers = run_async(ask(), 60)
    assert len(answer.times) == 24
    assert answer.times == sorted(answer.times)
    assert len(answer.gaps) == 23
    assert transfers >= 1


def test_nothing_is_left_behind(cluster: LocalCluster) -> None:
    cluster.wait_idle(workers=3)
