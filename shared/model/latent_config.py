"""Multi-head latent attention, as config.json describes it; torch is not imported.

DeepSeek-V2 (arXiv 2405.04434) introduced it: for each token a layer caches one latent vector, from
which all heads derive their keys and values, and one rotated key that they share.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pagewire.kernels.latent_sizes import WORKSPACE_BYTES, longest_absorbed
from pagewire.kernels.routing import Routing
from pagewire.shared.kv.kv_layout import CachedToken
from pagewire.shared.model.experts_config import ExpertsConfig, MoeConfig
from pagewire.shared.model.fields import MAX_COUNT, MAX_WIDTH, Fields
from pagewire.shared.model.model_config import (
    Defaults,
    read_config,
    read_head_dim,
    read_num_layers,
)
from pagewire.shared.model.rope_config import raw_rope

# Hugging Face's code and DeepSeek's have this in norms of latent vectors, not `rms_norm_eps`.
LATENT_NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig(MoeConfig):
    """A decoder with latent attention and, in some layers, mixtures of experts.

    The size of a head, `head_dim`, is that of its rotated part, as in Hugging Face's configuration.

    Attributes:
        q_rank: size of the latent vector from which queries are computed; None: they are computed
            from the hidden state.
        kv_rank: size of the latent vector from which keys and values are computed.
        nope_dim: size of the part of a query's or key's head that is not rotated.
        value_dim: size of a value's head.
        interleaved: whether each number is rotated with its neighbour; otherwise the first half of
            the rotated part is rotated with the second.
    """

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    value_dim: int
    interleaved: bool

    @property
    def cached_token(self) -> CachedToken:
        """The latent vector and the rotated key, one after the other."""
        return CachedToken(1, 1, self.kv_rank + self.head_dim)

    @property
    def longest_absorbed(self) -> int:
        """The longest chunk without a prefix that attends to latent vectors as they are."""
        return longest_absorbed(self.nope_dim, self.value_dim, self.kv_rank)

    def attention_bytes(self, tokens: int, element_size: int) -> int:
        """Return what an attention layer holds at once of these tokens, its input not counted."""
        heads, projected = self.num_heads, (self.q_rank or 0) + self.kv_rank + self.head_dim
        queries = heads * (self.nope_dim + self.head_dim) + projected
        absorbed = heads * (2 * self.kv_rank + self.value_dim)
        made = heads * (self.value_dim * element_size + (self.value_dim + 2) * 4)
        return tokens * queries * element_size + max(
            tokens * absorbed * element_size, tokens * made + WORKSPACE_BYTES
        )


def read_latent(
    architecture: str,
    fields: Fields,
    defaults: Defaults,
    *,
    experts: ExpertsConfig,
    dense_layers: int,
    interleaved: bool,
) -> LatentConfig:
    """Read what DeepSeek's files have in common.

    Args:
        architecture: Hugging Face's class name.
        fields: of config.json.
        defaults: of the family.
        experts: the mixture of each layer that has one.
        dense_layers: number of first layers without a mixture, by default.
        interleaved: see `LatentConfig`.

    Raises:
        ModelLoadError: a field is wrong, or a variant is not supported; one line.
    """
    nope_dim = fields.positive_int("qk_nope_head_dim", 128, MAX_WIDTH)
    rope_dim = read_head_dim(fields, "qk_rope_head_dim", 64)
    heads = fields.positive_int("num_attention_heads", defaults.num_heads, MAX_COUNT)
    # All heads share one latent vector, whatever number of KV heads the file has.
    own = {"head_dim": rope_dim, "num_key_value_heads": heads}
    first = fields.whole_number("first_k_dense_replace", dense_layers)
    layers = read_num_layers(fields, defaults.num_layers)
    return read_config(
        LatentConfig,
        architecture,
        Fields({**fields.raw, **own}, fields.source),
        defaults,
        experts=experts,
        sparse=tuple(layer >= first for layer in range(layers)),
        q_rank=_query_rank(fields),
        kv_rank=fields.positive_int("kv_lora_rank", 512, MAX_WIDTH),
        nope_dim=nope_dim,
        value_dim=fields.positive_int("v_head_dim", 128, MAX_WIDTH),
        score_scale=_score_scale(fields, nope_dim + rope_dim),
        interleaved=interleaved,
    )


def _query_rank(fields: Fields) -> int | None:
    """Return the size of the latent vectors of queries; None if queries have none."""
    if "q_lora_rank" not in fields.raw or fields.raw["q_lora_rank"] is not None:
        return fields.positive_int("q_lora_rank", 1536, MAX_WIDTH)
    if fields.flag("attention_bias", False):
        raise fields.error("attention_bias is not supported where q_lora_rank is null")
    return None


def read_latent_experts(
    fields: Fields, routing: Routing, count: int, *, size: int, shared: int
) -> ExpertsConfig:
    """Read a mixture as DeepSeek's files have it.

    Args:
        fields: of config.json.
        routing: the rule by which a token's experts are chosen.
        count: number of experts that tokens are routed to.
        size: intermediate size of one, by default.
        shared: number of shared experts, by default; they are computed as one.

    Raises:
        ModelLoadError: a field is wrong, or the experts cannot be divided into groups that are
            large enough for the routing; one line.
    """
    if fields.positive_int("moe_layer_freq", 1) != 1:
        raise fields.error("moe_layer_freq is not 1, which is not supported")
    groups, top_groups = routing.groups, routing.top_groups
    if count % groups or top_groups > groups:
        raise fields.error(
            f"n_group ({groups}) must divide n_routed_experts ({count}), and topk_group "
            f"({top_groups}) must not be more"
        )
    of_group = count // groups
    least = 2 if groups > 1 and routing.group_score == "best two" else 1
    if routing.top_k > top_groups * of_group or of_group < least:
        raise fields.error(
            f"a group of {of_group} experts is too small: a token has {routing.top_k} of "
            f"{top_groups} groups"
        )
    size = fields.positive_int("moe_intermediate_size", size, MAX_WIDTH)
    shared = fields.positive_int("n_shared_experts", shared, MAX_COUNT)
    return ExpertsConfig(count, size, routing, shared * size)


def _score_scale(fields: Fields, head_dim: int) -> float:
    """Return the factor of the scores: the inverse root of the head size, and more with YaRN."""
    raw = raw_rope(fields)
    scale = float(head_dim**-0.5)
    rope = Fields(raw if isinstance(raw, dict) else {}, fields.source)
    rope_type = rope.raw.get("rope_type", rope.raw.get("type", "default"))
    if rope_type == "default" or not rope.raw.get("mscale_all_dim"):
        return scale
    factor = rope.positive_float("factor")
    if factor <= 1.0:
        return scale
    amplitude = 0.1 * rope.positive_float("mscale_all_dim") * math.log(factor) + 1.0
    return scale * amplitude * amplitude
