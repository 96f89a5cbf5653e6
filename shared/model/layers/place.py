"""Where the parameters of layers are, and what computes with them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from pagewire.kernels import Ops


class Place(NamedTuple):
    """Where parameters are.

    Attributes:
        device: of the parameters; on "meta" they take no memory.
        dtype: of activations, and of parameters that are not quantised.
        ops: kernels that suit the device.
    """

    device: torch.device
    dtype: torch.dtype
    ops: Ops

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return a tensor that is not filled."""
        return torch.empty(shape, device=self.device, dtype=dtype or self.dtype)
