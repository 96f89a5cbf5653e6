"""Requests that ask for more than temperature, min_p, top_k and top_p, one kind after the other."""

from __future__ import annotations

from typing import Any

# The names are those of HTTP bodies and `SamplingParams`.
SHAPES: list[dict[str, Any]] = [
    {"repetition_penalty": 2.5},
    {"frequency_penalty": 1.7, "presence_penalty": 1.4},
    {"logit_bias": {40: 7.5, 300: 9.0, 17: -100.0}},
    {},
    {"min_tokens": 20},
    {"allowed_token_ids": list(range(3, 900, 2))},
    {"bad_words": ["the", "import this", "self"], "min_p": 0.02},
    {
        "repetition_penalty": 1.4,
        "presence_penalty": -0.5,
        "frequency_penalty": 1.3,
        "logit_bias": {50: 3.0},
        "bad_words": ["is", "a"],
        "min_tokens": 5,
        "min_p": 0.01,
        "top_k": 60,
        "top_p": 0.95,
    },
]


def shaped_fields(index: int) -> dict[str, Any]:
    """Return the fields of request number `index`; every second one is greedy."""
    choice = {"temperature": 0.0} if index % 2 else {"temperature": 0.8, "seed": 500 + index}
    return SHAPES[index // 2 % len(SHAPES)] | choice
