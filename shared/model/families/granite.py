"""Granite: a Llama with multipliers on embedding, scores, layer outputs and logits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagewire.shared.model.fields import Fields
from pagewire.shared.model.model_config import Defaults, ModelConfig, read_config
from pagewire.shared.model.windows import refuse_window

if TYPE_CHECKING:
    import torch

    from pagewire.shared.model.layers.attention import Attention
    from pagewire.shared.model.layers.decoder import DecoderModel
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
        embedding_multiplier: of the embeddings.
        attention_multiplier: of the scores, in place of the inverse root of the head size.
        residual_multiplier: of what attention and feed-forward add.
        logits_scaling: what logits are divided by.
    """

    embedding_multiplier: float
    attention_multiplier: float
    residual_multiplier: float
    logits_scaling: float


class Scaled:
    """Attention or a feed-forward layer whose output is multiplied."""

    __slots__ = ("multiplier", "part")

    def __init__(self, part: Attention | Mlp, multiplier: float) -> None:
        self.part = part
        self.multiplier = multiplier

    def forward(self, hidden: torch.Tensor, *more: object) -> torch.Tensor:
        """Map `[T, hidden]` to `[T, hidden]`, as the part does."""
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
    bias = fields.flag("attention_bias", False)
    config = read_config(
        GraniteConfig,
        "GraniteForCausalLM",
        fields,
        _DEFAULTS,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
        embedding_multiplier=fields.positive_float("embedding_multiplier", 1.0),
        attention_multiplier=fields.positive_float("attention_multiplier", 1.0),
        residual_multiplier=fields.positive_float("residual_multiplier", 1.0),
        logits_scaling=fields.positive_float("logits_scaling", 1.0),
    )
    refuse_window(fields)
    return config


def build(config: GraniteConfig, make: LayerFactory) -> DecoderModel:
    """Compose a Llama with the multipliers."""
    cos_sin = make.cos_sin(config)
    layers = [
        make.pre_norm_layer(
            config,
            Scaled(
                make.attention(config, cos_sin, scale=config.attention_multiplier),
                config.residual_multiplier,
            ),
            Scaled(make.mlp(config), config.residual_multiplier),
        )
        for _ in range(config.num_layers)
    ]
    return make.model(
        config,
        layers,
        embedding_multiplier=config.embedding_multiplier,
        logits_divisor=config.logits_scaling,
    )
