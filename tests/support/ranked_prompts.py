"""Prompts and sampling parameters of many kinds, for ranks whose tokens must be one process's."""

from __future__ import annotations

from typing import Any

from pagewire import SamplingParams

PROMPTS = [[n * 37 % 1000 + 10 for n in range(length)] for length in (1, 17, 60, 140, 33, 16)]
SHAPED: dict[str, Any] = {
    "repetition_penalty": 1.2,
    "presence_penalty": 0.5,
    "logit_bias": {11: 1.5},
}
ASKED = [
    SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.8, top_p=0.9, seed=7, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=3, n=3, max_tokens=16, ignore_eos=True),
    SamplingParams(temperature=0.7, seed=5, max_tokens=24, ignore_eos=True, **SHAPED),
    SamplingParams(temperature=1, seed=1, max_tokens=40, structured_outputs={"regex": "[0-9]{20}"}),
    SamplingParams(temperature=0, max_tokens=8, logprobs=3, prompt_logprobs=2),
]
# Some sequences are preempted, and prompts are cut into chunks.
TIGHT = {"num_blocks": 12, "max_num_batched_tokens": 40}
