"""Gemma 2: norms around attention and feed-forward, soft caps, every other layer with a window."""

from __future__ import annotations

from typing import Any

from pagewire.shared.model.families.annotations import DecoderModel, LayerFactory
from pagewire.shared.model.fields import Fields
from pagewire.shared.model.model_config import Defaults, ModelConfig, read_config
from pagewire.shared.model.windows import read_window, with_some_windows

DEFAULTS = Defaults(
    vocab_size=256_000,
    hidden_size=2304,
    intermediate_size=9216,
    num_layers=26,
    num_heads=8,
    num_kv_heads=4,
    head_dim=256,
    max_position_embeddings=8192,
    special_tokens=(2, 1),
    tie_word_embeddings=True,
    activation=("hidden_activation", "gelu_pytorch_tanh"),
    norm_style="plus one",
)
_WINDOW = 4096


def parse_config(fields: Fields) -> ModelConfig:
    """Read the config.json of a Gemma 2.

    Raises:
        ModelLoadError: a field is wrong, or a variant is not supported; one line.
    """
    refuse_bidirectional(fields)
    config = read_config(
        ModelConfig,
        "Gemma2ForCausalLM",
        fields,
        DEFAULTS,
        score_scale=fields.positive_float("query_pre_attn_scalar", 256) ** -0.5,
        scores_cap=read_cap(fields, "attn_logit_softcapping", 50.0),
        logits_cap=read_cap(fields, "final_logit_softcapping", 30.0),
    )
    window = read_window(fields, _WINDOW)
    return with_some_windows(fields, config, window, lambda index: index % 2 == 0)


def refuse_bidirectional(fields: Fields) -> None:
    """Refuse a model whose tokens attend to later ones.

    Raises:
        ModelLoadError: the model is of this kind; one line.
    """
    if fields.flag("use_bidirectional_attention", False):
        raise fields.error("use_bidirectional_attention is not supported; it must be false")


def read_cap(fields: Fields, name: str, default: float | None) -> float | None:
    """Return a soft cap; None (also by an explicit null) if there is none.

    Raises:
        ModelLoadError: the value is neither null nor a positive number; one line.
    """
    if fields.raw.get(name, default) is None:
        return None
    return fields.positive_float(name, default)


def build(config: ModelConfig, make: LayerFactory, **attention: Any) -> DecoderModel:
    """Compose layers with a norm before and after each part, and scaled embeddings.

    Args:
        config: the model's configuration.
        make: the factory of layers.
        attention: options of `LayerFactory.attention`.
    """
    multiplier = make.rounded(config.hidden_size**0.5)
    return make.decoder(config, make.sandwich_layer, embedding_multiplier=multiplier, **attention)
