"""Gemma 2: norms around attention and feed-forward, soft caps, every other layer with a window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagewire.shared.model.fields import Fields
from pagewire.shared.model.model_config import Defaults, ModelConfig, read_config
from pagewire.shared.model.windows import read_window, sliding_layers, with_windows

if TYPE_CHECKING:
    from pagewire.shared.model.layers.decoder import DecoderModel
    from pagewire.shared.model.layers.factory import LayerFactory

_DEFAULTS = Defaults(
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
)
_WINDOW = 4096


@dataclass(frozen=True, slots=True)
class Gemma2Config(ModelConfig):
    """A Gemma 2.

    Attributes:
        attention_multiplier: factor of the scores, instead of the inverse root of the head size.
        scores_cap: a score x becomes `cap * tanh(x / cap)`; None means no cap.
        logits_cap: the same for logits.
    """

    attention_multiplier: float
    scores_cap: float | None
    logits_cap: float | None


def parse_config(fields: Fields) -> Gemma2Config:
    """Read the config.json of a Gemma 2.

    Raises:
        ModelLoadError: a field is wrong, or a variant is not supported; one line.
    """
    refuse_bidirectional(fields)
    bias = fields.flag("attention_bias", False)
    config = read_config(
        Gemma2Config,
        "Gemma2ForCausalLM",
        fields,
        _DEFAULTS,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=False,
        attention_multiplier=fields.positive_float("query_pre_attn_scalar", 256) ** -0.5,
        scores_cap=read_cap(fields, "attn_logit_softcapping", 50.0),
        logits_cap=read_cap(fields, "final_logit_softcapping", 30.0),
    )
    sliding = sliding_layers(fields, config.num_layers, lambda index: index % 2 == 0)
    return with_windows(fields, config, read_window(fields, _WINDOW), sliding)


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


def build(config: Gemma2Config, make: LayerFactory) -> DecoderModel:
    """Compose layers with capped attention and a feed-forward layer with GELU."""
    make = make.with_norms("plus one")
    cos_sin = make.cos_sin(config)
    layers = [
        make.sandwich_layer(
            config,
            make.attention(
                config,
                cos_sin,
                scale=config.attention_multiplier,
                window=window,
                soft_cap=config.scores_cap,
            ),
            make.mlp(config, activation="gelu"),
        )
        for window in config.windows
    ]
    return make.model(
        config,
        layers,
        embedding_multiplier=make.rounded(config.hidden_size**0.5),
        logits_cap=config.logits_cap,
    )
