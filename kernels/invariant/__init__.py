"""Operations in Triton whose result for a row depends only on that row.

A sum of floating-point numbers depends on the order in which they are added, and the fastest order
depends on the batch: on its rows, on where chunks end, on how a context is split. Here each order
depends only on shapes of the model. So a row has the same bits in every batch, and a token has the
same keys and values whether it was decoded or computed as part of a prompt:

- attention is one kernel for decode rows and chunks. Tiles of keys begin at multiples of a fixed
  size, one program takes all that a row sees, and tiles that a row does not see leave its sums as
  they are (`attention.py`);
- products have one tiling per weight, for any rows, and do not split the inputs (`products.py`);
- so have products with weights in FP8; weights in four bits are dequantised first;
- experts have one size of tiles; their outputs are added in the order of a token's choices.

The other operations always compute each row independently. `reference/invariant.py` has these in
plain torch. `load_ops` chooses.
"""

from __future__ import annotations

from pagewire.kernels.invariant.attention import latent_attention, paged_decode, paged_prefill
from pagewire.kernels.invariant.products import (
    experts,
    four_bit_experts,
    four_bit_linear,
    fp8_experts,
    fp8_linear,
    head_products,
    linear,
)

__all__ = [
    "experts",
    "four_bit_experts",
    "four_bit_linear",
    "fp8_experts",
    "fp8_linear",
    "head_products",
    "latent_attention",
    "linear",
    "paged_decode",
    "paged_prefill",
]
