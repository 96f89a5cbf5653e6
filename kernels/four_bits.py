"""Numbers of four bits: integers, or e2m1 with a sign, 2 bits of exponent and 1 of mantissa."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # followed by the negative ones
EXPONENT_BIAS = 127
APART = 16  # inputs between the two numbers of a byte


class FourBitWeights(NamedTuple):
    """Weights of a projection in four bits; those of all experts have a dimension more in front.

    With zeros, numbers are integers and stand for `(number - zero) * scale`. Without, numbers are
    e2m1 and stand for `number * 2 ** (scale - 127)`, as in MXFP4.

    Attributes:
        pairs: `[out, 16 * ceil(in / 32)]` uint8, contiguous: of each 32 inputs, byte i has number i
            in its lower bits and number i + 16 in its upper ones, so that a kernel multiplies
            either half with neighbouring inputs. Numbers after the last input are not used.
        scale: `[out, groups]` contiguous, float32 or, of e2m1, uint8.
        ins: number of inputs.
        group: neighbouring inputs that have one scale.
        zeros: `[out, groups]` float32, contiguous, or None; a GPU copies four bytes of each output
            ahead of their use, and not one.
        group_of: `[parts, in]` int32, contiguous: the group of each input, for as many parts of the
            outputs; None: groups are of neighbours.
        bias: `[out]`, or None.
    """

    pairs: torch.Tensor
    scale: torch.Tensor
    ins: int
    group: int
    zeros: torch.Tensor | None = None
    group_of: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    @staticmethod
    def row_bytes(ins: int) -> int:
        """Return the bytes of a row of `pairs`."""
        return -(-ins // (2 * APART)) * APART

    def expert(self, number: int) -> FourBitWeights:
        """Return the weights of one of several experts."""
        zeros, group_of, bias = (
            None if tensor is None else tensor[number]
            for tensor in (self.zeros, self.group_of, self.bias)
        )
        pairs, scale = self.pairs[number], self.scale[number]
        return FourBitWeights(pairs, scale, self.ins, self.group, zeros, group_of, bias)
