"""Measures how clear the model's greedy choices are: the best logit's lead over the next.

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
    output = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=False,
        max_new_tokens=new_tokens,
        eos_token_id=model.config.vocab_size,  # an id that no token has
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.stack(output.logits, dim=1).topk(2).values  # [batch, new_tokens, 2]
    return output.sequences[:, prompts.shape[1] :], best[..., 0] - best[..., 1]


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
