"""Rollouts for reinforcement learning: tokens in, tokens and their exact log probabilities out.

A trainer computes ratios of probabilities of the tokens that were sampled. So their ids are the
sampler's own, and their log probabilities those that the model's logits give in float32, as
Hugging Face computes them, whatever the temperature; with `processed`, those of the distribution
that was sampled from, as Hugging Face's logits processors make it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from pagewire import LLM, SamplingParams
from pagewire.shared.engine.offline.outputs import CompletionOutput
from pagewire.tests.support.logprob_truth import LogprobTruth
from pagewire.tests.support.tiny_models import write_tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

ROUNDING = 2e-5  # of float32 logits around 10 whose sums have another order: 20 units in the last
PROMPTS = [[(n * 37 + length) % 80 + 10 for n in range(length)] for length in (1, 33, 90)]
SAMPLED: list[dict[str, Any]] = [
    {"temperature": 0.6},
    {"temperature": 1.0},
    {"temperature": 1.7},
    {"temperature": 1.2, "top_k": 9},
    {"temperature": 0.9, "top_p": 0.8},
]
FAMILIES = [("qwen3", "groups-of-2-odd-vocabulary"), ("gemma2", "groups-of-2-odd-vocabulary")]


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda each: each[0])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, one_thread: None
) -> Iterator[tuple[LLM, LogprobTruth]]:
    path = tmp_path_factory.mktemp("models") / "tiny"
    theirs = write_tiny_model(path, *request.param)
    yield LLM(str(path), device="cpu", dtype="float32"), LogprobTruth(theirs)


def rollouts(llm: LLM, fields: dict[str, Any], **more: Any) -> list[tuple[list[int], Any]]:
    """Sample four answers to each prompt; returns each with its prompt."""
    params = SamplingParams(n=4, seed=3, max_tokens=30, ignore_eos=True, **fields, **more)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == PROMPTS
    return [(output.prompt_token_ids, each) for output in outputs for each in output.outputs]


def sampled_logprobs(answer: CompletionOutput) -> list[float]:
    assert answer.logprobs is not None
    pairs = zip(answer.token_ids, answer.logprobs, strict=True)
    values = [position[token].logprob for token, position in pairs]
    assert (np.float32(values).astype(np.float64) == np.array(values)).all()
    return values


@pytest.mark.parametrize("fields", SAMPLED, ids=str)
def test_raw_log_probabilities_are_hugging_faces(
    pair: tuple[LLM, LogprobTruth], fields: dict[str, Any]
) -> None:
    llm, truth = pair
    ranks = set()
    for prompt, answer in rollouts(llm, fields, logprobs=0):
        rows = truth.of([*prompt, *answer.token_ids])[len(prompt) - 1 : -1]
        wanted = rows.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
        assert sampled_logprobs(answer) == pytest.approx(wanted.tolist(), abs=ROUNDING)
        ranks |= {next(iter(position.values())).rank for position in answer.logprobs}
    assert len(ranks) > 5  # sampled, not the likeliest


@pytest.mark.parametrize("fields", SAMPLED, ids=str)
def test_processed_ones_are_of_hugging_faces_processors(
    pair: tuple[LLM, LogprobTruth], fields: dict[str, Any]
) -> None:
    llm, truth = pair
    processors = transformers.LogitsProcessorList(
        [transformers.TemperatureLogitsWarper(fields["temperature"])]
    )
    if "top_k" in fields:
        processors.append(transformers.TopKLogitsWarper(fields["top_k"]))
    if "top_p" in fields:
        processors.append(transformers.TopPLogitsWarper(fields["top_p"]))
    for prompt, answer in rollouts(llm, fields, logprobs=0, logprobs_mode="processed"):
        rows = truth.of([*prompt, *answer.token_ids])[len(prompt) - 1 : -1]
        rows = torch.log_softmax(processors(None, rows), -1)
        wanted = rows.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
        assert sampled_logprobs(answer) == pytest.approx(wanted.tolist(), abs=5 * ROUNDING)


def test_scores_of_a_rollout_are_those_it_was_sampled_with(
    pair: tuple[LLM, LogprobTruth],
) -> None:
    """As a trainer that asks the same engine for its old log probabilities."""
    llm, _ = pair
    for prompt, answer in rollouts(llm, {"temperature": 1.3}, logprobs=0)[::4]:
        whole = [*prompt, *answer.token_ids]
        asked = SamplingParams(max_tokens=1, prompt_logprobs=0)
        scored = llm.generate([whole], asked, use_tqdm=False)[0].prompt_logprobs
        assert scored is not None
        positions = zip(answer.token_ids, scored[len(prompt) :], strict=True)
        found = [position[token].logprob for token, position in positions if position is not None]
        assert sampled_logprobs(answer) == pytest.approx(found, abs=ROUNDING)
