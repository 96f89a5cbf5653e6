"""Log probabilities over the cluster: those of Hugging Face, from whichever worker they come."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat.chat_completion_token_logprob import ChatCompletionTokenLogprob

from pagewire.shared.model.demo import demo_model_path
from pagewire.shared.text.tokenizer import Tokenizer
from pagewire.tests.support.local_cluster import LocalCluster, SharedClusters
from pagewire.tests.support.logprob_truth import TOLERANCE, LogprobTruth
from pagewire.tests.support.sse import events_of

pytestmark = pytest.mark.timeout(240)

MODEL = "pagewire-demo"
TOKENIZER = Tokenizer.from_dir(demo_model_path())
TEXT = "The with statement is used to wrap the execution of a block. "
PROMPT = TOKENIZER.encode(TEXT * 6)  # longer than what a decode worker computes itself
LONG_PROMPT = TOKENIZER.encode(TEXT * 80)
SAMPLED = {"temperature": 0.9, "seed": 11, "ignore_eos": True}
Position = dict[int, float]

PREFILL_WORKERS = {"prefill-and-decode": 1, "aggregated": 0}


@pytest.fixture(scope="module", params=PREFILL_WORKERS.values(), ids=PREFILL_WORKERS)
def cluster(request: pytest.FixtureRequest, shared_clusters: SharedClusters) -> LocalCluster:
    return shared_clusters.get(prefill=request.param, decode=2)


@pytest.fixture(scope="module")
def truth() -> LogprobTruth:
    return LogprobTruth()


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def complete(cluster: LocalCluster, **body: Any) -> dict[str, Any]:
    asked = {"model": MODEL, "prompt": PROMPT, "return_token_ids": True, **SAMPLED, **body}
    response = httpx.post(f"{cluster.url}/v1/completions", json=asked, timeout=60)
    assert response.is_success, response.text
    answer: dict[str, Any] = response.json()
    return answer


def check_columns(
    truth: LogprobTruth, prompt: list[int], answer: list[int], logprobs: dict[str, Any]
) -> None:
    """Check a completion's `logprobs`, of the whole text or of its end."""
    token_ids = [*prompt, *answer]
    rows = truth.of(token_ids)
    first = len(token_ids) - len(logprobs["tokens"])
    columns = (logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"])
    for position, (token, logprob, top) in enumerate(zip(*columns, strict=True), start=first):
        assert token == TOKENIZER.token_bytes.name(token_ids[position])
        if position == 0:
            assert logprob is None and top is None
            continue
        row = rows[position - 1]
        assert abs(logprob - row[token_ids[position]].item()) <= TOLERANCE, position
        assert abs(max(top.values()) - row.max().item()) <= TOLERANCE, position
    assert len(logprobs["text_offset"]) == len(logprobs["tokens"])


def streamed(cluster: LocalCluster, on_event: Any = None, **body: Any) -> dict[str, Any]:
    """Stream one completion and join its chunks."""
    asked = {"model": MODEL, "prompt": PROMPT, "return_token_ids": True, **SAMPLED, **body}
    text, end, token_ids = "", None, []
    logprobs: dict[str, list[Any]] = {}
    url = f"{cluster.url}/v1/completions"
    with httpx.stream("POST", url, json={**asked, "stream": True}, timeout=60) as response:
        assert response.status_code == 200
        for count, event in enumerate(events_of(response.iter_bytes())):
            if on_event is not None:
                on_event(count)
            (choice,) = event["choices"]
            text, end = text + choice["text"], choice["finish_reason"]
            token_ids += choice.get("token_ids", [])
            for name, values in (choice["logprobs"] or {}).items():
                logprobs.setdefault(name, []).extend(values)
    return {"text": text, "finish_reason": end, "token_ids": token_ids, "logprobs": logprobs}


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Two answers, whose steps may have had other company."""
    for name in ("text", "finish_reason", "token_ids"):
        assert one.get(name, []) == other.get(name, []), name
    left, right = one["logprobs"], other["logprobs"]
    for name in ("tokens", "text_offset"):
        assert left[name] == right[name]
    near = pytest.approx(left["token_logprobs"][1:], abs=TOLERANCE)
    assert right["token_logprobs"][1:] == near


def as_positions(content: list[ChatCompletionTokenLogprob] | None) -> list[Any]:
    assert content is not None
    return [
        (each.token, each.logprob, [(top.token, top.logprob) for top in each.top_logprobs])
        for each in content
    ]


def test_openais_client_reads_a_chats_log_probabilities(
    client: openai.OpenAI, truth: LogprobTruth
) -> None:
    question = "What is a lambda expression? " * 8
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 24,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 3,
    }
    extra = {"return_token_ids": True}
    answer = client.chat.completions.create(**asked, extra_body=extra).choices[0]
    assert answer.logprobs is not None and answer.message.content is not None
    found = as_positions(answer.logprobs.content)
    token_ids = answer.model_extra["token_ids"] if answer.model_extra else []
    assert len(found) == len(token_ids)
    prompt = TOKENIZER.encode_chat([{"role": "user", "content": question}])
    rows = truth.of([*prompt, *token_ids])[len(prompt) - 1 :]
    for token_id, (token, logprob, top), row in zip(token_ids, found, rows, strict=False):
        assert token == TOKENIZER.token_bytes.text(token_id)
        assert abs(logprob - row[token_id].item()) <= TOLERANCE
        assert len(top) == 3 and top[0] == (token, logprob)  # greedy
        best = row.topk(3).values.tolist()
        assert [each for _, each in top] == pytest.approx(best, abs=TOLERANCE)
    joined = b"".join(bytes(each.bytes or []) for each in answer.logprobs.content or [])
    assert joined.decode().removesuffix("<|end|>") == answer.message.content

    parts: list[ChatCompletionTokenLogprob] = []
    for chunk in client.chat.completions.create(**asked, stream=True):
        if chunk.choices[0].logprobs is not None:
            parts += chunk.choices[0].logprobs.content or []
    for (token, logprob, top), (other, value, others) in zip(
        found, as_positions(parts), strict=True
    ):
        assert (token, [each for each, _ in top]) == (other, [each for each, _ in others])
        assert value == pytest.approx(logprob, abs=TOLERANCE)


def test_answers_of_a_completion(cluster: LocalCluster, truth: LogprobTruth) -> None:
    choice = complete(cluster, max_tokens=30, logprobs=4)["choices"][0]
    assert len(choice["logprobs"]["tokens"]) == len(choice["token_ids"]) == 30
    check_columns(truth, PROMPT, choice["token_ids"], choice["logprobs"])
    assert choice["logprobs"]["text_offset"][0] == 0
    assert_same(choice, streamed(cluster, max_tokens=30, logprobs=4))


@pytest.mark.parametrize(
    "prompt", [PROMPT[:9], PROMPT, LONG_PROMPT], ids=["short", "middle", "long"]
)
def test_an_echo_without_an_answer(
    cluster: LocalCluster, truth: LogprobTruth, prompt: list[int]
) -> None:
    """Scores a text, as lm-eval does."""
    asked = {"prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 1}
    for _ in range(2):  # the second time it is cached
        answer = complete(cluster, **asked)
        choice = answer["choices"][0]
        assert len(choice["logprobs"]["tokens"]) == len(prompt)
        assert choice["text"] == TOKENIZER.decode(prompt)
        assert choice["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 0
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        check_columns(truth, prompt, [], choice["logprobs"])
    assert_same(choice, streamed(cluster, **asked))


def test_an_echo_with_an_answer_has_both(cluster: LocalCluster, truth: LogprobTruth) -> None:
    asked = {"max_tokens": 5, "echo": True, "logprobs": 2}
    choice = complete(cluster, **asked)["choices"][0]
    check_columns(truth, PROMPT, choice["token_ids"], choice["logprobs"])
    offset = choice["logprobs"]["text_offset"][len(PROMPT)]
    assert choice["text"][:offset] == TOKENIZER.decode(PROMPT)
    assert_same(choice, streamed(cluster, **asked))


@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_prompt_log_probabilities(cluster: LocalCluster, truth: LogprobTruth, kind: str) -> None:
    if kind == "completion":
        prompt = LONG_PROMPT
        found = complete(cluster, prompt=prompt, max_tokens=3, prompt_logprobs=2)
        listed = found["choices"][0]["prompt_logprobs"]
    else:
        messages = [{"role": "user", "content": TEXT * 3}]
        prompt = TOKENIZER.encode_chat(messages)
        body = {"model": MODEL, "messages": messages, "max_tokens": 3, "prompt_logprobs": 2}
        url = f"{cluster.url}/v1/chat/completions"
        listed = httpx.post(url, json=body, timeout=60).json()["prompt_logprobs"]
    assert len(listed) == len(prompt)
    found_values = [
        by_id and {int(token): entry["logprob"] for token, entry in by_id.items()}
        for by_id in listed
    ]
    truth.check(prompt, [], found_values, 2)
    entry = listed[1][str(prompt[1])]
    assert entry["decoded_token"] == TOKENIZER.token_bytes.text(prompt[1])
    assert entry["rank"] >= 1


def test_several_prompts_and_answers_each_have_their_own(
    cluster: LocalCluster, truth: LogprobTruth
) -> None:
    prompts = [PROMPT, PROMPT[:20]]
    answer = complete(cluster, prompt=prompts, n=2, max_tokens=6, logprobs=1, echo=True)
    assert len(answer["choices"]) == 4
    for choice in answer["choices"]:
        prompt = prompts[choice["index"] // 2]
        check_columns(truth, prompt, choice["token_ids"], choice["logprobs"])


def test_an_answer_whose_worker_dies_goes_on_with_its_log_probabilities(
    cluster: LocalCluster, truth: LogprobTruth
) -> None:
    def kill_the_busy(count: int) -> None:
        if count == 30:
            used = {name: blocks for name, blocks in cluster.used_blocks().items() if blocks}
            [busy] = [name for name in used if name.startswith("decode-")]
            os.kill(cluster.worker_pid(busy), signal.SIGKILL)

    before = cluster.total("pagewire_request_migrations_total")
    asked = {"max_tokens": 400, "logprobs": 2, "echo": True}
    moved = streamed(cluster, kill_the_busy, **asked)
    assert cluster.total("pagewire_request_migrations_total") - before == 1
    assert len(moved["token_ids"]) == 400
    assert len(moved["logprobs"]["tokens"]) == len(PROMPT) + 400
    check_columns(truth, PROMPT, moved["token_ids"], moved["logprobs"])
    assert_same(complete(cluster, **asked)["choices"][0], moved)
