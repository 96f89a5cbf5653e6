"""Embeddings of a cluster against those of sentence-transformers, whose model it serves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import openai
import pytest

from pagewire.tests.support.embedding_models import model_with
from pagewire.tests.support.local_cluster import local_cluster

# These libraries' own warnings are not ours to mend.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(200)]

TEXT = "The with statement is used to wrap the execution of a block. "
TEXTS = [
    "class",
    TEXT,
    TEXT * 12,
    "The café by the river — 東京 🌍",
    *(f"def f{i}():" for i in range(20)),
]


@pytest.mark.parametrize(("mode", "normalize"), [("mean", True), ("lasttoken", False)])
def test_a_model_that_sentence_transformers_has_saved(
    tmp_path: Path, mode: str, normalize: bool
) -> None:
    import sentence_transformers as library
    from sentence_transformers import models as parts

    transformer = parts.Transformer(str(model_with(tmp_path / "base", None)))
    pooling = parts.Pooling(transformer.get_word_embedding_dimension(), pooling_mode=mode)
    modules = [transformer, pooling, *([parts.Normalize()] if normalize else [])]
    model = library.SentenceTransformer(modules=modules, device="cpu")
    model.save(str(tmp_path / "embedder"))
    expected = model.encode(TEXTS, batch_size=1)
    options = ("--prefill", "1", "--decode", "1", "--device", "cpu", "--dtype", "float32")
    with (
        local_cluster(*options, "--model", str(tmp_path / "embedder")) as cluster,
        openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", timeout=60) as client,
    ):
        answer = client.embeddings.create(model="embedder", input=TEXTS)
    found = np.array([item.embedding for item in answer.data])
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-5)
