"""How clear the model's greedy choices are: the lead of the best token's logit over the next.

Two correct implementations differ by about 1e-4 in a logit, so a lead well above that means that
they choose the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import LlamaForCausalLM


@torch.inference_mode()
def greedy_margins(
    model: LlamaForCausalLM, prompts: Sequence[Sequence[int]], new_tokens: int
) -> tuple[Tensor, Tensor]:
    """Generate greedily, past any end-of-text token.

    Args:
        model: in evaluation mode.
        prompts: token ids, each prompt run by itself.
        new_tokens: how many tokens to generate for each.

    Returns:
        The tokens, int64 [prompts, new_tokens], and their leads, float32 of the same shape.
    """
    tokens, margins = [], []
    for prompt in prompts:
        inputs, cache = torch.tensor([list(prompt)]), None
        for _ in range(new_tokens):
            output = model(input_ids=inputs, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            best = output.logits[0, -1].topk(2)
            tokens.append(best.indices[0])
            margins.append(best.values[0] - best.values[1])
            inputs = best.indices[:1].view(1, 1)
    shape = (len(prompts), new_tokens)
    return torch.stack(tokens).view(shape), torch.stack(margins).view(shape)


def describe(margins: Tensor) -> str:
    """One line on how margins are distributed."""
    flat = margins.flatten()
    below = ", ".join(
        f"{(flat < limit).float().mean().item():.3%} below {limit:g}" for limit in (1.0, 0.1, 0.01)
    )
    return f"median {flat.median().item():.2f}, least {flat.min().item():.4f}, {below}"
