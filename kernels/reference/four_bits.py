"""What weights in four bits stand for, in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pagewire.kernels.four_bits import APART, E2M1, EXPONENT_BIAS, FourBitWeights

DEQUANTISED_AT_A_TIME = 1 << 24  # numbers, in float32


def pack_pairs(numbers: torch.Tensor, out: torch.Tensor) -> None:
    """Write numbers `[..., in]` from 0 to 15 in pairs; see `FourBitWeights`."""
    padded = F.pad(numbers, (0, -numbers.shape[-1] % (2 * APART)))
    low, high = padded.unflatten(-1, (-1, 2, APART)).unbind(-2)
    torch.bitwise_or(low, high << 4, out=out.unflatten(-1, (-1, APART)))


def dequantised(weights: FourBitWeights, dtype: torch.dtype) -> torch.Tensor:
    """Return what weights of a projection stand for, `[out, in]`, rounded once to a dtype."""
    outs, ins = len(weights.pairs), weights.ins
    meant = torch.empty((outs, ins), dtype=dtype, device=weights.pairs.device)
    step = max(1, DEQUANTISED_AT_A_TIME // ins)
    for first in range(0, outs, step):
        rows = slice(first, first + step)
        meant[rows] = _rows(weights, rows)
    return meant


def scaled(
    numbers: torch.Tensor, scale: torch.Tensor, zeros: torch.Tensor, group: int
) -> torch.Tensor:
    """Return `(numbers - zeros) * scale`, `[out, in]` float32.

    Args:
        numbers: `[out, in]` from 0 to 15.
        scale: `[out, groups]` float32.
        zeros: `[out, groups]`.
        group: neighbouring inputs of a group.
    """
    ins = numbers.shape[1]
    meant = F.pad(numbers, (0, -ins % group)).float()
    meant.unflatten(1, (-1, group)).sub_(zeros[..., None]).mul_(scale[..., None])
    return meant[:, :ins]


def _rows(weights: FourBitWeights, rows: slice) -> torch.Tensor:
    """Return what some rows stand for, in float32."""
    pairs, scale = weights.pairs[rows], weights.scale[rows]
    if weights.zeros is None:
        values = torch.tensor([*E2M1, *(-number for number in E2M1)], device=pairs.device)
        of_byte = torch.stack([values.repeat(16), values.repeat_interleave(16)], dim=1)
        blocks = F.embedding(pairs.int(), of_byte).unflatten(1, (-1, APART))
        meant = blocks.transpose(2, 3).flatten(1)[:, : weights.ins]
        exponents = scale.int().sub_(EXPONENT_BIAS).repeat_interleave(weights.group, 1)
        return torch.ldexp(meant, exponents[:, : weights.ins])
    zeros = weights.zeros[rows]
    blocks = pairs.unflatten(1, (-1, APART))
    numbers = torch.stack([blocks & 15, blocks >> 4], dim=2).flatten(1)[:, : weights.ins]
    if weights.group_of is None:
        return scaled(numbers, scale, zeros, weights.group)
    outs = len(weights.pairs)
    part = torch.arange(outs, device=pairs.device)[rows] // (outs // len(weights.group_of))
    group_of = weights.group_of[part].long()
    return numbers.float().sub_(zeros.gather(1, group_of)).mul_(scale.gather(1, group_of))
