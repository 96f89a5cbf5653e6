"""OLMo 2: norms after attention and feed-forward, and one norm each for all queries and keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagewire.shared.model.fields import Fields
from pagewire.shared.model.model_config import Defaults, ModelConfig, read_config
from pagewire.shared.model.windows import refuse_window

if TYPE_CHECKING:
    from pagewire.shared.model.layers.decoder import DecoderModel
    from pagewire.shared.model.layers.factory import LayerFactory

_DEFAULTS = Defaults(
    vocab_size=50_304,
    intermediate_size=11_008,
    max_position_embeddings=2048,
    special_tokens=(None, 50_279),
    rms_norm_eps=1e-5,
)


def parse_config(fields: Fields) -> ModelConfig:
    """Read the config.json of an OLMo 2.

    Raises:
        ModelLoadError: a field is wrong, or a variant is not supported; one line.
    """
    bias = fields.flag("attention_bias", False)
    config = read_config(
        ModelConfig,
        "Olmo2ForCausalLM",
        fields,
        _DEFAULTS,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=False,
    )
    refuse_window(fields)
    return config


def build(config: ModelConfig, make: LayerFactory) -> DecoderModel:
    """Compose layers whose outputs are normalised before they are added."""
    make = make.with_norms("wide")
    cos_sin = make.cos_sin(config)
    layers = [
        make.post_norm_layer(
            config, make.attention(config, cos_sin, qk_norm="projection"), make.mlp(config)
        )
        for _ in range(config.num_layers)
    ]
    return make.model(config, layers)
