"""DeepSeek-V2: latent attention, and mixtures of experts with shared experts."""

from __future__ import annotations

from pagewire.kernels.routing import Routing
from pagewire.shared.model.experts_config import chosen_count
from pagewire.shared.model.families.annotations import DecoderModel, LayerFactory
from pagewire.shared.model.fields import MAX_COUNT, Fields
from pagewire.shared.model.latent_config import LatentConfig, read_latent, read_latent_experts
from pagewire.shared.model.model_config import Defaults
from pagewire.shared.model.windows import refuse_window

_DEFAULTS = Defaults(
    vocab_size=102_400,
    intermediate_size=11_008,
    max_position_embeddings=2048,
    special_tokens=(1, 2),
    mlp_bias=False,
)


def parse_config(fields: Fields) -> LatentConfig:
    """Read the config.json of a DeepSeek-V2.

    Raises:
        ModelLoadError: a field is wrong, or a variant is not supported; one line.
    """
    refuse_window(fields)
    count = fields.positive_int("n_routed_experts", 64, MAX_COUNT)
    return read_latent(
        "DeepseekV2ForCausalLM",
        fields,
        _DEFAULTS,
        experts=read_latent_experts(fields, _routing(fields, count), count, size=1407, shared=2),
        dense_layers=0,
        interleaved=True,
    )


def _routing(fields: Fields, count: int) -> Routing:
    """Return the rule by which a token's experts are chosen."""
    method = fields.raw.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        raise fields.error(
            f"topk_method {method!r} is not supported; supported are greedy, group_limited_greedy"
        )
    scores = fields.raw.get("scoring_func") or "softmax"
    if scores != "softmax":
        raise fields.error(f"scoring_func {scores!r} is not supported; only 'softmax'")
    if fields.flag("norm_topk_prob", False):
        raise fields.error("norm_topk_prob is not supported: Hugging Face's code ignores it")
    is_limited = method == "group_limited_greedy"
    return Routing(
        top_k=chosen_count(fields, count, None),
        scale=fields.positive_float("routed_scaling_factor", 1.0),
        groups=fields.positive_int("n_group") if is_limited else 1,
        top_groups=fields.positive_int("topk_group") if is_limited else 1,
    )


def build(config: LatentConfig, make: LayerFactory) -> DecoderModel:
    """Compose a model with latent attention; all layers except the first ones have mixtures."""
    cos_sin = make.cos_sin(config.rope, config.head_dim)
    layers = [
        make.pre_norm_layer(
            config,
            make.latent_attention(config, cos_sin),
            make.with_shared_expert(config, "shared_experts", wide_router=True)
            if is_sparse
            else make.mlp(config),
        )
        for is_sparse in config.sparse
    ]
    return make.model(config, layers)
