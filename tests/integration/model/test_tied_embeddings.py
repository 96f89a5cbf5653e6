"""Which output head a checkpoint is served with: the one that Hugging Face takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from pagewire.kernels import load_ops
from pagewire.shared.base.errors import ModelLoadError
from pagewire.shared.model.config import load_config
from pagewire.shared.model.layers.decoder import DecoderModel
from pagewire.shared.model.loader import load_model
from pagewire.tests.support.paged_model import PagedModel

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
PROMPT = list(range(3, 20))
SHAPE = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
FAMILIES: dict[str, Any] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=None)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE)),
}
# What the file holds, and whether the two are one tensor then where config.json ties them.
TIED_CASES = {
    "both-differ": False,
    "last-row-differs": False,
    "both-equal": True,
    "embedding-alone": True,
    "head-alone": True,
}


def write(path: Path, family: str, case: str, tied: bool | None, **options: str) -> None:
    """Save a random checkpoint with the embeddings of a case; `tied` None leaves it out."""
    torch.manual_seed(0)
    model = FAMILIES[family]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    if case == "both-equal":
        model.lm_head.weight.data.copy_(model.model.embed_tokens.weight)
    elif case == "last-row-differs":
        model.lm_head.weight.data[:-1] = model.model.embed_tokens.weight.data[:-1]
    model.save_pretrained(path, **options)
    config = json.loads((path / "config.json").read_text())
    config.pop("tie_word_embeddings", None)
    if tied is not None:
        config["tie_word_embeddings"] = tied
    (path / "config.json").write_text(json.dumps(config))
    missing = {"embedding-alone": HEAD, "head-alone": EMBED}.get(case)
    if missing:
        edit(path, missing, None)


def edit(path: Path, name: str, tensor: torch.Tensor | None) -> None:
    """Replace a tensor of a checkpoint of one file, or leave it out."""
    tensors = {**load_file(path / "model.safetensors"), name: tensor}
    kept = {name: each for name, each in tensors.items() if each is not None}
    save_file(kept, path / "model.safetensors", metadata={"format": "pt"})


def load(path: Path, dtype: torch.dtype = torch.float32) -> DecoderModel:
    cpu = torch.device("cpu")
    return load_model(path, load_config(path), cpu, dtype, load_ops("torch", "cpu"))


def assert_equal_logits(path: Path, ours: DecoderModel) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    paged = PagedModel(ours, num_blocks=8, block_size=16, seed=0)
    sequence = paged.add(PROMPT)
    paged.run([sequence], len(PROMPT))
    with torch.inference_mode():
        expected = theirs(torch.tensor([PROMPT])).logits[0]
    assert expected.std() > 1.0
    torch.testing.assert_close(torch.stack(sequence.logits), expected, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("case", "is_one"), TIED_CASES.items(), ids=TIED_CASES)
def test_tied_in_the_configuration(tmp_path: Path, family: str, case: str, is_one: bool) -> None:
    write(tmp_path, family, case, tied=True)
    ours = load(tmp_path)
    assert (ours.lm_head.method.matrix() is ours.embed_tokens) == is_one
    assert_equal_logits(tmp_path, ours)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, None], ids=["untied", "unsaid"])
@pytest.mark.parametrize("case", ["both-differ", "both-equal"])
def test_not_tied_in_the_configuration(
    tmp_path: Path, family: str, case: str, tied: bool | None
) -> None:
    write(tmp_path, family, case, tied)
    ours = load(tmp_path)
    assert ours.lm_head.method.matrix() is not ours.embed_tokens
    assert_equal_logits(tmp_path, ours)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("case", "missing"), [("embedding-alone", HEAD), ("head-alone", EMBED)])
def test_untied_with_one_missing_is_refused(
    tmp_path: Path, family: str, case: str, missing: str
) -> None:
    """Hugging Face fills it at random and warns: nobody wants to be served that."""
    write(tmp_path, family, case, tied=False)
    with pytest.raises(ModelLoadError, match=rf"1 tensor is missing \({missing}\)"):
        load(tmp_path)


def test_embedding_and_head_in_different_shards(tmp_path: Path) -> None:
    write(tmp_path, "llama", "both-differ", tied=True, max_shard_size="3KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert index[EMBED] != index[HEAD]
    assert_equal_logits(tmp_path, load(tmp_path))


def test_equal_as_far_as_the_dtype_goes(tmp_path: Path) -> None:
    """In the dtype that is served the two are one: no memory is spent on a second."""
    write(tmp_path, "llama", "both-equal", tied=True)
    head = load_file(tmp_path / "model.safetensors")[HEAD]
    edit(tmp_path, HEAD, head.bfloat16())
    ours = load(tmp_path, torch.bfloat16)
    assert ours.lm_head.method.matrix() is ours.embed_tokens
    ours = load(tmp_path, torch.float32)
    assert_equal_logits(tmp_path, ours)


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (torch.ones(41, 16), r"another shape \(lm_head.weight has \[41, 16\], not \[40, 16\]\)"),
        (
            torch.ones(40, 16, dtype=torch.int8),
            r"another dtype \(lm_head.weight is I8, not F64",
        ),
    ],
    ids=["other-shape", "quantised"],
)
def test_tied_head_that_is_wrong_is_refused(
    tmp_path: Path, head: torch.Tensor, message: str
) -> None:
    write(tmp_path, "llama", "both-differ", tied=True)
    edit(tmp_path, HEAD, head)
    with pytest.raises(ModelLoadError, match=message):
        load(tmp_path)


def test_tied_with_neither_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "llama", "embedding-alone", tied=True)
    edit(tmp_path, EMBED, None)
    with pytest.raises(ModelLoadError, match=rf"1 tensor is missing \({EMBED}\)"):
        load(tmp_path)
