"""Chooses how the weights of a model's layers are stored and multiplied."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import torch

from pagewire.shared.base.errors import ModelLoadError
from pagewire.shared.model.layers.experts import (
    ExpertsShape,
    ExpertWeights,
    UnquantizedExperts,
)
from pagewire.shared.model.layers.four_bit_experts import (
    Int4ExpertTensors,
    int4_experts,
    mxfp4_experts,
)
from pagewire.shared.model.layers.fp8 import Fp8Linear
from pagewire.shared.model.layers.fp8_experts import Fp8Experts
from pagewire.shared.model.layers.int4 import Int4Linear, Int4Tensors
from pagewire.shared.model.layers.linear import (
    Linear,
    LinearShape,
    SeparateLinears,
    Unquantized,
)
from pagewire.shared.model.layers.parameters import Conversion, NamedParameters, join_name
from pagewire.shared.model.layers.place import Place
from pagewire.shared.model.quantization.config import (
    Fp8Format,
    Int4Format,
    LinearFormat,
    Mxfp4Format,
    QuantConfig,
)


class MethodFactory:
    """The methods of one model: on one device, in one dtype, with one set of kernels.

    Args:
        place: where the parameters are.
        quantization: says what is quantised; None: nothing.
    """

    def __init__(self, place: Place, quantization: QuantConfig | None) -> None:
        self._place = place
        self._quantization = quantization

    def choose(self, parameters: Iterable[NamedParameters]) -> None:
        """Give projections and experts their methods, whose parameters are not filled."""
        for name, parameter in parameters:
            if isinstance(parameter, Linear):
                self._choose(name, parameter)
            elif isinstance(parameter, ExpertWeights):
                self._choose_experts(name, parameter)

    def _choose(self, layer: str, linear: Linear) -> None:
        """Give projections the method of their format, or each its own."""
        shape = linear.shape
        formats = [self._format_of(join_name(layer, part)) for part in shape.parts]
        is_ordered = isinstance(formats[0], Int4Format) and formats[0].ordered
        if len(set(formats)) == 1 and not (is_ordered and len(formats) > 1):
            self._give(linear, formats[0])
            return
        # Formats differ, or each projection has its own order of inputs.
        parts: dict[str, Linear] = {}
        for (name, size), format in zip(shape.parts.items(), formats, strict=True):
            parts[name] = Linear(replace(shape, parts={name: size}, pairs={}))
            self._give(parts[name], format)
        linear.use(SeparateLinears(parts))

    def _give(self, linear: Linear, format: LinearFormat | None) -> None:
        """Give projections of one format their method."""
        shape = linear.shape
        if format is None or (shape.is_matrix and self._is_converted):
            linear.use(self._unquantised(shape))
        elif shape.is_matrix:  # kept in the model's dtype
            method = self._unquantised(shape)
            linear.use(method, Conversion(partial(self._stored, shape, format), method.fill_from))
        elif isinstance(format, Int4Format):
            packed = Int4Linear(shape, format, self._place_of(shape))
            linear.use(packed, Conversion(partial(self._stored, shape, format), packed.fill_from))
        elif self._is_converted:
            quantised = Fp8Linear(shape, format, self._place_of(shape))
            linear.use(
                quantised, Conversion(partial(self._unquantised, shape), quantised.fill_from)
            )
        else:
            linear.use(Fp8Linear(shape, format, self._place_of(shape)))

    @property
    def _is_converted(self) -> bool:
        return self._quantization is not None and self._quantization.while_loading

    def _format_of(self, name: str) -> LinearFormat | None:
        """Return the format of a projection.

        Raises:
            ModelLoadError: only experts may have it; one line.
        """
        chosen = None if self._quantization is None else self._quantization.format_of(name)
        if isinstance(chosen, Mxfp4Format):
            raise ModelLoadError(f"{name}: only experts may be in {chosen.name.upper()}")
        return chosen

    def _stored(self, shape: LinearShape, format: LinearFormat) -> Fp8Linear | Int4Tensors:
        """Return what the checkpoint's tensors of quantised projections fill."""
        place = self._place_of(shape)
        if isinstance(format, Fp8Format):
            return Fp8Linear(shape, format, place)
        return Int4Tensors(shape, format, place)

    def _unquantised(self, shape: LinearShape) -> Unquantized:
        place = self._place_of(shape)
        weight = place.empty(shape.out_features, shape.in_features)
        return Unquantized(shape, weight, shape.empty_bias(place), place.ops)

    def _place_of(self, shape: LinearShape) -> Place:
        return self._place._replace(dtype=torch.float32) if shape.wide else self._place

    def _choose_experts(self, layer: str, experts: ExpertWeights) -> None:
        """Give a mixture's experts the method of their format.

        Raises:
            ModelLoadError: they are quantised in a way that is not supported; one line.
        """
        shape, quantization = experts.shape, self._quantization
        if quantization is None:
            experts.use(self._unquantised_experts(shape))
            return
        names = [name.format(expert) for expert in range(shape.count) for name in shape.each]
        names = [join_name(layer, name) for name in names or shape.stacked]
        formats = {name: quantization.format_of(name) for name in names}
        chosen = formats[names[0]]
        for name, other in formats.items():
            if other != chosen:
                raise ModelLoadError(
                    f"{names[0]} and {name} have different formats: all experts of a layer must "
                    "have the same"
                )
        if chosen is None:
            experts.use(self._unquantised_experts(shape))
        elif isinstance(chosen, Mxfp4Format):
            experts.use(mxfp4_experts(shape, self._place))
        elif quantization.while_loading and isinstance(chosen, Fp8Format):
            plain = partial(self._unquantised_experts, shape)
            method = Fp8Experts(shape, chosen, self._place)
            experts.use(method, Conversion(plain, method.fill_from))
        elif not shape.each:
            raise ModelLoadError(
                f"{names[0]}: experts in {chosen.name.upper()} must have one tensor each, such as "
                "experts.0.up_proj.weight; those of all experts in one tensor are not supported"
            )
        elif isinstance(chosen, Int4Format):
            packed = int4_experts(shape, chosen, self._place)
            source = partial(Int4ExpertTensors, shape, chosen, self._place)
            experts.use(packed, Conversion(source, packed.fill_from))
        else:
            experts.use(Fp8Experts(shape, chosen, self._place))

    def _unquantised_experts(self, shape: ExpertsShape) -> UnquantizedExperts:
        empty = self._place.empty
        count, hidden, inner = shape.count, shape.hidden, shape.inner
        return UnquantizedExperts(
            shape,
            self._place.ops,
            empty(count, 2 * inner, hidden),
            empty(count, hidden, inner),
            empty(count, 2 * inner) if shape.biases else None,
            empty(count, hidden).zero_() if shape.biases else None,
        )
