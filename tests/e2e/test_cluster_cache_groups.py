"""Clusters of each kind of cache group, and of quantised models: Hugging Face's tokens, over each
transport, whatever happens meanwhile."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from pagewire.shared.model.demo import demo_model_path
from pagewire.shared.text.tokenizer import Tokenizer
from pagewire.tests.support.aio import run_async
from pagewire.tests.support.fp8_checkpoints import Layout, write_fp8
from pagewire.tests.support.hf_greedy import is_greedy
from pagewire.tests.support.int4_checkpoints import Int4Layout, write_int4
from pagewire.tests.support.local_cluster import (
    ONE_ROUTER,
    LocalCluster,
    complete_all,
    local_cluster,
)
from pagewire.tests.support.rounded_caches import rounded_caches
from pagewire.tests.support.sse import arriving_events
from pagewire.tests.support.tiny_models import write_tiny_model

pytestmark = pytest.mark.timeout(240)

ANSWER, TIMEOUT_S = 60, 100.0
IN_FP8 = "some windows in fp8"
WEIGHTS_IN_INT4, ALL_IN_FP8 = "weights in int4", "weights and some windows in fp8"
WORKERS = 3
# Device and transport.
TRANSPORTS = {
    "zmq": ("cpu", "zmq"),
    "ucx": ("cpu", "ucx"),
    "cuda-ipc": ("cuda", "ipc"),
    "cuda-ucx": ("cuda", "ucx"),
    "cuda-zmq": ("cuda", "zmq"),
}
# Some are shorter than the window, and some than what a decode worker computes by itself.
PROMPTS = [[(n * 37 + index) % 900 + 10 for n in range(5 + 12 * index)] for index in range(12)]
LAYERS = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
# Layers that attend to everything; a window in some layers, which makes several cache groups; one
# in all of them; latents. The number is of blocks: pools that do not hold all answers at once.
SHAPES: dict[str, tuple[str, str, dict[str, Any], int]] = {
    "no windows": ("llama", "groups-of-4-tied-odd-vocabulary", {"head_dim": 24}, 20),
    "some windows": (
        "qwen3",
        "windows-by-layer",
        {"num_hidden_layers": 4, "layer_types": LAYERS, "sliding_window": 21},
        40,
    ),
    "all windows": ("mistral", "window-groups-of-2", {"sliding_window": 24, "head_dim": 24}, 14),
    "latents": ("deepseekv2", "lite-yarn", {}, 20),
}
SHAPES[IN_FP8] = SHAPES[ALL_IN_FP8] = SHAPES["some windows"]
SHAPES[WEIGHTS_IN_INT4] = SHAPES["no windows"]
# Formats of weights, and the models whose KV cache is in FP8.
LAYOUTS: dict[str, Layout | Int4Layout] = {
    ALL_IN_FP8: Layout("fp8", (32, 32)),
    WEIGHTS_IN_INT4: Int4Layout("awq", 8),
}
KV_IN_FP8 = {IN_FP8, ALL_IN_FP8}


# A transport moves bytes, whatever they are: on a CPU, UCX moves those of one group and of several.
EXHAUSTIVE = {
    ("no windows", "ucx"), ("all windows", "ucx"), (IN_FP8, "zmq"), (IN_FP8, "ucx"),
    (WEIGHTS_IN_INT4, "ucx"), (ALL_IN_FP8, "ucx"),
}  # fmt: skip


def cases() -> Iterator[Any]:
    """Make a case of each shape over each transport."""
    for shape, transport in itertools.product(SHAPES, TRANSPORTS):
        marks = [pytest.mark.gpu] if TRANSPORTS[transport][0] == "cuda" else []
        marks += [pytest.mark.exhaustive] if (shape, transport) in EXHAUSTIVE else []
        yield pytest.param(shape, transport, id=f"{shape}-{transport}", marks=marks)


EACH_CASE = pytest.mark.parametrize(
    ("tried", "transport"), list(cases()), indirect=True, scope="module"
)


@dataclass(frozen=True)
class Tried:
    """A model that is served.

    Attributes:
        few_blocks: of each pool, which do not hold all answers at once.
        kv_dtype: of the KV cache.
        theirs: the model as Hugging Face has it.
        answers: to all prompts; filled by the first `check`.
    """

    path: Path
    few_blocks: int
    kv_dtype: str
    theirs: Any = field(repr=False)
    answers: list[list[int]] = field(default_factory=list)

    def check(self, answers: list[list[int]]) -> None:
        """Check that all prompts have Hugging Face's greedy answers."""
        if not self.answers:
            assert [len(answer) for answer in answers] == [ANSWER] * len(PROMPTS)
            with rounded_caches(self.theirs) if self.kv_dtype == "fp8" else nullcontext():
                assert all(map(partial(is_greedy, self.theirs), PROMPTS, answers))
            self.answers.extend(answers)
        assert answers == self.answers


@pytest.fixture(scope="module")
def tried(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tried:
    family, shape, changes, few_blocks = SHAPES[request.param]
    folder, demo = tmp_path_factory.mktemp("models"), demo_model_path()
    path, meant, layout = folder / "tiny", folder / "meant", LAYOUTS.get(request.param)
    plain = path if layout is None else folder / "plain"
    vocab_size = Tokenizer.from_dir(demo).vocab_size
    theirs = write_tiny_model(plain, family, shape, vocab_size=vocab_size, **changes)
    if isinstance(layout, Layout):
        write_fp8(plain, path, meant, layout)
    elif layout is not None:
        write_int4(plain, path, meant, layout)
    if layout is not None:
        theirs = type(theirs).from_pretrained(meant, dtype=torch.float32).eval()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo / name, path / name)
    theirs.set_attn_implementation("eager")
    return Tried(path, few_blocks, "fp8" if request.param in KV_IN_FP8 else "auto", theirs)


@pytest.fixture(scope="module")
def transport(request: pytest.FixtureRequest) -> tuple[str, str]:
    return TRANSPORTS[request.param]


@pytest.fixture(scope="module")
def cluster(tried: Tried, transport: tuple[str, str]) -> Iterator[LocalCluster]:
    device, transport = transport
    options = ("--model", str(tried.path), "--device", device, "--dtype", "float32")
    options += (
        "--kv-cache-dtype",
        tried.kv_dtype,
        "--prefill",
        "1",
        "--decode",
        "2",
        "--kv-transport",
        transport,
    )
    options += ("--num-blocks", str(tried.few_blocks), "--max-num-batched-tokens", "32")
    with local_cluster(*options, *ONE_ROUTER, "--max-model-len", "208") as running:
        yield running


def body_of(prompt: list[int], max_tokens: int = ANSWER) -> dict[str, Any]:
    asked = {"model": "tiny", "prompt": prompt, "temperature": 0, "max_tokens": max_tokens}
    return {**asked, "ignore_eos": True, "return_token_ids": True}


def ask(cluster: LocalCluster, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return run_async(complete_all(cluster.url, bodies, len(bodies)), TIMEOUT_S)


def answers(cluster: LocalCluster, prompts: list[list[int]], count: int) -> list[list[int]]:
    found = ask(cluster, [body_of(prompt, count) for prompt in prompts])
    return [body["choices"][0]["token_ids"] for body in found]


def sent_over(cluster: LocalCluster) -> set[str]:
    """Return by which transports KV was sent."""
    pattern = r'pagewire_kv_transfer_bytes_total\{.*transport="(\w+)"'
    found = [(re.match(pattern, name), value) for name, value in cluster.metrics().items()]
    return {match[1] for match, value in found if match is not None and value}


def is_continued_from_cache(cluster: LocalCluster, answer: list[int], number: int) -> bool:
    """Whether a prompt that goes on where an answer has ended finds the answer's blocks.

    It may go to the other decode worker, if the router does not know yet which one has them, or
    that it is idle again. So later attempts wait longer.
    """
    prompt, more = PROMPTS[6], {"cache_salt": f"salt-{number}"}
    [first] = ask(cluster, [body_of(prompt, 40) | more])
    assert first["choices"][0]["token_ids"] == answer[:40]
    time.sleep(number / 4)
    begun = body_of(prompt + answer[:40], ANSWER - 40)
    [body] = ask(cluster, [begun | more])
    assert body["choices"][0]["token_ids"] == answer[40:]
    cached: int = body["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached > len(prompt)


@EACH_CASE
def test_chunked_preempted_cached_and_continued(
    tried: Tried, cluster: LocalCluster, transport: tuple[str, str]
) -> None:
    for _ in range(4):  # on a busy machine, the first prompts may be answered before the last
        tried.check(answers(cluster, PROMPTS, ANSWER))
        if cluster.total("pagewire_preemptions_total") > 0:
            break
    else:
        pytest.fail("no sequence was preempted")
    begun = [p + tokens[:40] for p, tokens in zip(PROMPTS, tried.answers, strict=True)]
    rests = [tokens[40:] for tokens in tried.answers]
    assert answers(cluster, begun[::3], ANSWER - 40) == rests[::3]
    hits = cluster.total("pagewire_prefix_cache_hits_total")
    for _ in range(2):  # alone, so that nothing evicts its blocks
        assert answers(cluster, PROMPTS[-1:], ANSWER) == tried.answers[-1:]
    assert cluster.total("pagewire_prefix_cache_hits_total") >= hits + len(PROMPTS[-1]) // 2
    assert any(is_continued_from_cache(cluster, tried.answers[6], number) for number in range(12))
    assert sent_over(cluster) == {transport[1]}
    cluster.wait_idle(WORKERS)


class Enough:
    """Says when all answers together have a number of tokens."""

    def __init__(self, tokens: int) -> None:
        self._missing = tokens
        self.reached = asyncio.Event()

    def add(self, tokens: int) -> None:
        self._missing -= tokens
        if self._missing <= 0:
            self.reached.set()


async def stream(url: str, http: httpx.AsyncClient, prompt: list[int], enough: Enough) -> list[int]:
    tokens: list[int] = []
    body = {**body_of(prompt), "stream": True}
    async with http.stream("POST", f"{url}/v1/completions", json=body) as response:
        assert response.is_success, await response.aread()
        async for event in arriving_events(response):
            assert "error" not in event, event
            new = event["choices"][0].get("token_ids", []) if event["choices"] else []
            tokens += new
            enough.add(len(new))
    return tokens


async def stream_all_and_kill(cluster: LocalCluster) -> list[list[int]]:
    enough, pid = Enough(len(PROMPTS) * ANSWER // 6), cluster.worker_pid("decode-0")
    async with httpx.AsyncClient(timeout=TIMEOUT_S) as http, asyncio.TaskGroup() as group:
        tasks = [group.create_task(stream(cluster.url, http, p, enough)) for p in PROMPTS]
        await asyncio.wait_for(enough.reached.wait(), TIMEOUT_S)
        os.kill(pid, signal.SIGKILL)
    return [task.result() for task in tasks]


@EACH_CASE
def test_answers_migrate_when_their_decode_worker_is_killed(
    tried: Tried, cluster: LocalCluster
) -> None:
    for _ in range(4):  # on a busy machine, the worker may have sent all before it is killed
        cluster.wait_idle(WORKERS, timeout=60)
        tried.check(run_async(stream_all_and_kill(cluster), TIMEOUT_S))
        if cluster.total("pagewire_request_migrations_total") > 0:
            break
    else:
        pytest.fail("no answer went on at another worker")
