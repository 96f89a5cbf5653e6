"""`LLM.embed` against Hugging Face's hidden states, pooled here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel

from pagewire import LLM, SamplingParams
from pagewire.shared.base.errors import ConfigError, InvalidRequestError
from pagewire.shared.engine.embedding_sequence import pooled_sequence
from pagewire.shared.engine.scheduling.sequence import new_sequence
from pagewire.shared.model.demo import demo_model_path
from pagewire.shared.request.sampling import RequestSpec
from pagewire.tests.support.embedding_models import embeddings_by_hugging_face, model_with
from pagewire.tests.support.padded_steps import run_padded

TEXT = "The with statement is used to wrap the execution of a block. "
PROMPTS = [
    [7],
    "class",
    TEXT,
    list(range(5, 70)),  # one token more than a step
    TEXT * 9,  # several chunks
]


def truth(llm: LLM, mode: str, normalize: bool) -> list[Any]:
    """The embeddings by Hugging Face."""
    assert llm.tokenizer is not None
    ids = [llm.tokenizer.encode(each) if isinstance(each, str) else each for each in PROMPTS]
    return embeddings_by_hugging_face(ids, mode, normalize)


EACH_DEVICE = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
)


def load(path: Path | str, device: str = "cpu") -> LLM:
    settings = {"dtype": "float32", "max_num_batched_tokens": 64, "num_blocks": 1024}
    return LLM(str(path), device=device, **settings)


def check(llm: LLM, expected: list[Any]) -> None:
    """Embeddings are right, alone and among answers, and leave nothing in the cache."""
    outputs = llm.embed(PROMPTS)
    for output, vector in zip(outputs, expected, strict=True):
        np.testing.assert_allclose(output.embedding, vector, rtol=2e-4, atol=2e-5)
    assert llm.block_counts().used == llm.block_counts().cached == 0
    assert not llm.core.has_work


def test_without_files_it_is_the_last_tokens_state_normalised() -> None:
    llm = load("demo")
    expected = truth(llm, "last", True)
    check(llm, expected)
    # Cached blocks are neither read nor added to.
    llm.generate(PROMPTS, SamplingParams(max_tokens=2))
    cached = llm.block_counts().cached
    assert cached > 0
    found = llm.embed(PROMPTS)
    np.testing.assert_allclose(found[-1].embedding, expected[-1], rtol=2e-4, atol=2e-5)
    assert llm.block_counts().cached == cached


@pytest.mark.parametrize("padded", [False, True])
def test_it_goes_along_with_answers_of_the_same_batch(padded: bool) -> None:
    llm = load("demo")
    if padded:
        run_padded(llm.engine.runner, 64)
    core, expected = llm.core, truth(llm, "last", False)
    answer = llm.generate(TEXT, SamplingParams(max_tokens=20))[0].token_ids
    assert llm.tokenizer is not None
    spec = RequestSpec(temperature=0.0, max_tokens=20, seed=1)
    core.sequences.add(new_sequence("answer", llm.tokenizer.encode(TEXT), spec, ()))
    tokens: list[int] = []
    embeddings = {}
    for step in range(60):
        if step == 3:
            core.sequences.add(pooled_sequence("alone", list(range(5, 70)), "last"))
        for output in core.step()[0]:
            if output.embedding is not None:
                embeddings[output.request_id] = np.frombuffer(output.embedding, np.float32)
            elif output.request_id == "answer":
                tokens += output.token_ids
    assert tokens == answer
    np.testing.assert_allclose(embeddings["alone"], expected[3], rtol=2e-4, atol=2e-5)
    assert not core.has_work


@EACH_DEVICE
@pytest.mark.parametrize("newer", [False, True])
@pytest.mark.parametrize(("mode", "normalize"), [("cls", False), ("mean", True), ("last", False)])
def test_the_models_files_say_how(
    tmp_path: Path, mode: str, normalize: bool, newer: bool, device: str
) -> None:
    path = model_with(tmp_path, mode, *(["Normalize"] if normalize else []), newer=newer)
    llm = load(path, device)
    check(llm, truth(llm, mode, normalize))


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_that_is_saved_without_its_head(tmp_path: Path, tied: bool) -> None:
    """As sentence-transformers saves them, by other names of architecture and tensors."""
    model_with(tmp_path, "mean", "Normalize", newer=True)
    model = AutoModel.from_pretrained(demo_model_path(), dtype=torch.float32)
    model.config.tie_word_embeddings = tied
    model.save_pretrained(tmp_path)
    assert '"LlamaModel"' in (tmp_path / "config.json").read_text()
    llm = load(tmp_path)
    check(llm, truth(llm, "mean", True))


@pytest.mark.parametrize(
    "fields", [{"is_causal": False}, {"use_bidirectional_attention": True}], ids=str
)
def test_a_model_that_looks_ahead_makes_no_embeddings(
    tmp_path: Path, fields: dict[str, bool]
) -> None:
    llm = load(model_with(tmp_path, "mean", **fields))
    with pytest.raises(ConfigError, match="would attend to later ones"):
        llm.embed("a")


def test_what_is_not_supported_is_refused_in_words(tmp_path: Path) -> None:
    llm = load(model_with(tmp_path, "mean", "Dense"))
    with pytest.raises(ConfigError, match="'Dense' are not supported"):
        llm.embed("a")
    model_with(tmp_path, None)
    with pytest.raises(ConfigError, match="must have one pooling_mode of"):
        llm.embed("a")
    (tmp_path / "modules.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        llm.embed("a")
    (tmp_path / "modules.json").unlink()
    for prompts in ([[]], [[5] * llm.engine.max_model_len]):
        with pytest.raises(InvalidRequestError):
            llm.embed(prompts)
    assert llm.block_counts().used == 0
