"""OLMoE: mixtures of experts, and one norm each for all query heads and all key heads."""

from __future__ import annotations

from pagewire.shared.model.experts_config import MoeConfig, read_experts
from pagewire.shared.model.families.annotations import DecoderModel, LayerFactory
from pagewire.shared.model.fields import MAX_WIDTH, Fields
from pagewire.shared.model.model_config import Defaults, read_config, read_num_layers
from pagewire.shared.model.windows import refuse_window

_DEFAULTS = Defaults(
    vocab_size=50_304,
    hidden_size=2048,
    intermediate_size=2048,
    num_layers=16,
    num_heads=16,
    max_position_embeddings=4096,
    special_tokens=(None, 50_279),
    rms_norm_eps=1e-5,
)


def parse_config(fields: Fields) -> MoeConfig:
    """Read the config.json of an OLMoE.

    Raises:
        ModelLoadError: a field is wrong, or a variant is not supported; one line.
    """
    if fields.raw.get("clip_qkv") is not None:
        raise fields.error("clip_qkv is not supported; queries, keys and values are not clipped")
    experts = read_experts(
        fields,
        count=64,
        top_k=8,
        size=fields.positive_int("intermediate_size", _DEFAULTS.intermediate_size, MAX_WIDTH),
    )
    refuse_window(fields)
    return read_config(
        MoeConfig,
        "OlmoeForCausalLM",
        fields,
        _DEFAULTS,
        experts=experts,
        sparse=(True,) * read_num_layers(fields, _DEFAULTS.num_layers),
    )


def build(config: MoeConfig, make: LayerFactory) -> DecoderModel:
    """Compose a Llama with norms of the projections and a mixture in each layer."""
    return make.decoder(config, qk_norm="projection")
