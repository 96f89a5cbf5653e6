"""Parts of the shapes of several families of tiny models."""

from __future__ import annotations

from typing import Any

# Family -> start of Hugging Face's class names, fields of all its shapes, and its own shapes.
Families = dict[str, tuple[str, dict[str, Any], dict[str, dict[str, Any]]]]

YARN = {
    "rope_type": "yarn",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
SWITCHED = {"num_key_value_heads": 2, "use_sliding_window": True, "sliding_window": 9}
BIASES = {"num_key_value_heads": 2, "attention_bias": True}
GRANITE = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.05,
    "residual_multiplier": 0.22,
    "logits_scaling": 0.25,
}


def rope(**parameters: Any) -> dict[str, Any]:
    """Return the fields of a shape with these rope parameters."""
    return {"num_key_value_heads": 2, "rope_parameters": parameters}
