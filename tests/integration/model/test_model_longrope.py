"""Longrope past the context that a model was first trained on, against Hugging Face's code."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from pagewire import LLM, SamplingParams
from pagewire.kernels import load_ops
from pagewire.shared.base.errors import ConfigError
from pagewire.shared.engine.build import build_engine
from pagewire.shared.model.config import load_config
from pagewire.shared.model.loader import load_model
from pagewire.shared.settings.config import EngineSettings
from pagewire.tests.support.float32_reference import random_prompts
from pagewire.tests.support.hf_greedy import check_greedy_answers, greedy
from pagewire.tests.support.paged_model import PagedModel
from pagewire.tests.support.tiny_models import POSITIONS, VOCAB, Pair, write_tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

TOLERANCE = 1e-4  # of the largest logit
ORIGINAL = 48
ANSWER = 40
LONGER = (ORIGINAL + 1, 77, 150)
GREEDY = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)
SHAPES = {
    "phi3": ("phi3", "longrope"),
    "phi3-part-of-a-head": ("phi3", "longrope-of-a-part"),
    "llama": ("llama", "longrope"),
}


def write(path: Path, family: str, shape: str) -> Any:
    """Save a model whose original context is short, and return Hugging Face's."""
    where: dict[str, Any] = {"original_max_position_embeddings": ORIGINAL}
    if family == "llama":  # it has it among the rotary parameters alone
        kept = write_tiny_model(path, family, shape).config.rope_parameters
        where = {"rope_parameters": {**kept, **where}}
    return write_tiny_model(path, family, shape, **where)


@pytest.fixture(scope="module", params=SHAPES.values(), ids=SHAPES)
def written(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("model")
    return path, write(path, *request.param)


def pair_of(path: Path, theirs: Any, longest: int | None) -> Pair:
    ops, cpu = load_ops("torch", "cpu"), torch.device("cpu")
    ours = load_model(path, load_config(path), cpu, torch.float32, ops, max_positions=longest)
    return Pair(theirs, ours)


def test_prompts_past_the_original_context(written: tuple[Path, Any]) -> None:
    pair = pair_of(*written, longest=None)
    paged = PagedModel(pair.ours, num_blocks=64, block_size=8, seed=3)
    prompts = random_prompts(LONGER, VOCAB)
    check_greedy_answers(paged, prompts, ANSWER, pair.expected, TOLERANCE)


def test_prompts_within_it_where_no_longer_ones_are_served(written: tuple[Path, Any]) -> None:
    pair = pair_of(*written, longest=ORIGINAL)
    paged = PagedModel(pair.ours, num_blocks=16, block_size=8, seed=3)
    prompts = random_prompts((1, 8), VOCAB)
    check_greedy_answers(paged, prompts, ORIGINAL - 8, pair.expected, TOLERANCE)


def test_long_factors_at_every_position(written: tuple[Path, Any]) -> None:
    """What Hugging Face computes of short prompts, too, if it has only the long factors."""
    path, theirs = written
    config = type(theirs.config).from_pretrained(path)
    config.rope_parameters["short_factor"] = config.rope_parameters["long_factor"]
    long = getattr(transformers, type(theirs).__name__)(config).eval()
    long.load_state_dict(theirs.state_dict())
    pair = pair_of(path, long, longest=None)
    paged = PagedModel(pair.ours, num_blocks=64, block_size=8, seed=3)
    prompts = random_prompts((1, 9), VOCAB)
    check_greedy_answers(paged, prompts, 2 * ORIGINAL, pair.expected, TOLERANCE)


@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 13}], ids=["whole", "chunks"])
def test_engines_answer_long_prompts_as_hugging_face(
    written: tuple[Path, Any], settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    path, theirs = written
    prompts = random_prompts(LONGER, VOCAB)
    expected = [greedy(theirs, prompt, ANSWER) for prompt in prompts]
    with caplog.at_level(logging.WARNING):
        llm = LLM(str(path), device="cpu", dtype="float32", block_size=16, **settings)
    assert "--max-model-len 48 takes the short factors" in caplog.text
    for _ in range(2):  # the second time from the prefix cache
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert [output.token_ids for output in outputs] == expected
    assert outputs[2].cached_tokens == 144


def test_engines_with_other_factors_share_no_block(written: tuple[Path, Any]) -> None:
    def hashes(max_model_len: int | None) -> list[bytes]:
        settings = EngineSettings(
            model=str(written[0]), device="cpu", dtype="float32", max_model_len=max_model_len
        )
        built = build_engine(settings, hash_secret="secret")
        fingerprint = built.model_identity.fingerprint.encode()
        [block] = built.scheduler.blocks.hasher.hash_prompt(range(16))
        return [fingerprint, block]

    assert hashes(None) == hashes(POSITIONS) == hashes(ORIGINAL + 1)
    assert hashes(ORIGINAL) == hashes(32)
    assert not set(hashes(None)) & set(hashes(ORIGINAL))


def test_lengths_past_the_models_are_refused(written: tuple[Path, Any]) -> None:
    with pytest.raises(ConfigError, match=f"the model's {POSITIONS} positions$"):
        LLM(str(written[0]), device="cpu", max_model_len=POSITIONS + 1)
