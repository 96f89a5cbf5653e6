"""gpt-oss, not quantised: clamped gates, attention sinks, a window in every other layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagewire.kernels.gated_silu import GatedSilu
from pagewire.kernels.routing import Routing
from pagewire.shared.model.experts_config import (
    ExpertsConfig,
    MoeConfig,
    chosen_count,
    expert_count,
)
from pagewire.shared.model.fields import MAX_WIDTH, Fields
from pagewire.shared.model.model_config import Defaults, read_config, read_num_layers
from pagewire.shared.model.windows import read_window, sliding_layers, with_windows

if TYPE_CHECKING:
    from pagewire.shared.model.layers.decoder import DecoderModel
    from pagewire.shared.model.layers.factory import LayerFactory

_DEFAULTS = Defaults(
    vocab_size=201_088,
    hidden_size=2880,
    intermediate_size=2880,
    num_layers=36,
    num_heads=64,
    num_kv_heads=8,
    head_dim=64,
    max_position_embeddings=131_072,
    special_tokens=(None, None),
    rms_norm_eps=1e-5,
    rope_theta=150_000.0,
)
_WINDOW = 128
_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


@dataclass(frozen=True, slots=True)
class GptOssConfig(MoeConfig):
    """A gpt-oss.

    Attributes:
        gate_alpha: the gate of an expert is `gate * sigmoid(gate_alpha * gate)`.
        gate_limit: gates are at most this; the values that they multiply are within +- this.
    """

    gate_alpha: float
    gate_limit: float


def parse_config(fields: Fields) -> GptOssConfig:
    """Read the config.json of a gpt-oss.

    Raises:
        ModelLoadError: a field is wrong, or a variant is not supported; one line.
    """
    count = expert_count(fields, ("num_local_experts", "num_experts"), 128)
    experts = ExpertsConfig(
        count,
        fields.positive_int("intermediate_size", _DEFAULTS.intermediate_size, MAX_WIDTH),
        Routing(top_k=chosen_count(fields, count, 4), renormalise=True),
    )
    bias = fields.flag("attention_bias", True)
    config = read_config(
        GptOssConfig,
        "GptOssForCausalLM",
        _with_rope(fields),
        _DEFAULTS,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=True,
        experts=experts,
        sparse=(True,) * read_num_layers(fields, _DEFAULTS.num_layers),
        gate_alpha=fields.positive_float("swiglu_alpha", 1.702),
        gate_limit=fields.positive_float("swiglu_limit", 7.0),
    )
    sliding = sliding_layers(fields, config.num_layers, lambda index: index % 2 == 0)
    return with_windows(fields, config, read_window(fields, _WINDOW), sliding)


def _with_rope(fields: Fields) -> Fields:
    """Return the fields with the family's rotary parameters, if the file has none."""
    if any(fields.raw.get(name) is not None for name in ("rope_scaling", "rope_parameters")):
        return fields
    return Fields({**fields.raw, "rope_parameters": _ROPE}, fields.source)


def build(config: GptOssConfig, make: LayerFactory) -> DecoderModel:
    """Compose a Llama with attention sinks and mixtures."""
    make = make.with_norms("wide")
    cos_sin = make.cos_sin(config)
    activation = GatedSilu(config.gate_alpha, up_offset=1.0, limit=config.gate_limit)
    layers = [
        make.pre_norm_layer(
            config,
            make.attention(config, cos_sin, window=window, sinks=True),
            make.experts(
                config,
                config.experts,
                each=(),
                router="router",
                router_bias=True,
                biases=True,
                activation=activation,
                interleaved=True,
                transposed=True,
            ),
        )
        for window in config.windows
    ]
    return make.model(config, layers)
