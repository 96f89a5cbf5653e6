"""Decoders by transformers' code over paged KV against the same code by itself, in float32."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from pagewire.kernels import load_ops
from pagewire.shared.base.errors import ModelLoadError
from pagewire.shared.engine.offline.llm import LLM
from pagewire.shared.model.config import load_config
from pagewire.shared.model.transformers_model.config import TransformersConfig
from pagewire.shared.model.transformers_model.load import load_transformers_model
from pagewire.shared.model.transformers_model.model import TransformersModel
from pagewire.shared.request.sampling import SamplingParams
from pagewire.tests.support.float32_reference import random_prompts
from pagewire.tests.support.hf_greedy import check_greedy_answers, greedy
from pagewire.tests.support.paged_model import PagedModel
from pagewire.tests.support.tiny_models import VOCAB
from pagewire.tests.support.tiny_transformers import SERVED, write_tiny

TOLERANCE = 1e-4  # of the largest logit
ANSWER = 64  # tokens
PROMPTS = (1, 9, 40)  # lengths


def load(path: Path) -> TransformersModel:
    config = load_config(path, "transformers")
    assert isinstance(config, TransformersConfig)
    ops = load_ops("torch", "cpu")
    return load_transformers_model(path, config, torch.device("cpu"), torch.float32, ops)


def change(path: Path, **fields: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


@torch.inference_mode()
def expected_logits(theirs: Any, token_ids: list[int]) -> torch.Tensor:
    logits: torch.Tensor = theirs(torch.tensor([token_ids]), use_cache=False).logits[0]
    return logits


@pytest.mark.parametrize("architecture", SERVED)
def test_greedy_answers_and_their_logits(
    tmp_path: Path, architecture: str, record_property: Callable[[str, object], None]
) -> None:
    theirs, ours = write_tiny(tmp_path, architecture), load(tmp_path)
    paged = PagedModel(ours, num_blocks=64, block_size=8, seed=3)
    expected = partial(expected_logits, theirs)
    prompts = random_prompts(PROMPTS, VOCAB)
    ties = check_greedy_answers(paged, prompts, ANSWER, expected, TOLERANCE)
    record_property("near_ties", ties)


@pytest.mark.parametrize("architecture", ["StableLmForCausalLM", "CohereForCausalLM"])
def test_chunks_and_decode_rows_in_one_batch(tmp_path: Path, architecture: str) -> None:
    theirs, ours = write_tiny(tmp_path, architecture), load(tmp_path)
    source = random.Random(4)
    paged = PagedModel(ours, num_blocks=64, block_size=8, seed=4)
    sequences = [paged.add([source.randrange(VOCAB) for _ in range(n)]) for n in (13, 2, 57)]
    paged.run_mixed(sequences, max_chunk=23)
    for sequence in sequences:
        expected = expected_logits(theirs, sequence.token_ids)
        error = (torch.stack(sequence.logits) - expected).abs().max()
        assert error <= TOLERANCE * expected.abs().max()


def test_layers_end_in_order(tmp_path: Path) -> None:
    write_tiny(tmp_path, "StableLmForCausalLM")
    ours = load(tmp_path)
    paged = PagedModel(ours, num_blocks=4, block_size=8, seed=1)
    sequence = paged.add([1, 2, 3])
    batch = paged.batch([sequence], [])
    ended: list[int] = []
    every = ours.forward(batch, paged.layers, ended.append)
    assert ended == [0, 1, 2]
    rows = torch.tensor([0, 0])
    assert torch.equal(ours.forward(batch, paged.layers, rows=rows), every[rows])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("architecture", ["StableLmForCausalLM", "Starcoder2ForCausalLM-windows"])
def test_offline_llm_generates_hugging_faces_tokens(
    tmp_path: Path, architecture: str, device: str
) -> None:
    """The engine preempts and reuses prefixes as with any model: twice the same prompt."""
    theirs = write_tiny(tmp_path, architecture)
    settings = {"model_impl": "transformers", "dtype": "float32", "num_blocks": 1024}
    llm = LLM(str(tmp_path), device=device, **settings)
    prompt = [(n * 37) % VOCAB for n in range(50)]
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    answers = llm.generate([{"prompt_token_ids": prompt}] * 2, params)
    tokens = list(prompt)
    for _ in range(20):
        tokens.append(int(expected_logits(theirs, tokens)[-1].argmax()))
    for answer in answers:
        assert list(answer.outputs[0].token_ids) == tokens[len(prompt) :]


def test_dummy_weights_are_always_the_same(tmp_path: Path) -> None:
    write_tiny(tmp_path, "StableLmForCausalLM")
    config = load_config(tmp_path, "transformers")
    assert isinstance(config, TransformersConfig)
    ops, cpu = load_ops("torch", "cpu"), torch.device("cpu")
    one, other = (
        dict(load_transformers_model(tmp_path, config, cpu, torch.float32, ops, "dummy").targets())
        for _ in range(2)
    )
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("architecture", "changes", "reason"),
    [
        ("BertLMHeadModel", {"is_decoder": False}, "its attention is not causal"),
        ("BloomForCausalLM", {"max_position_embeddings": 64}, "attention cannot be replaced"),
        ("DiffLlamaForCausalLM", {}, "is not supported"),
        ("GptOssForCausalLM", {"layer_types": ["full_attention"] * 3}, "s_aux"),
    ],
)
def test_refusals_when_it_is_loaded(
    tmp_path: Path, architecture: str, changes: dict[str, Any], reason: str
) -> None:
    write_tiny(tmp_path, architecture)
    change(tmp_path, **changes)
    with pytest.raises(ModelLoadError, match=reason) as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("pad", [VOCAB, -VOCAB - 1])
def test_a_padding_token_beyond_the_vocabulary_has_no_effect(tmp_path: Path, pad: int) -> None:
    """A token that was added without a row; transformers alone does not load such a model."""
    theirs = write_tiny(tmp_path, "StableLmForCausalLM")
    change(tmp_path, pad_token_id=pad)
    paged = PagedModel(load(tmp_path), num_blocks=64, block_size=8, seed=3)
    prompts = random_prompts((9,), VOCAB)
    check_greedy_answers(paged, prompts, 8, partial(expected_logits, theirs), TOLERANCE)


def test_a_name_that_transformers_spells_otherwise(tmp_path: Path) -> None:
    """Phi-3.5-MoE's as it was published."""
    write_tiny(tmp_path, "PhimoeForCausalLM")
    change(tmp_path, architectures=["PhiMoEForCausalLM"])
    assert load(tmp_path).config.architecture == "PhiMoEForCausalLM"


def test_weights_that_are_not_the_models(tmp_path: Path) -> None:
    write_tiny(tmp_path, "StableLmForCausalLM")
    change(tmp_path, num_hidden_layers=4)
    with pytest.raises(ModelLoadError, match=r"lack the tensor model\.layers\.3"):
        load(tmp_path)
    change(tmp_path, num_hidden_layers=3, intermediate_size=96)
    with pytest.raises(ModelLoadError, match="cannot load StableLmForCausalLM"):
        load(tmp_path)


def test_code_that_a_model_brings_along_is_not_run(tmp_path: Path) -> None:
    write_tiny(tmp_path, "StableLmForCausalLM")
    ran = tmp_path / "ran"
    (tmp_path / "modeling_own.py").write_text(f"open({str(ran)!r}, 'w')\n")
    auto_map = {"AutoConfig": "modeling_own.A", "AutoModelForCausalLM": "modeling_own.B"}
    change(tmp_path, auto_map=auto_map, architectures=["OwnForCausalLM"], model_type="own")
    with pytest.raises(ModelLoadError):
        load(tmp_path)
    assert not ran.exists()


@pytest.mark.parametrize("architecture", ["Cohere2ForCausalLM", "Starcoder2ForCausalLM-windows"])
@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 13}], ids=["whole", "chunks"])
def test_engines_give_up_blocks_before_a_window(
    tmp_path: Path, architecture: str, settings: dict[str, Any]
) -> None:
    """Some layers of the one have a window, all layers of the other."""
    theirs = write_tiny(tmp_path, architecture)
    llm = LLM(str(tmp_path), model_impl="transformers", device="cpu", dtype="float32", **settings)
    assert llm.core.scheduler.pool.layout.has_windows
    prompts = random_prompts((3, 70, 110), VOCAB)
    expected = [greedy(theirs, prompt, 30) for prompt in prompts]
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    for _ in range(2):  # the second time from the prefix cache
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert [output.token_ids for output in outputs] == expected
    assert outputs[2].cached_tokens == 96
    assert llm.block_counts().used == 0


@pytest.mark.parametrize(
    ("architecture", "changes", "reason"),
    [
        ("StableLmForCausalLM", {"sliding_window": 8}, "layer 0 attends to all tokens where .* 8"),
        ("Cohere2ForCausalLM", {"layer_types": None}, "layer 3 attends to all tokens where .* 11"),
    ],
)
def test_windows_that_the_code_does_not_have_are_refused(
    tmp_path: Path, architecture: str, changes: dict[str, Any], reason: str
) -> None:
    write_tiny(tmp_path, architecture)
    change(tmp_path, **changes)
    with pytest.raises(ModelLoadError, match=reason):
        load(tmp_path)
