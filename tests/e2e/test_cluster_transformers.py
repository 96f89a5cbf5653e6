"""A cluster with prefill and decode apart serves a decoder by transformers' code."""

from __future__ import annotations

import shutil
from pathlib import Path

import httpx
import pytest
import torch

from pagewire.shared.model.demo import demo_model_path
from pagewire.shared.text.tokenizer import Tokenizer
from pagewire.tests.support.local_cluster import ONE_ROUTER, local_cluster
from pagewire.tests.support.tiny_transformers import write_tiny

pytestmark = pytest.mark.timeout(240)

TOKENS = 20
PROMPT = [(n * 37) % 900 + 10 for n in range(75)]  # longer than what a decode worker computes


@pytest.mark.parametrize("architecture", ["StableLmForCausalLM", "Cohere2ForCausalLM"])
def test_tokens_are_hugging_faces_over_both_workers(tmp_path: Path, architecture: str) -> None:
    """Some layers of the second have a sliding window, shorter than the prompt."""
    path, demo = tmp_path / "tiny", demo_model_path()
    vocab_size = Tokenizer.from_dir(demo).vocab_size
    theirs = write_tiny(path, architecture, vocab_size=vocab_size)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo / name, path / name)
    expected = list(PROMPT)
    with torch.inference_mode():
        for _ in range(TOKENS):
            best = theirs(torch.tensor([expected]), use_cache=False).logits[0, -1].topk(2)
            assert best.values[0] - best.values[1] > 1e-3  # each is chosen clearly
            expected.append(int(best.indices[0]))
    options = ("--prefill", "1", "--decode", "1", "--device", "cpu", "--dtype", "float32")
    options += ("--model-impl", "transformers", *ONE_ROUTER)
    with local_cluster("--model", str(path), *options) as cluster:
        asked = {"model": "tiny", "prompt": PROMPT, "temperature": 0, "max_tokens": TOKENS}
        asked |= {"ignore_eos": True, "return_token_ids": True}
        response = httpx.post(f"{cluster.url}/v1/completions", json=asked, timeout=60)
        assert response.is_success, response.text
        assert response.json()["choices"][0]["token_ids"] == expected[len(PROMPT) :]
        assert cluster.total("pagewire_kv_transfer_segments_total") > 0
