"""Compares what a directory's config.json says to us and to transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from pagewire.shared.model.config import load_config
from pagewire.shared.model.layer_ropes import TwoRopesConfig

SLIDING = "sliding_attention"
# Hugging Face's name of a field, and ours.
_SAME_FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "rms_norm_eps": "rms_norm_eps",
    "max_position_embeddings": "max_position_embeddings",
    "tie_word_embeddings": "tie_word_embeddings",
    "bos_token_id": "bos_token_id",
}


def assert_same(path: Path, theirs: PreTrainedConfig) -> None:
    """Check that the fields of a directory's config.json mean the same to transformers."""
    ours = load_config(path)
    for name, our_name in _SAME_FIELDS.items():
        if name == "rms_norm_eps" and hasattr(theirs, "layer_norm_eps"):
            name = "layer_norm_eps"
        assert getattr(ours, our_name) == getattr(theirs, name), name
    head_dim = getattr(theirs, "head_dim", None)
    assert ours.head_dim == (head_dim or theirs.hidden_size // theirs.num_attention_heads)
    eos = theirs.eos_token_id
    ends = eos if isinstance(eos, list) else [] if eos is None else [eos]
    assert list(ours.eos_token_ids) == ends
    rope = theirs.rope_parameters
    if isinstance(ours, TwoRopesConfig):
        assert ours.local_rope.theta == rope[SLIDING]["rope_theta"]
        assert ours.sliding == tuple(kind == SLIDING for kind in theirs.layer_types)
        rope = rope["full_attention"]
    assert ours.rope.theta == rope["rope_theta"]
    assert ours.rope.rope_type == rope["rope_type"]
    assert ours.windows == tuple(_windows(theirs, ours.max_position_embeddings))


def _windows(theirs: Any, context: int) -> list[int | None]:
    """Return each layer's window; None where it hides nothing."""
    window = getattr(theirs, "sliding_window", None)
    kinds = getattr(theirs, "layer_types", None)
    if kinds is None:  # of all layers alike
        kinds = [SLIDING] * theirs.num_hidden_layers
        window = window if getattr(theirs, "use_sliding_window", True) else None
    shorter = window if window is not None and window < context else None
    return [shorter if kind == SLIDING else None for kind in kinds]
