"""DeepSeek-V3: as DeepSeek-V2, but experts are chosen by sigmoids, within groups, with a bias."""

from __future__ import annotations

from pagewire.kernels.routing import Routing
from pagewire.shared.model.experts_config import chosen_count
from pagewire.shared.model.families.deepseek_v2 import build
from pagewire.shared.model.fields import MAX_COUNT, Fields
from pagewire.shared.model.latent_config import LatentConfig, read_latent, read_latent_experts
from pagewire.shared.model.model_config import Defaults
from pagewire.shared.model.windows import refuse_window

__all__ = ["build", "parse_config"]

_DEFAULTS = Defaults(
    vocab_size=129_280,
    hidden_size=7168,
    intermediate_size=18_432,
    num_layers=61,
    num_heads=128,
    max_position_embeddings=4096,
    special_tokens=(0, 1),
)
# The rules that Hugging Face's code always uses, by their fields in config.json.
_RULES = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}


def parse_config(fields: Fields) -> LatentConfig:
    """Read the config.json of a DeepSeek-V3.

    Raises:
        ModelLoadError: a field is wrong, or a variant is not supported; one line.
    """
    refuse_window(fields)
    for name, rule in _RULES.items():
        if fields.raw.get(name) not in (None, rule):
            raise fields.error(f"{name} {fields.raw[name]!r} is not supported; only {rule!r}")
    count = fields.positive_int("n_routed_experts", 256, MAX_COUNT)
    routing = Routing(
        top_k=chosen_count(fields, count, 8),
        scores="sigmoid",
        renormalise=fields.flag("norm_topk_prob", True),
        scale=fields.positive_float("routed_scaling_factor", 2.5),
        groups=fields.positive_int("n_group", 8),
        top_groups=fields.positive_int("topk_group", 4),
        group_score="best two",
        corrected=True,
    )
    return read_latent(
        "DeepseekV3ForCausalLM",
        fields,
        _DEFAULTS,
        experts=read_latent_experts(fields, routing, count, size=2048, shared=1),
        dense_layers=3,
        interleaved=fields.flag("rope_interleave", True),
    )
