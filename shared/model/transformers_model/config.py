"""Reads the config.json of any decoder by common field names; torch is not imported."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata
from typing import Any

from packaging.version import Version

from pagewire.shared.base.errors import ConfigError
from pagewire.shared.base.installing import install_command
from pagewire.shared.model.fields import MAX_COUNT, MAX_TOKENS, MAX_WIDTH, Fields
from pagewire.shared.model.model_config import (
    ModelConfig,
    check_groups,
    read_dtype,
    read_num_layers,
)
from pagewire.shared.model.rope_config import ROPE_TYPES, RopeConfig, original_context, raw_rope
from pagewire.shared.model.windows import SLIDING, read_window, sliding_layers

# Other names of fields, in config.json of the oldest models.
_NAMES = {
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "num_key_value_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv"),
    "max_position_embeddings": ("max_position_embeddings", "n_positions", "max_seq_len"),
}
_OLDEST = 5  # oldest major release of transformers that is supported
_OUTPUT_HEADS = ("ForCausalLM", "LMHeadModel")
_STATE = "some of its layers keep a state other than keys and values"
_LATENT = "it caches latent vectors in place of keys and values"
# Fields that, if they are neither null nor false, mark a model as one that cannot be computed
# exactly.
_REFUSED: dict[str, str] = {
    "text_config": "it takes more than text",
    "vision_config": "it takes more than text",
    "audio_config": "it takes more than text",
    "is_encoder_decoder": "it has an encoder",
    "add_cross_attention": "it has an encoder",
    "alibi": "its scores have linear biases (ALiBi)",
    "use_bidirectional_attention": "its attention is not causal",
    "attn_logit_softcapping": "its scores are capped",
    "attention_chunk_size": "some of its layers attend to chunks",
    "index_topk": "its attention chooses among the tokens",
    "kv_lora_rank": _LATENT,
    "mamba_d_state": _STATE,
    "ssm_state_size": _STATE,
    "state_size": _STATE,
    "lru_width": _STATE,
    "conv_L_cache": _STATE,
    "linear_conv_kernel_dim": _STATE,
    "quantization_config": "quantised checkpoints are not supported; pass an unquantised one",
}


@dataclass(frozen=True, slots=True)
class TransformersConfig(ModelConfig):
    """A decoder that transformers builds.

    Fields that only a family's layers need have no meaning here: `intermediate_size`,
    `rms_norm_eps`, the biases, and the fields of `rope` that do not bound the context.
    """


def parse_config(architecture: str, fields: Fields) -> TransformersConfig:
    """Read the fields that the KV cache, the router and the limits of requests need.

    Args:
        architecture: the name of transformers' class.
        fields: the fields of config.json.

    Raises:
        ModelLoadError: a field is missing or wrong, or the model is of a kind that cannot be
            computed exactly; one line.
    """
    why = why_refused(architecture, fields)
    if why is not None:
        raise fields.error(f"architecture {architecture} is not supported: {why}")
    fields = _with_common_names(fields)
    hidden_size = fields.positive_int("hidden_size", most=MAX_WIDTH)
    num_heads = fields.positive_int("num_attention_heads", most=MAX_COUNT)
    num_layers = read_num_layers(fields)
    positions = fields.positive_int("max_position_embeddings", most=MAX_TOKENS)
    rope = _read_rope(fields, positions)
    context = rope.context(positions)
    vocab_size = fields.positive_int("vocab_size", most=MAX_TOKENS)
    return TransformersConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=0,
        num_layers=num_layers,
        windows=_windows(fields, num_layers, context),
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(fields, num_heads),
        head_dim=fields.positive_int("head_dim", hidden_size // num_heads, MAX_WIDTH),
        rms_norm_eps=0.0,
        rope=rope,
        max_position_embeddings=context,
        tie_word_embeddings=fields.flag("tie_word_embeddings", True),
        dtype=read_dtype(fields),
        eos_token_ids=fields.eos_token_ids(vocab_size),
        bos_token_id=fields.token_id("bos_token_id", None),
    )


def why_refused(architecture: str, fields: Fields) -> str | None:
    """Return why a model cannot be computed, by its config.json; None if it may be."""
    for name, why in _REFUSED.items():
        if fields.raw.get(name) not in (None, False):
            return f"{why} ({name})"
    return None if architecture.endswith(_OUTPUT_HEADS) else "it is not a decoder by its name"


def require_transformers() -> None:
    """Check that transformers is installed, without importing it.

    Raises:
        ConfigError: it is not installed, or too old; one line with the command that installs it.
    """
    try:
        version = metadata.version("transformers")
    except metadata.PackageNotFoundError:
        version = "0"
    if Version(version).major < _OLDEST:
        raise ConfigError(
            f"--model-impl transformers needs the package transformers {_OLDEST} or later: "
            f"{install_command('transformers')}"
        )


def _with_common_names(fields: Fields) -> Fields:
    """Return the fields under the names that most models have."""
    renamed: dict[str, Any] = {}
    for name, others in _NAMES.items():
        values = (fields.raw[other] for other in others if fields.raw.get(other) is not None)
        renamed[name] = next(values, None)
    return Fields({**fields.raw, **renamed}, fields.source)


def _num_kv_heads(fields: Fields, num_heads: int) -> int:
    """Return the number of KV heads; `multi_query` is GPT-BigCode's field for a single one."""
    count = 1 if fields.flag("multi_query", False) else num_heads
    count = fields.positive_int("num_key_value_heads", count, MAX_COUNT)
    check_groups(fields, num_heads, count)
    return count


def _read_rope(fields: Fields, positions: int) -> RopeConfig:
    """Return the rotary parameters that bound the context: of several sets, the narrowest."""
    raw = raw_rope(fields)
    if not raw or not isinstance(raw, dict):
        return RopeConfig()
    sets = [entry for entry in raw.values() if isinstance(entry, dict)] or [raw]
    ropes = [_read_set(fields, parameters, positions) for parameters in sets]
    return min(ropes, key=lambda rope: rope.context(positions))


def _read_set(fields: Fields, raw: dict[str, Any], positions: int) -> RopeConfig:
    rope = Fields(raw, fields.source)
    named = raw.get("rope_type", raw.get("type", "default"))
    if named == "su":  # the first name of longrope
        named = "longrope"
    rope_type = next((kind for kind in ROPE_TYPES if kind == named), None)
    if rope_type is None:  # transformers supports or refuses it
        return RopeConfig()
    return RopeConfig(
        rope_type,
        factor=rope.positive_float("factor", 1.0),
        original_max_position_embeddings=original_context(fields, rope, positions),
    )


def _windows(fields: Fields, num_layers: int, context: int) -> tuple[int | None, ...]:
    """Return each layer's window, see `ModelConfig.windows`; a worker checks them when it loads.

    Older files of some families have the interval of full-attention layers instead of
    `layer_types`.
    """
    window = read_window(fields, None) if fields.flag("use_sliding_window", True) else None
    interval = fields.raw.get("sliding_window_pattern")
    if type(interval) is not int or interval < 1:
        interval = 0
    sliding = sliding_layers(
        fields,
        num_layers,
        lambda index: window is not None and (not interval or (index + 1) % interval != 0),
    )
    if any(sliding) and window is None:
        raise fields.error(f"layer_types has {SLIDING}, but no sliding_window is in use")
    shorter = window if window is not None and window < context else None
    return tuple(shorter if slides else None for slides in sliding)
