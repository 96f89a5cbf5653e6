"""The models that the engine is timed with, and what a decode step of one reads.

A model is the config.json of its shape; its weights are made up, its size follows from the shape.
"""

from __future__ import annotations

from typing import Any

import torch

from pagewire.shared.kv.storage import KvShape
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
# The published Qwen3 has 40,960 positions; more of them change no step of a shorter context.
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
    "gemma3-12b": GEMMA3_12B,
}


def vocab_used(vocab_size: int) -> int:
    """Return the end of the token ids of prompts: in whole thousands, as special ones are last."""
    return vocab_size // 1000 * 1000


VOCAB_USED = vocab_used(LLAMA_8B["vocab_size"])


def distinct_experts(config: ModelConfig, batch: int) -> float | None:
    """Return how many experts of a layer a batch is expected to have; None without a mixture."""
    if not isinstance(config, MoeConfig):
        return None
    count, chosen = config.experts.count, config.experts.routing.top_k
    return float(count * (1 - (1 - chosen / count) ** batch))


def weights_read(config: ModelConfig, batch: int) -> float:
    """Return the bytes of bf16 weights that a decode step reads.

    These are all but the embedding table, of which a step reads a row for each sequence unless it
    is the head as well, and but the experts that no sequence of the batch has.
    """
    size = torch.bfloat16.itemsize
    read: float = weight_bytes(config, torch.bfloat16)
    if not config.tie_word_embeddings:
        read -= config.vocab_size * config.hidden_size * size
    distinct = distinct_experts(config, batch)
    if isinstance(config, MoeConfig) and distinct is not None:
        expert = 3 * config.hidden_size * config.experts.intermediate_size * size
        read -= sum(config.sparse) * (config.experts.count - distinct) * expert
    return read


def kv_read(config: ModelConfig, context: float) -> float:
    """Return the bytes of bf16 KV that a decode step reads of a sequence of `context` tokens."""
    of_a_layer = KvShape(1, config.cached_token, 1, torch.bfloat16).block_bytes
    tokens = sum(min(context, window or context) for window in config.windows)
    return of_a_layer * tokens
