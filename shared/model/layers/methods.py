"""Chooses how the weights of a model's layers are stored and multiplied."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch

from pagewire.kernels import Ops
from pagewire.shared.model.layers.experts import (
    ExpertsMethod,
    ExpertsShape,
    ExpertWeights,
    UnquantizedExperts,
)
from pagewire.shared.model.layers.linear import Linear, LinearMethod, LinearShape, Unquantized
from pagewire.shared.model.layers.parameters import NamedParameters


class Methods:
    """The methods of one model: on one device, in one dtype, with one set of kernels.

    Args:
        device: for the parameters; on "meta" they take no memory.
        dtype: of activations, and of parameters that are not quantised.
        ops: kernels that suit the device.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, ops: Ops) -> None:
        self._device = device
        self._dtype = dtype
        self._ops = ops

    def choose(self, parameters: Iterable[NamedParameters]) -> None:
        """Give projections and experts their methods, whose parameters are not filled."""
        for _, each in parameters:
            if isinstance(each, Linear):
                each.use(self._linear(each.shape))
            elif isinstance(each, ExpertWeights):
                each.use(self._experts(each.shape))

    def _linear(self, shape: LinearShape) -> LinearMethod:
        dtype = torch.float32 if shape.wide else self._dtype
        empty = partial(torch.empty, device=self._device, dtype=dtype)
        weight = empty(shape.out_features, shape.in_features)
        bias = empty(shape.out_features) if shape.bias else None
        return Unquantized(shape.parts, weight, bias, self._ops)

    def _experts(self, shape: ExpertsShape) -> ExpertsMethod:
        empty = partial(torch.empty, device=self._device, dtype=self._dtype)
        count, hidden, inner = shape.count, shape.hidden, shape.inner
        return UnquantizedExperts(
            shape,
            self._ops,
            empty(count, 2 * inner, hidden),
            empty(count, hidden, inner),
            empty(count, 2 * inner) if shape.biases else None,
            empty(count, hidden) if shape.biases else None,
        )
