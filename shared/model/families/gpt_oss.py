"""gpt-oss: clamped gates, attention sinks, a window in every other layer."""

from __future__ import annotations

from functools import partial

from pagewire.kernels.gated_silu import GatedSilu
from pagewire.shared.model.experts_config import MoeConfig, read_renormalised_experts
from pagewire.shared.model.families.annotations import DecoderModel, LayerFactory
from pagewire.shared.model.fields import Fields
from pagewire.shared.model.model_config import Defaults, read_config, read_num_layers
from pagewire.shared.model.windows import read_window, with_some_windows

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
    attention_bias=True,
    norm_style="wide",
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


def parse_config(fields: Fields) -> MoeConfig:
    """Read the config.json of a gpt-oss.

    Raises:
        ModelLoadError: a field is wrong, or a variant is not supported; one line.
    """
    activation = GatedSilu(
        fields.positive_float("swiglu_alpha", 1.702),
        up_offset=1.0,
        limit=fields.positive_float("swiglu_limit", 7.0),
    )
    config = read_config(
        MoeConfig,
        "GptOssForCausalLM",
        _with_rope(fields),
        _DEFAULTS,
        mlp_bias=True,
        experts=read_renormalised_experts(
            fields,
            count=128,
            top_k=4,
            size=_DEFAULTS.intermediate_size,
            activation=activation,
        ),
        sparse=(True,) * read_num_layers(fields, _DEFAULTS.num_layers),
    )
    window = read_window(fields, _WINDOW)
    return with_some_windows(fields, config, window, lambda index: index % 2 == 0)


def _with_rope(fields: Fields) -> Fields:
    """Return the fields with the family's rotary parameters, if the file has none."""
    if fields.raw.get("rope_scaling") or fields.raw.get("rope_parameters") is not None:
        return fields
    return Fields({**fields.raw, "rope_parameters": _ROPE}, fields.source)


def build(config: MoeConfig, make: LayerFactory) -> DecoderModel:
    """Compose a Llama with attention sinks and mixtures."""
    mixture = partial(
        make.experts,
        config,
        config.experts,
        each=(),
        router="router",
        router_bias=True,
        biases=True,
        interleaved=True,
        transposed=True,
    )
    return make.decoder(config, mlp=mixture, sinks=True)
