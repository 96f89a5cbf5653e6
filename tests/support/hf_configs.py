"""Compares what a directory's config.json means to us and to transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers

from pagewire.shared.model.config import load_config

SLIDING = "sliding_attention"
# Transformers' class, where it is not that of the architecture's name.
_CLASSES = {
    "Gemma3ForCausalLM": "Gemma3TextConfig",
    "Gemma3ForConditionalGeneration": "Gemma3Config",
    "Mistral3ForConditionalGeneration": "Mistral3Config",
}
# Fields that a file needs so that our defaults are Hugging Face's. The defaults of most classes
# have a window that no layer uses.
_WITHOUT_WINDOW = {"sliding_window": None}
_NEEDED: dict[str, dict[str, Any]] = {
    "Olmo3ForCausalLM": {},
    "Gemma2ForCausalLM": {},
    "Gemma3ForCausalLM": {},
    "Gemma3ForConditionalGeneration": {},
    "GptOssForCausalLM": {},
    "Cohere2ForCausalLM": {},
    "DeepseekV2ForCausalLM": {"num_experts_per_tok": 6},  # without it nothing is computed
    # Tied by default; the published models are not tied, although their files lack the field.
    "Mistral3ForConditionalGeneration": {"tie_word_embeddings": False},
    "GraniteMoeHybridForCausalLM": {
        "num_local_experts": 0,
        "num_hidden_layers": 2,
        "layer_types": ["full_attention"] * 2,
        "mamba_n_heads": 1,
    },
}
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

_OTHER_NAMES = {
    "rms_norm_eps": ("layer_norm_eps",),
    "intermediate_size": ("shared_intermediate_size",),
}


def config_class(architecture: str) -> type[Any]:
    """Return transformers' class of an architecture's configuration."""
    name = _CLASSES.get(architecture, architecture.replace("ForCausalLM", "Config"))
    found: type[Any] = getattr(transformers, name)
    return found


def needed_fields(architecture: str) -> dict[str, Any]:
    """Return the fields without which transformers' defaults mean something else, or nothing."""
    return _NEEDED.get(architecture, _WITHOUT_WINDOW)


def default_content(architecture: str) -> dict[str, Any]:
    """Return a config.json of transformers' defaults, with what these lack."""
    config = config_class(architecture)(**needed_fields(architecture))
    content: dict[str, Any] = config.to_dict()
    return content


def assert_same(path: Path, theirs: transformers.PreTrainedConfig) -> None:
    """Check that the fields of a directory's config.json mean the same to transformers."""
    ours = load_config(path)
    for name, our_name in _SAME_FIELDS.items():
        name = next((each for each in _OTHER_NAMES.get(name, ()) if hasattr(theirs, each)), name)
        assert getattr(ours, our_name) == getattr(theirs, name), name
    head_dim = getattr(theirs, "head_dim", None)
    assert ours.head_dim == (head_dim or theirs.hidden_size // theirs.num_attention_heads)
    eos = theirs.eos_token_id
    ends = eos if isinstance(eos, list) else [] if eos is None else [eos]
    assert list(ours.eos_token_ids) == ends
    rope = theirs.rope_parameters
    if SLIDING in rope:  # whose layers have angles of their own
        thetas = [each and each.theta for each in ours.ropes]
        assert thetas == [rope[kind]["rope_theta"] for kind in theirs.layer_types]
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
