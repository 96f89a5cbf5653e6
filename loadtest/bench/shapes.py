"""Shapes of the models with which the engine is timed, and the bytes that a decode step reads.

A shape is the content of a config.json; weights are random.
"""

from __future__ import annotations

from typing import Any

import torch

from pagewire.shared.kv.kv_layout import KvLayout
from pagewire.shared.model.experts_config import MoeConfig
from pagewire.shared.model.model_config import ModelConfig
from pagewire.shared.worker.estimate import weight_bytes

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
# Its output head is its embedding table.
LLAMA_1B: dict[str, Any] = LLAMA_8B | {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
# The published model has 40,960 positions; more of them do not change a step of a shorter context.
QWEN3_30B_A3B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 151936,
    "max_position_embeddings": 131072,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "hidden_act": "silu",
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
QWEN2_7B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 131072,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "hidden_act": "silu",
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
# The published model has 32,768 positions.
QWEN2_0_5B: dict[str, Any] = QWEN2_7B | {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
GEMMA3_12B: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_size": 3840,
    "intermediate_size": 15360,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 1024,
    "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 8,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "bos_token_id": 2,
    "eos_token_id": 1,
}
DEFAULT_MODEL = "llama-8b"
SHAPES = {
    DEFAULT_MODEL: LLAMA_8B,
    "qwen3-30b-a3b": QWEN3_30B_A3B,
    "qwen2-7b": QWEN2_7B,
    "llama-1b": LLAMA_1B,
    "qwen2-0.5b": QWEN2_0_5B,
    "gemma3-12b": GEMMA3_12B,
}


def vocab_used(vocab_size: int) -> int:
    """Return the upper bound (exclusive) of token ids in prompts: a multiple of 1,000.

    So special tokens, which are the last ones, are not in prompts.
    """
    return vocab_size // 1000 * 1000


VOCAB_USED = vocab_used(LLAMA_8B["vocab_size"])


def weights_read(config: ModelConfig, experts: float | None) -> float:
    """Return the bytes of bf16 weights that a decode step reads.

    These are all weights without two exceptions: the embedding table, unless it is also the output
    head (a step reads one row for each sequence), and experts that no sequence of the batch has.

    Args:
        config: the model's shape.
        experts: distinct experts of a layer in the step; None if the model has none.
    """
    size = torch.bfloat16.itemsize
    read: float = weight_bytes(config, torch.bfloat16)
    if not config.tie_word_embeddings:
        read -= config.vocab_size * config.hidden_size * size
    if isinstance(config, MoeConfig) and experts is not None:
        expert = 3 * config.hidden_size * config.experts.intermediate_size * size
        read -= sum(config.sparse) * (config.experts.count - experts) * expert
    return read


def kv_read(config: ModelConfig, context: float) -> float:
    """Return the bytes of bf16 KV that a decode step reads of a sequence of `context` tokens."""
    of_a_layer = KvLayout.of([None], config.cached_token, 1, "bfloat16").block_bytes
    tokens = sum(min(context, window or context) for window in config.windows)
    return of_a_layer * tokens
