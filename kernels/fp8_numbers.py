"""Numbers of eight bits: e4m3, with 4 bits of exponent and 3 of mantissa, without infinities."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

LARGEST = 448.0
# Least scale of a row of inputs: a row of zeros stays one, and the inverse is finite in float32.
LEAST_SCALE = 1e-30
WORKSPACE_BYTES = 256 << 20  # for what long chunks read of an FP8 cache, in the dtype of queries


class KvScales(NamedTuple):
    """The factors of the numbers in an FP8 KV cache; other caches have none.

    They are constants of a layer, so that what is cached of a token depends on the token alone.
    """

    keys: float = 1.0
    values: float = 1.0


UNSCALED = KvScales()


class Fp8Weights(NamedTuple):
    """The weights of a projection in FP8; those of all experts have a dimension more in front.

    A number of the weights is multiplied by the scale of its block.

    Attributes:
        numbers: `[out, in]` e4m3, contiguous.
        scale: `[ceil(out / rows), ceil(in / columns)]` float32, contiguous.
        block: rows and columns that a scale multiplies.
        bias: `[out]`, or None.
        input_scale: `[1]` float32, the scale of all inputs; None: each token has its own. Of
            experts, `[E]`.
    """

    numbers: torch.Tensor
    scale: torch.Tensor
    block: tuple[int, int]
    bias: torch.Tensor | None = None
    input_scale: torch.Tensor | None = None

    def expert(self, number: int) -> Fp8Weights:
        """Return the weights of one of several experts."""
        return Fp8Weights(
            self.numbers[number],
            self.scale[number],
            self.block,
            None if self.bias is None else self.bias[number],
            None if self.input_scale is None else self.input_scale[number : number + 1],
        )
