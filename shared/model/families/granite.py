"""Granite: a Llama with multipliers on embedding, scores, layer outputs and logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from pagewire.shared.model.fields import Fields
from pagewire.shared.model.model_config import Defaults, ModelConfig, read_config
from pagewire.shared.model.windows import refuse_window

if TYPE_CHECKING:
    import torch

    from pagewire.shared.model.layers.attention import Attention
    from pagewire.shared.model.layers.decoder import DecoderModel
    from pagewire.shared.model.layers.experts import Experts
    from pagewire.shared.model.layers.factory import LayerFactory
    from pagewire.shared.model.layers.linear import NamedTarget
    from pagewire.shared.model.layers.mlp import Mlp

_DEFAULTS = Defaults(
    vocab_size=32_000,
    intermediate_size=11_008,
    max_position_embeddings=2048,
    special_tokens=(1, 2),
)


@dataclass(frozen=True, slots=True)
class GraniteConfig(ModelConfig):
    """A Granite.

    Attributes:
        embedding_multiplier: factor of the embeddings.
        attention_multiplier: factor of the scores, instead of the inverse root of the head size.
        residual_multiplier: factor of the outputs of attention and feed-forward.
        logits_scaling: divisor of logits.
    """

    embedding_multiplier: float
    attention_multiplier: float
    residual_multiplier: float
    logits_scaling: float


Granite = TypeVar("Granite", bound=GraniteConfig)


class Scaled:
    """Attention or a feed-forward layer whose output is multiplied."""

    __slots__ = ("multiplier", "part")

    def __init__(self, part: Attention | Mlp | Experts, multiplier: float) -> None:
        self.part = part
        self.multiplier = multiplier

    def forward(self, hidden: torch.Tensor, *more: object) -> torch.Tensor:
        """Map hidden states as the part does."""
        out: torch.Tensor = self.part.forward(hidden, *more)  # type: ignore[arg-type]
        return out.mul_(self.multiplier)

    def targets(self, name: str) -> Iterator[NamedTarget]:
        """Yield what fills the part."""
        yield from self.part.targets(name)


def parse_config(fields: Fields) -> GraniteConfig:
    """Read the config.json of a Granite.

    Raises:
        ModelLoadError: a field is wrong, or a variant is not supported; one line.
    """
    mlp_bias = fields.flag("mlp_bias", False)
    return read_granite(GraniteConfig, "GraniteForCausalLM", fields, mlp_bias=mlp_bias)


def read_granite(kind: type[Granite], architecture: str, fields: Fields, **own: Any) -> Granite:
    """Read the fields that Granites with and without experts have in common.

    Args:
        kind: the class of the configuration.
        architecture: Hugging Face's class name.
        fields: the fields of config.json.
        own: the remaining fields of `kind`.

    Raises:
        ModelLoadError: a field is wrong, or a variant is not supported; one line.
    """
    bias = fields.flag("attention_bias", False)
    config = read_config(
        kind,
        architecture,
        fields,
        _DEFAULTS,
        qkv_bias=bias,
        o_bias=bias,
        embedding_multiplier=fields.positive_float("embedding_multiplier", 1.0),
        attention_multiplier=fields.positive_float("attention_multiplier", 1.0),
        residual_multiplier=fields.positive_float("residual_multiplier", 1.0),
        logits_scaling=fields.positive_float("logits_scaling", 1.0),
        **own,
    )
    refuse_window(fields)
    return config


def build(config: GraniteConfig, make: LayerFactory) -> DecoderModel:
    """Compose a Llama with the multipliers."""
    return compose(config, make, lambda: make.mlp(config), "mlp")


def compose(
    config: GraniteConfig,
    make: LayerFactory,
    make_mlp: Callable[[], Mlp | Experts],
    name: str,
    *,
    rotates: bool = True,
) -> DecoderModel:
    """Compose a Llama with the multipliers and any feed-forward layers.

    Args:
        config: the model's configuration.
        make: the factory of layers.
        make_mlp: returns a layer's feed-forward layer.
        name: the feed-forward layer's name in the checkpoint.
        rotates: whether queries and keys are rotated.
    """
    cos_sin = make.cos_sin(config) if rotates else None
    layers = [
        make.pre_norm_layer(
            config,
            Scaled(
                make.attention(config, cos_sin, scale=config.attention_multiplier),
                config.residual_multiplier,
            ),
            Scaled(make_mlp(), config.residual_multiplier),
            mlp_name=name,
        )
        for _ in range(config.num_layers)
    ]
    return make.model(
        config,
        layers,
        embedding_multiplier=config.embedding_multiplier,
        logits_divisor=config.logits_scaling,
    )
