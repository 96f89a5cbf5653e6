"""Greedy tokens by Hugging Face's code."""

from __future__ import annotations

from typing import Any

import torch


@torch.inference_mode()
def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """Return `count` tokens of Hugging Face's, each chosen clearly."""
    tokens = list(prompt)
    for _ in range(count):
        best = model(torch.tensor([tokens])).logits[0, -1].topk(2)
        assert best.values[0] - best.values[1] > 1e-4
        tokens.append(int(best.indices[0]))
    return tokens[len(prompt) :]
