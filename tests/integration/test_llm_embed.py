"""`LLM.embed` against Hugging Face's hidden states, pooled here."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel

from pagewire import LLM, SamplingParams
from pagewire.shared.engine.embeddings import pooled_sequence
from pagewire.shared.engine.sequence import new_sequence
from pagewire.shared.errors import ConfigError, InvalidRequestError
from pagewire.shared.model.demo import demo_model_path
from pagewire.shared.sampling import RequestSpec

TEXT = "The with statement is used to wrap the execution of a block. "
PROMPTS = [
    [7],
    "class",
    TEXT,
    list(range(5, 70)),  # one token more than a step
    TEXT * 9,  # several chunks
]
SWITCHES = {
    "cls": "pooling_mode_cls_token",
    "mean": "pooling_mode_mean_tokens",
    "last": "pooling_mode_lasttoken",
}
MODULES = "sentence_transformers.models."


def model_with(folder: Path, mode: str | None, *kinds: str) -> Path:
    """The demo model with the files of sentence-transformers."""
    shutil.copytree(demo_model_path(), folder, dirs_exist_ok=True)
    kinds = ("Transformer", "Pooling", *kinds)
    modules = [{"path": f"{i}_{kind}", "type": MODULES + kind} for i, kind in enumerate(kinds)]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    switches = {switch: name == mode for name, switch in SWITCHES.items()}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(switches))
    return folder


def truth(llm: LLM, mode: str, normalize: bool) -> list[Any]:
    """The embeddings by Hugging Face."""
    model = AutoModel.from_pretrained(demo_model_path(), dtype=torch.float32)
    found = []
    assert llm.tokenizer is not None
    for prompt in PROMPTS:
        ids = llm.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        with torch.inference_mode():
            hidden = model(torch.tensor([ids])).last_hidden_state[0]
        pooled = {"cls": hidden[0], "mean": hidden.mean(0), "last": hidden[-1]}[mode]
        found.append((pooled / pooled.norm() if normalize else pooled).numpy())
    return found


def load(path: Path | str) -> LLM:
    return LLM(str(path), device="cpu", dtype="float32", max_num_batched_tokens=64)


def check(llm: LLM, expected: list[Any]) -> None:
    """Embeddings are right, alone and among answers, and leave nothing in the cache."""
    outputs = llm.embed(PROMPTS)
    for output, vector in zip(outputs, expected, strict=True):
        np.testing.assert_allclose(output.embedding, vector, rtol=2e-4, atol=2e-5)
    assert llm.block_counts().used == llm.block_counts().cached == 0
    assert not llm.engine.core.has_work


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


def test_it_goes_along_with_answers_of_the_same_batch() -> None:
    llm = load("demo")
    core, expected = llm.engine.core, truth(llm, "last", False)
    answer = llm.generate(TEXT, SamplingParams(max_tokens=20))[0].token_ids
    assert llm.tokenizer is not None
    spec = RequestSpec(temperature=0.0, max_tokens=20, seed=1)
    core.add(new_sequence("answer", llm.tokenizer.encode(TEXT), spec, ()))
    tokens: list[int] = []
    embeddings = {}
    for step in range(60):
        if step == 3:
            core.add(pooled_sequence("alone", list(range(5, 70)), "last"))
        for output in core.step()[0]:
            if output.embedding is not None:
                embeddings[output.request_id] = np.frombuffer(output.embedding, np.float32)
            elif output.request_id == "answer":
                tokens += output.token_ids
    assert tokens == answer
    np.testing.assert_allclose(embeddings["alone"], expected[3], rtol=2e-4, atol=2e-5)
    assert not core.has_work


@pytest.mark.parametrize(
    ("mode", "normalize"), [("cls", False), ("mean", True), ("mean", False), ("last", False)]
)
def test_the_models_files_say_how(tmp_path: Path, mode: str, normalize: bool) -> None:
    llm = load(model_with(tmp_path, mode, *(["Normalize"] if normalize else [])))
    check(llm, truth(llm, mode, normalize))


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
