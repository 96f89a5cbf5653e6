"""Shapes of the models with which the engine is timed, and the bytes that a decode step reads.

A shape is the content of a config.json, which is in the folder `models`; weights are random.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from pagewire.shared.kv.kv_layout import KvLayout
from pagewire.shared.model.experts_config import MoeConfig
from pagewire.shared.model.model_config import ModelConfig
from pagewire.shared.worker.estimate import weight_bytes

MODELS = Path(__file__).with_name("models")
# Some have more positions than the published model; a step of a shorter context is the same.
SHAPES: dict[str, dict[str, Any]] = {
    file.stem: json.loads(file.read_text(encoding="utf-8"))
    for file in sorted(MODELS.glob("*.json"))
}
DEFAULT_MODEL = "llama-8b"
LLAMA_8B = SHAPES[DEFAULT_MODEL]


def vocab_used(vocab_size: int) -> int:
    """Return the upper bound (exclusive) of token ids in prompts: a multiple of 1,000.

    So special tokens, which are the last ones, are not in prompts.
    """
    return vocab_size // 1000 * 1000


def random_prompts(rng: random.Random, count: int, length: int, vocab: int) -> list[list[int]]:
    """Return prompts of random token ids below `vocab_used`."""
    return [[rng.randrange(10, vocab) for _ in range(length)] for _ in range(count)]


VOCAB_USED = vocab_used(LLAMA_8B["vocab_size"])


def weights_read(config: ModelConfig, experts: float | None) -> float:
    """Return the bytes of weights that a decode step reads; in bf16 where they are not quantised.

    These are all weights without two exceptions: the embedding table, unless it is also the output
    head (a step reads one row for each sequence), and experts that no sequence of the batch has.

    Args:
        config: the model's shape.
        experts: distinct experts of a layer in the step; None if the model has none.
    """
    whole = weight_bytes(config, torch.bfloat16)
    read: float = whole
    if not config.tie_word_embeddings:
        read -= config.vocab_size * config.hidden_size * torch.bfloat16.itemsize
    if isinstance(config, MoeConfig) and experts is not None:
        count = config.experts.count
        fewer = replace(config, experts=replace(config.experts, count=count - 1))
        read -= (count - experts) * (whole - weight_bytes(fewer, torch.bfloat16))
    return read


def kv_read(config: ModelConfig, context: float) -> float:
    """Return the bytes of bf16 KV that a decode step reads of a sequence of `context` tokens."""
    of_a_layer = KvLayout.of([None], config.cached_token, 1, "bfloat16").block_bytes
    tokens = sum(min(context, window or context) for window in config.windows)
    return of_a_layer * tokens
