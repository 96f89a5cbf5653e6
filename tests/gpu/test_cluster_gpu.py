"""The whole cluster on CUDA devices: the CPU's tokens, KV blocks over UCX and cuda_ipc."""

from __future__ import annotations

import pytest

from pagewire import LLM, SamplingParams
from pagewire.shared.model.demo.prompts import standard_prompts
from pagewire.tests.support.aio import run_async
from pagewire.tests.support.local_cluster import complete_all, local_cluster

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

MAX_TOKENS = 64


def test_cluster_tokens_equal_the_cpus_over_cuda_ipc() -> None:
    cpu = LLM("demo", device="cpu")
    assert cpu.tokenizer is not None
    prompts = standard_prompts(cpu.tokenizer)
    greedy = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    truth = [output.token_ids for output in cpu.generate(prompts, greedy)]
    bodies = [
        {
            "model": "pagewire-demo",
            "prompt": prompt,
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        for prompt in prompts
    ]
    options = ("--prefill", "1", "--decode", "1", "--device", "cuda", "--kv-transport", "ucx")
    with local_cluster(*options, "--num-blocks", "4096") as cluster:
        print(cluster.output)
        answers = run_async(complete_all(cluster.url, bodies, 16), 120)
        got = [answer["choices"][0]["token_ids"] for answer in answers]
        different = [i for i, (a, b) in enumerate(zip(got, truth, strict=True)) if a != b]
        assert not different
        cluster.wait_idle(workers=2)
        (way,) = [way for service in cluster.health()["services"] for way in service["links"]]
        assert way["transport"] == "ucx"
        assert way["lane"] == "cuda_ipc"
        received = [
            value
            for name, value in cluster.metrics().items()
            if name.startswith("pagewire_kv_transfer_bytes_total{")
            and 'direction="received"' in name
        ]
        assert sum(received) > 10_000 * 2048
