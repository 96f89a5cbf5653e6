"""The paged KV tensors: one block-major allocation."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from pagewire.shared.base.errors import ConfigError
from pagewire.shared.kv.cache_groups import CacheGroups
from pagewire.shared.kv.layer_groups import LayerGroups
from pagewire.shared.model.model_config import CachedToken, ModelConfig


@dataclass(frozen=True, slots=True)
class KvShape:
    """Shape of one block: of `block_size` positions in the layers of one cache group.

    Block-major, so that a block is one contiguous row `[L, N, KH, BS, D]`: transfer, swap and
    checksum are row copies. Heads before tokens: a head's tokens of a block are contiguous. There
    are N components of a token: keys and values, or one latent vector.

    Attributes:
        num_layers: of a block.
        token: what a layer has of a token: N, KH and D.
    """

    num_layers: int
    token: CachedToken
    block_size: int
    dtype: torch.dtype

    @classmethod
    def of(cls, config: ModelConfig, block_size: int, dtype: torch.dtype) -> KvShape:
        """Return the shape that a model's blocks have."""
        layers = CacheGroups.of(config.windows, block_size).layers_per_block
        return cls(layers, config.cached_token, block_size, dtype)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return math.prod(self._row) * self.dtype.itemsize

    @property
    def _row(self) -> tuple[int, ...]:
        token = self.token
        return (self.num_layers, token.components, token.heads, self.block_size, token.size)

    @property
    def groups(self) -> LayerGroups:
        """How blocks are divided to be moved."""
        return LayerGroups.of(self.num_layers, self.block_bytes)

    def allocate(self, num_blocks: int, device: torch.device) -> torch.Tensor:
        """Allocate a pool `[NB, L, N, KH, BS, D]`, zeroed: a masked lane never reads a NaN.

        Raises:
            ConfigError: the device has not that much memory.
        """
        try:
            return torch.zeros((num_blocks, *self._row), dtype=self.dtype, device=device)
        except RuntimeError as exc:  # on CUDA its subclass OutOfMemoryError
            size = num_blocks * self.block_bytes / 2**30
            raise ConfigError(
                f"no memory for {num_blocks} KV blocks ({size:.1f} GiB) on {device}: "
                "lower --num-blocks or --gpu-memory-utilization"
            ) from exc
