"""The paged KV tensors: one block-major allocation."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagewire.shared.errors import ConfigError
from pagewire.shared.kv.cache_groups import CacheGroups
from pagewire.shared.kv.layer_groups import LayerGroups
from pagewire.shared.model.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class KvShape:
    """Shape of one block: of `block_size` positions in the layers of one cache group.

    Block-major, so that a block is one contiguous row `[L, 2, KH, BS, D]`: transfer, swap and
    checksum are row copies. Heads before tokens: a head's tokens of a block are contiguous.

    Attributes:
        num_layers: of a block.
    """

    num_layers: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    dtype: torch.dtype

    @classmethod
    def of(cls, config: ModelConfig, block_size: int, dtype: torch.dtype) -> KvShape:
        """Return the shape that a model's blocks have."""
        layers = CacheGroups.of(config.windows, block_size).layers_per_block
        return cls(layers, config.num_kv_heads, block_size, config.head_dim, dtype)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        elements = self.num_layers * 2 * self.num_kv_heads * self.block_size * self.head_dim
        return elements * self.dtype.itemsize

    @property
    def groups(self) -> LayerGroups:
        """How blocks are divided to be moved."""
        return LayerGroups.of(self.num_layers, self.block_bytes)

    def allocate(self, num_blocks: int, device: torch.device) -> torch.Tensor:
        """Allocate a pool `[NB, L, 2, KH, BS, D]`, zeroed: a masked lane never reads a NaN.

        Raises:
            ConfigError: the device has not that much memory.
        """
        shape = (
            num_blocks,
            self.num_layers,
            2,
            self.num_kv_heads,
            self.block_size,
            self.head_dim,
        )
        try:
            return torch.zeros(shape, dtype=self.dtype, device=device)
        except RuntimeError as exc:  # on CUDA its subclass OutOfMemoryError
            size = num_blocks * self.block_bytes / 2**30
            raise ConfigError(
                f"no memory for {num_blocks} KV blocks ({size:.1f} GiB) on {device}: "
                "lower --num-blocks or --gpu-memory-utilization"
            ) from exc
