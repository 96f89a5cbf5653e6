"""A cluster with prefill and decode apart serves a model of a family other than the demo's.

`test_cluster_cache_groups.py` has families with windows, and DeepSeek-V2's latents.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from pagewire.shared.model.config import load_config
from pagewire.shared.model.demo import demo_model_path
from pagewire.shared.text.tokenizer import Tokenizer
from pagewire.tests.support.fp8_checkpoints import Layout, write_fp8
from pagewire.tests.support.hf_greedy import greedy
from pagewire.tests.support.local_cluster import ONE_ROUTER, LocalCluster, local_cluster
from pagewire.tests.support.tiny_models import write_tiny_model

pytestmark = pytest.mark.timeout(240)

TOKENS = 40
PROMPT = [(n * 37) % 900 + 10 for n in range(75)]  # longer than what a decode worker computes
QUESTION = [{"role": "user", "content": "What is a lambda, and what is it good for? " * 3}]
# As Qwen's templates do: thinking of earlier turns is left out.
TEMPLATE = """{% for m in messages %}<|{{ m.role }}|>
{%- set parts = m.content.split('</think>') %}{{ parts[-1].lstrip('\\n') }}{{ eos_token }}
{%- endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""


@dataclass(frozen=True)
class Served:
    """A running cluster, and the model that it serves as Hugging Face has it."""

    cluster: LocalCluster
    theirs: Any
    tokenizer: Tokenizer
    ends: tuple[int, ...]

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        asked = {"model": "tiny", "temperature": 0, "max_tokens": TOKENS, **body}
        response = httpx.post(f"{self.cluster.url}/v1/{path}", json=asked, timeout=60)
        assert response.is_success, response.text
        answer: dict[str, Any] = response.json()
        return answer


@contextmanager
def serving(
    path: Path, family: str, shape: str, layout: Layout | None = None, **changes: Any
) -> Iterator[Served]:
    """Serve a tiny model, perhaps in FP8, that ends its answers with a token of its own."""
    demo = demo_model_path()
    tokenizer = Tokenizer.from_dir(demo)
    theirs = write_tiny_model(path, family, shape, vocab_size=tokenizer.vocab_size, **changes)
    if layout is not None:
        write_fp8(path, path / "stored", path / "meant", layout)
        theirs = type(theirs).from_pretrained(path / "meant", dtype=torch.float32).eval()
        path /= "stored"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo / name, path / name)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    eos = greedy(theirs, PROMPT, 10)[9]
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, eos]}))
    options = ("--prefill", "1", "--decode", "1", "--device", "cpu", "--dtype", "float32")
    names = ("--served-model-name", "tiny")
    with local_cluster("--model", str(path), *names, *ONE_ROUTER, *options) as cluster:
        yield Served(cluster, theirs, tokenizer, load_config(path).eos_token_ids)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    path = tmp_path_factory.mktemp("models") / "tiny"
    with serving(path, "qwen3", "groups-of-2-odd-vocabulary") as running:
        yield running


@pytest.mark.parametrize(
    ("family", "shape", "changes"),
    [
        ("qwen3moe", "groups-of-2-odd-vocabulary", {"layout": Layout("fp8", (32, 32))}),
        ("deepseekv3", "biases-halves-rotated", {}),
        ("phi3", "longrope", {"original_max_position_embeddings": 32}),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value,
)
def test_experts_latents_and_factors(
    tmp_path: Path, family: str, shape: str, changes: dict[str, Any]
) -> None:
    with serving(tmp_path / "tiny", family, shape, **changes) as served:
        expected = greedy(served.theirs, PROMPT, TOKENS)
        body = {"ignore_eos": True, "return_token_ids": True}
        begin, rest = expected[:30], expected[30:]
        for prompt, tokens in ((PROMPT, begin), (PROMPT + begin, rest)):
            answer = served.post("completions", prompt=prompt, max_tokens=len(tokens), **body)
            assert answer["choices"][0]["token_ids"] == tokens
        # The second prompt goes on where the first answer has ended.
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 96
        assert served.cluster.total("pagewire_kv_transfer_segments_total") > 0


def test_tokens_are_hugging_faces_over_both_workers(served: Served) -> None:
    body = {"prompt": PROMPT, "ignore_eos": True, "return_token_ids": True}
    answer = served.post("completions", **body)
    assert answer["choices"][0]["token_ids"] == greedy(served.theirs, PROMPT, TOKENS)
    assert served.cluster.total("pagewire_kv_transfer_segments_total") > 0


def test_an_end_token_that_any_file_names_ends_the_answer(served: Served) -> None:
    assert {0, 1, 2} < set(served.ends)  # and the one of generation_config.json
    expected = greedy(served.theirs, PROMPT, TOKENS)
    end = next(index for index, token in enumerate(expected) if token in served.ends)
    choice = served.post("completions", prompt=PROMPT, return_token_ids=True)["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["token_ids"] == expected[: end + 1]


def test_chat_goes_through_the_models_own_template(served: Served) -> None:
    text = f"<|user|>{QUESTION[0]['content']}<|eos|><|assistant|>"
    prompt = served.tokenizer.encode(text, add_special_tokens=False)
    answer = served.post("chat/completions", messages=QUESTION, ignore_eos=True)
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    expected = served.tokenizer.decode(greedy(served.theirs, prompt, TOKENS))
    assert answer["choices"][0]["message"]["content"] == expected
