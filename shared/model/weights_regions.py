"""Computes where the parts of a file's tensor are that a rank holds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from pagewire.shared.model.shard import Cuts


class Region(NamedTuple):
    """A part of a tensor, and where it is in a file.

    Attributes:
        start: byte where it begins.
        target: what it fills.
        pitch: bytes from the start of one row to that of the next; 0: rows are contiguous.
    """

    start: int
    target: torch.Tensor
    pitch: int = 0


def regions(
    target: torch.Tensor, cuts: Cuts, start: int, itemsize: int, limit: int
) -> Iterator[Region]:
    """Yield the regions that fill a target, each within `limit` bytes of the file.

    Args:
        target: what they fill.
        cuts: for each dimension, which part of the file's tensor this is.
        start: byte of the file where the tensor begins.
        itemsize: bytes of a number in the file.
        limit: bytes from a region's start to its end.
    """
    for whole in _contiguous_or_rows(target, cuts, start, itemsize):
        if whole.target.numel():
            yield from _small(whole, itemsize, limit)


def _contiguous_or_rows(
    target: torch.Tensor, cuts: Cuts, start: int, itemsize: int
) -> Iterator[Region]:
    if _are_whole(cuts):
        yield Region(start, target)
        return
    own, *rest = cuts
    inner = [
        size if cut is None else cut.size
        for size, cut in zip(target.shape[1:], [*rest, *[None] * target.dim()], strict=False)
    ]
    step, first = math.prod(inner) * itemsize, 0
    for begin, end in own.ranges if own else ((0, len(target)),):
        rows, place = target[first : first + end - begin], start + begin * step
        first += end - begin
        if _are_whole(tuple(rest)):
            yield Region(place, rows)
        elif target.dim() == 2 and rest[0] is not None:
            column = 0
            for left, right in rest[0].ranges:
                view = rows[:, column : column + right - left]
                yield Region(place + left * itemsize, view, step)
                column += right - left
        else:
            for index, row in enumerate(rows):
                at = place + index * step
                yield from _contiguous_or_rows(row, tuple(rest), at, itemsize)


def _are_whole(cuts: Cuts) -> bool:
    return all(cut is None or cut.is_whole for cut in cuts)


def _small(region: Region, itemsize: int, limit: int) -> Iterator[Region]:
    start, target, pitch = region
    if target.dim() == 0 or target.numel() * itemsize <= limit >= pitch * len(target):
        yield region
        return
    row = target[0].numel() * itemsize
    step = pitch or row
    rows = max(1, limit // step)
    for first in range(0, len(target), rows):
        view = target[first : first + rows]
        if row > limit:
            yield from _small(Region(start + first * step, view[0]), itemsize, limit)
        else:
            yield Region(start + first * step, view, pitch)
