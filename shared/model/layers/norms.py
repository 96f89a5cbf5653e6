"""Makes the normalisations of one model."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagewire.shared.model.layers.attention import QkNorm
from pagewire.shared.model.layers.norm import LayerNorm, Norm, RmsNorm, SplitRmsNorm
from pagewire.shared.model.layers.place import Place
from pagewire.shared.model.model_config import ModelConfig
from pagewire.shared.model.shard import Communicator, Cut, Shard


@dataclass(frozen=True, slots=True)
class NormFactory:
    """The normalisations of one model; their weights are not filled.

    Attributes:
        place: where the weights are.
        shard: the part of the model that this rank has.
        communicator: of the model's ranks; None if the model is whole.
    """

    place: Place
    shard: Shard
    communicator: Communicator | None

    def can_add_up(self, config: ModelConfig) -> bool:
        """Return whether `of_sum` normalises what layers return.

        Never in batch-invariant mode: a kernel that adds up few rows and normalises them adds
        squares in another order than the one that normalises many.
        """
        is_plain = config.residual_multiplier == 1.0 and config.norm_style != "centred"
        return is_plain and self.communicator is not None and not self.place.ops.batch_invariant

    def of_sum(self, config: ModelConfig) -> Norm:
        """Return a normalisation of the sum of the ranks' rows, if it `can_add_up`."""
        weight, plus_one = self._weight(config, config.hidden_size), config.norm_style == "plus one"
        return RmsNorm(weight, config.rms_norm_eps, self.place.ops, plus_one, self.communicator)

    def make(self, config: ModelConfig, size: int | None = None, eps: float | None = None) -> Norm:
        """Return a normalisation of rows of `size` numbers, by default of the residual stream."""
        weight, eps = self._weight(config, size or config.hidden_size), eps or config.rms_norm_eps
        if config.norm_style == "centred":
            return LayerNorm(weight, eps)
        return RmsNorm(weight, eps, self.place.ops, config.norm_style == "plus one")

    def of_heads(
        self, config: ModelConfig, qk_norm: QkNorm, q: Cut, kv: Cut
    ) -> tuple[Norm, Norm] | None:
        """Return the norms of queries and keys, of which a rank has these parts of all heads."""
        if qk_norm == "none":
            return None
        if qk_norm == "head":
            return self.make(config, config.head_dim), self.make(config, config.head_dim)
        return self._split(config, q), self._split(config, kv)

    def _split(self, config: ModelConfig, cut: Cut) -> Norm:
        """Return a normalisation of rows of which each rank has a part."""
        if self.communicator is None:
            return self.make(config, cut.count)
        copies = self.shard.count * cut.count // cut.size
        weight = self._weight(config, cut.count)
        return SplitRmsNorm(weight, config.rms_norm_eps, cut, copies, self.communicator)

    def _weight(self, config: ModelConfig, size: int) -> torch.Tensor:
        return self.place.empty(
            size, dtype=None if config.norm_style == "rounded" else torch.float32
        )
