"""Random weights in four bits with what they stand for, written down independently of kernels."""

from __future__ import annotations

import torch

from pagewire.kernels.four_bits import FourBitWeights

# The OCP Microscaling Formats specification.
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def paired(codes: torch.Tensor) -> torch.Tensor:
    """Return numbers in bytes: of each 32, number i is with number i + 16."""
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % 32)).byte()
    blocks = padded.view(*padded.shape[:-1], -1, 32)
    return (blocks[..., :16] + 16 * blocks[..., 16:]).flatten(-2)


def random_weights(
    size: tuple[int, ...],
    kind: str,
    group: int,
    dtype: torch.dtype,
    group_of: torch.Tensor | None = None,
) -> tuple[FourBitWeights, torch.Tensor]:
    """Return weights `[..., out, in]` without bias, and what they stand for, in a dtype.

    Args:
        size: of all of them.
        kind: `integers` or `e2m1`.
        group: inputs of a group.
        dtype: of the second result.
        group_of: `[..., parts, in]`, the group of each input; None: groups are of neighbours.
    """
    *several, outs, ins = size
    codes = torch.randint(0, 16, size)
    groups = -(-ins // group)
    if kind == "e2m1":
        exponents = torch.randint(-8, -4, (*several, outs, groups))
        meant = E2M1[codes] * exponents.exp2().repeat_interleave(group, -1)[..., :ins]
        scale = (exponents + 127).byte()
        return FourBitWeights(paired(codes), scale, ins, group), meant.to(dtype)
    scale = torch.rand(*several, outs, groups) / (4 * ins**0.5)
    zeros = torch.randint(0, 16, scale.shape)
    index = (torch.arange(ins) // group).expand(size)
    order = None
    if group_of is not None:
        index = group_of.repeat_interleave(outs // group_of.shape[-2], -2)
        order = group_of.int().contiguous()
    meant = (codes - zeros.gather(-1, index)) * scale.gather(-1, index)
    own = FourBitWeights(paired(codes), scale, ins, group, zeros.float(), order)
    return own, meant.to(dtype)


def moved(of: FourBitWeights, device: str) -> FourBitWeights:
    """Return weights on a device."""
    return FourBitWeights(
        *(each.to(device) if isinstance(each, torch.Tensor) else each for each in of)
    )
