"""OLMo 3: as OLMo 2, with windows in three of four layers; these never scale their angles."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagewire.shared.model.fields import Fields
from pagewire.shared.model.layer_ropes import (
    TwoRopesConfig,
    full_fields,
    sliding_rope,
    with_sliding,
)
from pagewire.shared.model.model_config import Defaults, read_config

if TYPE_CHECKING:
    from pagewire.shared.model.layers.decoder import DecoderModel
    from pagewire.shared.model.layers.factory import LayerFactory

_DEFAULTS = Defaults(
    vocab_size=50_304,
    intermediate_size=11_008,
    max_position_embeddings=2048,
    special_tokens=(None, 50_279),
    rms_norm_eps=1e-5,
    rope_theta=500_000.0,
)
_WINDOW = 4096
_PATTERN = 4


def parse_config(fields: Fields) -> TwoRopesConfig:
    """Read the config.json of an OLMo 3.

    Raises:
        ModelLoadError: a field is wrong, or a variant is not supported; one line.
    """
    bias = fields.flag("attention_bias", False)
    config = read_config(
        TwoRopesConfig,
        "Olmo3ForCausalLM",
        full_fields(fields),
        _DEFAULTS,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=False,
        local_rope=sliding_rope(fields, _DEFAULTS.rope_theta, "rope_theta"),
        sliding=(),
    )
    return with_sliding(fields, config, _PATTERN, _WINDOW)


def build(config: TwoRopesConfig, make: LayerFactory) -> DecoderModel:
    """Compose an OLMo 2 with windows and two tables of angles."""
    make = make.with_norms("wide")
    cos_sin, local_cos_sin = make.cos_sin(config), make.cos_sin(config, config.local_rope)
    layers = [
        make.post_norm_layer(
            config,
            make.attention(
                config,
                local_cos_sin if is_sliding else cos_sin,
                qk_norm="projection",
                window=window,
            ),
            make.mlp(config),
        )
        for is_sliding, window in zip(config.sliding, config.windows, strict=True)
    ]
    return make.model(config, layers)
