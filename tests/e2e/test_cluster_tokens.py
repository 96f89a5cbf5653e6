"""The tokens of the whole cluster are those of one process, and those of Hugging Face."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from pagewire import LLM, SamplingParams
from pagewire.shared.model.demo import demo_model_path
from pagewire.tests.support.aio import run_async
from pagewire.tests.support.hf_greedy import is_greedy
from pagewire.tests.support.local_cluster import LocalCluster, complete_all, local_cluster
from pagewire.tests.support.shaped_requests import shaped_fields
from pagewire.tools.demo_model.prompts import standard_prompts

pytestmark = pytest.mark.timeout(300)

MAX_TOKENS = 64
IN_FLIGHT = 12
# 1564 tokens, the longest sequence here, need 98 blocks: pools in which few fit at once.
SMALL_POOLS = ("--num-blocks", "160", "--max-num-batched-tokens", "100", "--max-model-len", "2048")

# For what does not depend on how KV crosses.
ONE_TRANSPORT = pytest.mark.parametrize("cluster", ["zmq"], indirect=True)


@pytest.fixture(scope="module", params=["ucx", "zmq"])
def cluster(request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    """Two prefill and two decode workers over each transport."""
    options = ("--prefill", "2", "--decode", "2", "--device", "cpu", *SMALL_POOLS)
    with local_cluster(*options, "--kv-transport", request.param) as running:
        running.transport = request.param  # type: ignore[attr-defined] # for the tests' metrics
        yield running


@pytest.fixture(scope="module")
def llm() -> LLM:
    """One process, with room for everything."""
    return LLM("demo", device="cpu")


@pytest.fixture(scope="module")
def prompts(llm: LLM) -> list[list[int]]:
    assert llm.tokenizer is not None
    return standard_prompts(llm.tokenizer)


@pytest.fixture(scope="module")
def truth(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy tokens of one process, which Hugging Face's own implementation chooses, too."""
    greedy = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    tokens = [output.token_ids for output in llm.generate(prompts, greedy)]
    model = AutoModelForCausalLM.from_pretrained(demo_model_path(), dtype=torch.float32).eval()
    assert all(map(partial(is_greedy, model), prompts, tokens))
    return tokens


def _body(prompt: list[int], **fields: Any) -> dict[str, Any]:
    return {
        "model": "pagewire-demo",
        "prompt": prompt,
        "max_tokens": MAX_TOKENS,
        "ignore_eos": True,
        "return_token_ids": True,
        **fields,
    }


def _tokens(answers: list[dict[str, Any]]) -> list[list[int]]:
    return [answer["choices"][0]["token_ids"] for answer in answers]


def _assert_equal(got: list[list[int]], want: list[list[int]]) -> None:
    different = [i for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b]
    assert not different, f"prompts {different} differ"


def test_greedy_tokens_equal_hugging_face_and_one_process(
    cluster: LocalCluster, prompts: list[list[int]], truth: list[list[int]]
) -> None:
    bodies = [_body(prompt, temperature=0) for prompt in prompts]
    _assert_equal(_tokens(run_async(complete_all(cluster.url, bodies, IN_FLIGHT), 240)), truth)
    cluster.wait_idle(workers=4)
    transport = cluster.transport  # type: ignore[attr-defined] # set by the fixture
    received = [
        value
        for name, value in cluster.metrics().items()
        if name.startswith("pagewire_kv_transfer_bytes_total{")
        and 'direction="received"' in name
        and f'transport="{transport}"' in name
    ]
    # At least the KV of the long prompts, 2 KiB a token, crossed over this transport.
    assert sum(received) > 10_000 * 2048


@ONE_TRANSPORT
def test_seeded_tokens_equal_one_process_alone_and_in_a_batch(
    cluster: LocalCluster, llm: LLM, prompts: list[list[int]]
) -> None:
    chosen = prompts[::4]
    sampling = SamplingParams(temperature=0.8, seed=1234, max_tokens=MAX_TOKENS, ignore_eos=True)
    together = [output.token_ids for output in llm.generate(chosen, sampling)]
    alone = [llm.generate([prompt], sampling)[0].token_ids for prompt in chosen]
    _assert_equal(together, alone)
    bodies = [_body(prompt, temperature=0.8, seed=1234) for prompt in chosen]
    _assert_equal(_tokens(run_async(complete_all(cluster.url, bodies, 16), 240)), alone)
    one_by_one = run_async(complete_all(cluster.url, bodies[:4], 1), 240)
    _assert_equal(_tokens(one_by_one), alone[:4])


@ONE_TRANSPORT
def test_shaped_tokens_equal_one_process(
    cluster: LocalCluster, llm: LLM, prompts: list[list[int]]
) -> None:
    """With penalties, biases, bad words and more, whoever samples the first token."""
    chosen = prompts[::3]
    fields = [shaped_fields(index) for index in range(len(chosen))]
    params = [SamplingParams(**each, max_tokens=MAX_TOKENS, ignore_eos=True) for each in fields]
    expected = [output.token_ids for output in llm.generate(chosen, params)]
    bodies = [_body(prompt, **each) for prompt, each in zip(chosen, fields, strict=True)]
    _assert_equal(_tokens(run_async(complete_all(cluster.url, bodies, IN_FLIGHT), 240)), expected)
    cluster.wait_idle(workers=4)
