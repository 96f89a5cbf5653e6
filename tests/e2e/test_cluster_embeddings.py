"""Embeddings of a whole cluster, by OpenAI's client, against sentence-transformers' computation."""

from __future__ import annotations

import asyncio
import base64
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from pagewire.shared.text.tokenizer import Tokenizer
from pagewire.tests.support.aio import eventually, run_async
from pagewire.tests.support.embedding_models import embeddings_by_hugging_face, model_with
from pagewire.tests.support.local_cluster import ONE_ROUTER, LocalCluster, local_cluster

pytestmark = pytest.mark.timeout(200)

TEXT = "The with statement is used to wrap the execution of a block. "
TEXTS = [
    "class",
    TEXT,
    TEXT * 12,
    "The café by the river — 東京 🌍",
    *(f"def f{i}():" for i in range(40)),
]
OPTIONS = ("--device", "cpu", "--dtype", "float32", "--max-num-batched-tokens", "64", *ONE_ROUTER)
SHAPES = {
    "disaggregated": ("--prefill", "1", "--decode", "1"),
    "aggregated": ("--prefill", "0", "--decode", "1"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose embeddings are means of length 1, and may be cut to two sizes."""
    folder = tmp_path_factory.mktemp("models") / "embedder"
    return model_with(folder, "mean", "Normalize", newer=True, matryoshka_dimensions=[16, 64])


@pytest.fixture(scope="module", params=list(SHAPES))
def cluster(request: pytest.FixtureRequest, model: Path) -> Iterator[LocalCluster]:
    shape = SHAPES[request.param]
    with local_cluster(*shape, "--model", str(model), *OPTIONS) as running:
        running.workers = sum(map(int, shape[1::2]))  # type: ignore[attr-defined] # for the tests
        yield running


@pytest.fixture(scope="module")
def truth(model: Path) -> np.ndarray[Any, np.dtype[np.float32]]:
    ids = [Tokenizer.from_dir(model).encode(text) for text in TEXTS]
    return np.array(embeddings_by_hugging_face(ids, "mean", normalize=True))


def close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(np.array(found), expected, rtol=2e-4, atol=2e-5)


def client_of(cluster: LocalCluster, retries: int = 0) -> openai.OpenAI:
    url = f"{cluster.url}/v1"
    return openai.OpenAI(base_url=url, api_key="none", max_retries=retries, timeout=60)


@pytest.mark.parametrize("form", ["float", "base64", None])
def test_openais_client_gets_sentence_transformers_embeddings(
    cluster: LocalCluster, truth: Any, form: Any
) -> None:
    with client_of(cluster) as client:
        fields = {} if form is None else {"encoding_format": form}
        answer = client.embeddings.create(model="embedder", input=TEXTS, **fields)
        assert [item.index for item in answer.data] == list(range(len(TEXTS)))
        found: list[Any] = [item.embedding for item in answer.data]
        if form == "base64":
            found = [np.frombuffer(base64.b64decode(each), "<f4") for each in found]
        close(found, truth)
        assert answer.model == "embedder"
        assert answer.usage.prompt_tokens == answer.usage.total_tokens > 300
        short = client.embeddings.create(model="embedder", input=TEXTS[:4], dimensions=16)
        cut = truth[:4, :16]
        cut = cut / np.linalg.norm(cut, axis=1, keepdims=True)
        close([item.embedding for item in short.data], cut)
        with pytest.raises(openai.BadRequestError, match="dimensions must be one of 16, 64, 192"):
            client.embeddings.create(model="embedder", input="a", dimensions=17)
    cluster.wait_idle(workers=cluster.workers)  # type: ignore[attr-defined]


def test_a_client_that_leaves_frees_all_blocks(cluster: LocalCluster) -> None:
    async def leave() -> None:
        async with httpx.AsyncClient(timeout=60) as http:
            body = {"model": "embedder", "input": [TEXT * 40] * 300}
            visit = asyncio.create_task(http.post(f"{cluster.url}/v1/embeddings", json=body))
            await eventually(lambda: any(cluster.used_blocks().values()), timeout=20)
            visit.cancel()
            await asyncio.wait([visit])

    run_async(leave(), 60)
    cluster.wait_idle(workers=cluster.workers)  # type: ignore[attr-defined]


@pytest.mark.parametrize("cluster", list(SHAPES)[:1], indirect=True)
def test_a_prefill_worker_is_killed_in_the_middle(cluster: LocalCluster, truth: Any) -> None:
    embeddings, tokens = "pagewire_embeddings_total", "pagewire_prompt_tokens_computed_total"
    before = {name: cluster.total(name) for name in (embeddings, tokens)}

    async def disturbed() -> list[httpx.Response]:
        async with httpx.AsyncClient(timeout=100) as http:
            body = {"model": "embedder", "input": TEXTS * 8}
            url = f"{cluster.url}/v1/embeddings"
            visits = [asyncio.create_task(http.post(url, json=body)) for _ in range(2)]
            await eventually(lambda: cluster.total(tokens) > before[tokens] + 2000, timeout=60)
            os.kill(cluster.worker_pid("prefill-0"), signal.SIGKILL)
            assert not any(visit.done() for visit in visits), "it was killed too late"
            return await asyncio.gather(*visits)

    for response in run_async(disturbed(), 150):
        assert response.status_code == 200, response.text
        found = [item["embedding"] for item in response.json()["data"]]
        close(found, np.concatenate([truth] * 8))
    assert cluster.total(embeddings) - before[embeddings] == 2 * 8 * len(TEXTS)
