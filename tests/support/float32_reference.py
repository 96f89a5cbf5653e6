"""The truth for greedy tokens in half precision: Hugging Face's model, eager, in float32.

Half precision may choose another token where the reference's choice is a close one. What is close
is measured: by how far the same model's logits in the half precision are from the reference's.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM


@dataclass(frozen=True, slots=True)
class Closeness:
    """How greedy tokens compare with the reference's choices.

    Attributes:
        error: largest difference of a logit in half precision from the reference's.
        clear: share of the tokens that are chosen by a margin above twice the error, so that the
            half precision must choose the same.
        wrong: of the clear choices, those that came out differently: (prompt, index).
    """

    error: float
    clear: float
    wrong: list[tuple[int, int]]


def write_random_llama(directory: Path, config: LlamaConfig, device: str) -> None:
    """Save a model of a shape with random weights in bfloat16."""
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(directory)


def random_prompts(lengths: tuple[int, ...], vocab_size: int) -> list[list[int]]:
    """Return prompts of these lengths, the same each time."""
    rng = random.Random(0)
    return [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]


def compare_with_float32(
    directory: Path, prompts: list[list[int]], outputs: list[list[int]], device: str
) -> Closeness:
    """Compare greedy tokens of a bfloat16 engine with the reference's choices after them."""
    exact = _logits(directory, prompts, outputs, device, torch.float32)
    coarse = _logits(directory, prompts, outputs, device, torch.bfloat16)
    error = max((a - b).abs().max().item() for a, b in zip(exact, coarse, strict=True))
    clear, wrong, total = 0, [], 0
    for prompt, (logits, tokens) in enumerate(zip(exact, outputs, strict=True)):
        best = logits.topk(2, dim=-1)
        is_clear = best.values[:, 0] - best.values[:, 1] > 2 * error
        differs = best.indices[:, 0] != torch.tensor(tokens)
        wrong += [(prompt, i) for i in (is_clear & differs).nonzero().flatten().tolist()]
        clear += int(is_clear.sum())
        total += len(tokens)
    return Closeness(error, clear / total, wrong)


@torch.inference_mode()
def _logits(
    directory: Path,
    prompts: list[list[int]],
    outputs: list[list[int]],
    device: str,
    dtype: torch.dtype,
) -> list[torch.Tensor]:
    """Return the logits before each output token, given all before it: float32 [tokens, V]."""
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation="eager"
    ).to(device)
    found = []
    for prompt, tokens in zip(prompts, outputs, strict=True):
        ids = torch.tensor([[*prompt, *tokens[:-1]]], device=device)
        found.append(model(ids).logits[0, len(prompt) - 1 :].float().cpu())
    return found
