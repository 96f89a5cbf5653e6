"""Mixtures of experts: their configuration, read from config.json; torch is not imported."""

from __future__ import annotations

from dataclasses import dataclass

from pagewire.kernels.gated_silu import SILU, GatedSilu
from pagewire.kernels.routing import Routing
from pagewire.shared.model.fields import MAX_COUNT, MAX_WIDTH, Fields
from pagewire.shared.model.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """The mixture of experts of each layer that has one.

    Attributes:
        count: number of experts that tokens are routed to.
        intermediate_size: intermediate size of one of them.
        routing: the rule by which a token's experts are chosen.
        shared_size: intermediate size of the expert that all tokens share; 0: there is none.
        activation: activation between an expert's projections.
    """

    count: int
    intermediate_size: int
    routing: Routing
    shared_size: int = 0
    activation: GatedSilu = SILU


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig(ModelConfig):
    """A decoder with mixtures of experts.

    Attributes:
        experts: the mixture of each layer that has one.
        sparse: whether each layer has one; the others have a dense feed-forward layer.
    """

    experts: ExpertsConfig
    sparse: tuple[bool, ...]


def read_experts(
    fields: Fields, *, count: int, top_k: int, size: int, shared_size: int = 0
) -> ExpertsConfig:
    """Read a mixture as Qwen's and OLMoE's files have it.

    Args:
        fields: of config.json.
        count: number of experts, by default.
        top_k: number of experts of a token, by default.
        size: intermediate size of an expert.
        shared_size: intermediate size of the shared expert; 0: there is none.

    Raises:
        ModelLoadError: a field is wrong; one line.
    """
    count = expert_count(fields, ("num_experts", "num_local_experts"), count)
    routing = Routing(
        top_k=chosen_count(fields, count, top_k),
        renormalise=fields.flag("norm_topk_prob", False),
    )
    return ExpertsConfig(count, size, routing, shared_size)


def read_renormalised_experts(
    fields: Fields, *, count: int, top_k: int, size: int, activation: GatedSilu = SILU
) -> ExpertsConfig:
    """Read a mixture as Mixtral's, Granite's and gpt-oss's files have it.

    Args:
        fields: of config.json.
        count: number of experts, by default.
        top_k: number of experts of a token, by default.
        size: intermediate size of an expert, by default.
        activation: activation between an expert's projections.

    Raises:
        ModelLoadError: a field is wrong; one line.
    """
    count = expert_count(fields, ("num_local_experts", "num_experts"), count)
    return ExpertsConfig(
        count,
        fields.positive_int("intermediate_size", size, MAX_WIDTH),
        Routing(top_k=chosen_count(fields, count, top_k), renormalise=True),
        activation=activation,
    )


def expert_count(fields: Fields, names: tuple[str, str], default: int) -> int:
    """Return the number of experts, by the first of `names` that the file has.

    Raises:
        ModelLoadError: it is not a positive integer; one line.
    """
    present = [name for name in names if fields.raw.get(name) is not None]
    return fields.positive_int((present or list(names))[0], default, MAX_COUNT)


def chosen_count(fields: Fields, experts: int, default: int | None) -> int:
    """Return how many of `experts` a token has.

    Raises:
        ModelLoadError: it is missing without a default, not a positive integer, or more than
            `experts`; one line.
    """
    top_k = fields.positive_int("num_experts_per_tok", default)
    if top_k > experts:
        raise fields.error(f"num_experts_per_tok ({top_k}) is more than the {experts} experts")
    return top_k


def sparse_layers(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Return whether each layer has a mixture, by `decoder_sparse_step` and `mlp_only_layers`.

    Raises:
        ModelLoadError: a field is wrong; one line.
    """
    step = fields.positive_int("decoder_sparse_step", 1)
    dense = fields.raw.get("mlp_only_layers")
    dense = [] if dense is None else dense
    if not isinstance(dense, list) or any(type(layer) is not int or layer < 0 for layer in dense):
        raise fields.error(f"mlp_only_layers must be a list of layers from 0, not {dense!r}")
    return tuple(n not in dense and (n + 1) % step == 0 for n in range(num_layers))
