"""Log probabilities of the distribution that is sampled from, against a reference of the test's.

The reference follows the order of the steps: biases, allowed tokens, penalties, temperature,
limits. It begins with the raw log probabilities of all tokens, which differ from logits by a
constant.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagewire import LLM, SamplingParams
from pagewire.kernels.sampling_signatures import Limits
from pagewire.shared.base.errors import InvalidRequestError
from pagewire.tests.support.logprob_truth import TOLERANCE, LogprobTruth

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = [(n * 37) % 1900 + 10 for n in range(40)]
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "top_k": 2},
    "temperature": {"temperature": 0.7},
    "top_k": {"temperature": 1.3, "top_k": 4},
    "top_p": {"temperature": 1.1, "top_p": 0.6},
    "min_p": {"temperature": 1.5, "min_p": 0.2},
    "bias": {"temperature": 1.0, "logit_bias": {40: 9.0, 300: 8.5, 17: -100.0}},
    "allowed": {"temperature": 0.9, "allowed_token_ids": [40, 41, 300, 301, 302]},
    "penalty": {"temperature": 1.0, "frequency_penalty": 1.5, "presence_penalty": 0.5},
}


def test_each_limit_is_a_case() -> None:
    """A further one gets right log probabilities by the recipe in docs/extending.md alone."""
    assert all(name in CASES.get(name, {}) for name in Limits._fields)


@pytest.fixture(scope="module")
def llm(one_thread: None) -> LLM:
    return LLM("demo", device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def truth(one_thread: None) -> LogprobTruth:
    return LogprobTruth()


def asked_for(fields: dict[str, Any], **more: Any) -> SamplingParams:
    return SamplingParams(seed=4, max_tokens=12, ignore_eos=True, logprobs=6, **fields, **more)


def expected(raw: torch.Tensor, output: list[int], fields: dict[str, Any]) -> torch.Tensor:
    """Return the log probabilities of one position, given those by the raw logits."""
    scores = raw.double().clone()
    for token, bias in fields.get("logit_bias", {}).items():
        scores[token] += bias
    if "allowed_token_ids" in fields:
        forbidden = torch.ones(len(scores), dtype=torch.bool)
        forbidden[fields["allowed_token_ids"]] = False
        scores[forbidden] = -torch.inf
    for token in set(output):
        scores[token] -= fields.get("frequency_penalty", 0.0) * output.count(token)
        scores[token] -= fields.get("presence_penalty", 0.0)
    if fields["temperature"] == 0:
        return scores.log_softmax(-1)
    scores /= fields["temperature"]
    ordered = scores.sort(descending=True).values
    if "min_p" in fields:
        scores[scores.softmax(-1) < fields["min_p"] * scores.softmax(-1).max()] = -torch.inf
    if "top_k" in fields:
        scores[scores < ordered[fields["top_k"] - 1]] = -torch.inf
    if "top_p" in fields:
        mass = ordered.softmax(-1)
        count = int((mass.cumsum(-1) - mass < fields["top_p"]).sum())
        scores[scores < ordered[count - 1]] = -torch.inf
    return scores.log_softmax(-1)


@pytest.mark.parametrize("fields", CASES.values(), ids=CASES)
def test_they_are_those_of_the_distribution(
    llm: LLM, truth: LogprobTruth, fields: dict[str, Any]
) -> None:
    raw, found = (
        llm.generate([PROMPT], asked_for(fields, logprobs_mode=mode), use_tqdm=False)[0].outputs[0]
        for mode in ("raw", "processed")
    )
    assert raw.token_ids == found.token_ids
    assert raw.logprobs != found.logprobs or fields["temperature"] == 0
    assert found.logprobs is not None
    ids = [*PROMPT, *found.token_ids]
    of_all = truth.of(ids)
    for index, position in enumerate(found.logprobs):
        before = found.token_ids[:index]
        wanted = expected(of_all[len(PROMPT) + index - 1], before, fields)
        for token, each in position.items():
            if each.logprob == wanted[token]:  # of tokens that are no candidates, too: -inf
                continue
            assert each.logprob == pytest.approx(wanted[token].item(), abs=10 * TOLERANCE)
        drawn = position[found.token_ids[index]]
        assert drawn.logprob > -torch.inf
        assert drawn.rank == 1 + int((wanted > wanted[found.token_ids[index]]).sum())


def test_a_batch_may_ask_for_both(llm: LLM) -> None:
    fields = {"temperature": 0.7, "top_k": 4}
    params = [asked_for(fields, logprobs_mode=mode) for mode in ("raw", None, "processed")]
    alone = [llm.generate([PROMPT], each, use_tqdm=False)[0].outputs for each in params]
    together = llm.generate([PROMPT] * 3, params, use_tqdm=False)
    assert alone[0] == alone[1] != alone[2]
    for one, other in zip(alone, together, strict=True):
        assert one[0].token_ids == other.outputs[0].token_ids
        for left, right in zip(one[0].logprobs, other.outputs[0].logprobs, strict=True):
            values = [each.logprob for each in left.values()]
            assert [each.logprob for each in right.values()] == pytest.approx(values, abs=1e-4)


def test_another_mode_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        llm.generate([PROMPT], SamplingParams(logprobs_mode="cooked"), use_tqdm=False)
    assert caught.value.param == "logprobs_mode"
