"""How clear the model's greedy choices are: the lead of the best token's logit over the next.

Two correct implementations differ by about 1e-4 in a logit, so a lead well above that means that
they choose the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import LlamaForCausalLM


@torch.no_grad()
def greedy(model: LlamaForCausalLM, prompts: Tensor, new_tokens: int) -> tuple[Tensor, Tensor]:
    """Generate greedily, past any end-of-text token.

    Args:
        model: any causal language model of transformers.
        prompts: token ids of prompts of one length, int64 [batch, length].
        new_tokens: how many tokens to generate for each.

    Returns:
        The tokens, int64 [batch, new_tokens], and their leads, float32 of the same shape.
    """
    tokens, margins = [], []
    inputs, cache = prompts, None
    for _ in range(new_tokens):
        output = model(input_ids=inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = output.past_key_values
        best = output.logits[:, -1].topk(2)  # values and indices: [batch, 2]
        tokens.append(best.indices[:, 0])
        margins.append(best.values[:, 0] - best.values[:, 1])
        inputs = best.indices[:, :1]
    return torch.stack(tokens, dim=1), torch.stack(margins, dim=1)


def greedy_margins(
    model: LlamaForCausalLM, prompts: Sequence[Sequence[int]], new_tokens: int
) -> tuple[Tensor, Tensor]:
    """As `greedy`, for prompts of any lengths, each run by itself: both [prompts, new_tokens]."""
    runs = [greedy(model, torch.tensor([list(prompt)]), new_tokens) for prompt in prompts]
    return torch.cat([tokens for tokens, _ in runs]), torch.cat([leads for _, leads in runs])


def describe(margins: Tensor) -> str:
    """One line on how margins are distributed."""
    flat = margins.flatten()
    below = ", ".join(
        f"{(flat < limit).float().mean().item():.3%} below {limit:g}" for limit in (1.0, 0.1, 0.01)
    )
    return f"median {flat.median().item():.2f}, least {flat.min().item():.4f}, {below}"
