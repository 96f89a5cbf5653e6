"""Greedy tokens by Hugging Face's code, and a comparison with ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pagewire.tests.support.paged_model import PagedModel


@torch.inference_mode()
def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """Return `count` tokens by Hugging Face's code; fails if two logits are too close."""
    tokens = list(prompt)
    for _ in range(count):
        best = model(torch.tensor([tokens])).logits[0, -1].topk(2)
        assert best.values[0] - best.values[1] > 1e-4
        tokens.append(int(best.indices[0]))
    return tokens[len(prompt) :]


@torch.inference_mode()
def is_greedy(model: Any, prompt: list[int], answer: list[int]) -> bool:
    """Whether an answer is `greedy`'s, by one run of Hugging Face's code for all its tokens."""
    logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    best = logits.topk(2)
    assert (best.values[:, 0] - best.values[:, 1] > 1e-4).all()
    return best.indices[:, 0].tolist() == answer


def check_greedy_answers(
    paged: PagedModel,
    prompts: list[list[int]],
    count: int,
    expected_logits: Callable[[list[int]], torch.Tensor],
    tolerance: float,
) -> int:
    """Compare logits and greedy tokens over paged KV with Hugging Face's.

    Prompts run in chunks of 7, then all sequences in one batch, token by token.

    Args:
        paged: the model.
        prompts: the prompts.
        count: number of tokens of an answer.
        expected_logits: returns Hugging Face's logits [T, vocab] of a sequence.
        tolerance: largest difference of a logit, relative to the largest logit.

    Returns:
        The number of tokens that differ where two logits are equal within the tolerance.
    """
    sequences = [paged.add(prompt + [0] * count) for prompt in prompts]
    for sequence, prompt in zip(sequences, prompts, strict=True):
        while sequence.done < len(prompt):
            paged.step([], [(sequence, min(7, len(prompt) - sequence.done))])
    for _ in range(count):
        for sequence in sequences:
            sequence.token_ids[sequence.done] = int(sequence.logits[-1].argmax())
        paged.step(sequences, [], padding_rows=1)
    ties = 0
    for sequence, prompt in zip(sequences, prompts, strict=True):
        actual, expected = torch.stack(sequence.logits), expected_logits(sequence.token_ids)
        largest = expected.abs().max()
        assert (actual - expected).abs().max() <= tolerance * largest
        assert expected.std() > 0.3  # else the tolerance would accept anything
        answered = expected[len(prompt) - 1 : -1]
        best = answered.topk(2).values
        differs = answered.argmax(-1) != torch.tensor(sequence.token_ids[len(prompt) :])
        is_tie = best[:, 0] - best[:, 1] <= 2 * tolerance * largest
        assert not (differs & ~is_tie).any()
        ties += int((differs & is_tie).sum())
    return ties
