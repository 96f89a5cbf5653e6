"""The scales that a checkpoint has for a KV cache in FP8: of keys and of values, for each layer."""

from __future__ import annotations

import dataclasses
import logging
import math
import re

import torch

from pagewire.kernels.fp8_numbers import LEAST_SCALE, KvScales
from pagewire.shared.base.errors import ModelLoadError
from pagewire.shared.model.quantization.checkpoint import KV_ZEROS
from pagewire.shared.model.safetensors_header import WeightsFile
from pagewire.shared.model.weights_copy import TensorCopy, copy_weights
from pagewire.shared.model.weights_match import FLOAT_DTYPES

logger = logging.getLogger(__name__)

# compressed-tensors, vLLM and ModelOpt name attention or the projection; older writers say that it
# is the scale of the projection's output, or have one for keys and values.
_NAME = re.compile(
    r"model\.layers\.(?P<layer>\d+)\.\w+\."
    r"(?:(?:\w+\.)?(?P<part>k|v|kv)_scale|(?P<projection>k|v)_proj\.output_scale)"
)


def has_kv_scales(checkpoint: list[WeightsFile]) -> bool:
    """Whether some layer has scales of keys or values."""
    return any(_NAME.fullmatch(name) for file in checkpoint for name in file.tensors)


def separate_kv_scales(
    checkpoint: list[WeightsFile], num_layers: int
) -> tuple[list[WeightsFile], tuple[KvScales, ...]]:
    """Return the files without scales of keys and values, and each layer's scales.

    What the checkpoint has no scale for has 1, also if its scale is that of a fused projection. How
    many there are is logged.

    Raises:
        ModelLoadError: a scale is not one positive number, or is there twice with different values,
            or there are zero points; one line.
    """
    places: dict[tuple[int, str], list[TensorCopy]] = {}
    fills, others = [], []
    for file in checkpoint:
        _refuse_zeros(file)
        names = {name: match for name in file.tensors if (match := _NAME.fullmatch(name))}
        for name, match in names.items():
            fill = _fill(file, name)
            fills.append(fill)
            for part in match["part"] or match["projection"]:  # "kv" stands for both
                places.setdefault((int(match["layer"]), part), []).append(fill)
        tensors = {name: tensor for name, tensor in file.tensors.items() if name not in names}
        others.append(dataclasses.replace(file, tensors=tensors))
    copy_weights(fills, lambda _bytes: None)
    for fill in fills:
        value = fill.target.item()
        if not LEAST_SCALE <= value < math.inf:
            raise ModelLoadError(
                f"{fill.entry.name} is {value:g}, and a scale must be at least {LEAST_SCALE}, and "
                "finite"
            )
    scales = tuple(
        KvScales(*(_value(places.get((layer, part), [])) for part in "kv"))
        for layer in range(num_layers)
    )
    logger.info(
        "%d of the %d scales of the FP8 KV cache are the checkpoint's; the others are 1",
        sum((layer, part) in places for layer in range(num_layers) for part in "kv"),
        2 * num_layers,
    )
    return others, scales


def _fill(file: WeightsFile, name: str) -> TensorCopy:
    entry = file.tensors[name]
    if math.prod(entry.shape) != 1 or entry.dtype not in FLOAT_DTYPES:
        raise ModelLoadError(
            f"{name} is {entry.dtype} {list(entry.shape)}: a KV cache in FP8 has one scale for all "
            "keys of a layer, and one for all values; leave --kv-cache-dtype out"
        )
    return TensorCopy(file, entry, torch.empty(entry.shape, dtype=torch.float32))


def _value(fills: list[TensorCopy]) -> float:
    """Return the one value of a scale that a checkpoint may have under several names."""
    values = {fill.target.item(): fill.entry.name for fill in fills}
    if len(values) > 1:
        problem = ", ".join(f"{name} is {value:g}" for value, name in values.items())
        raise ModelLoadError(
            f"{problem}: a KV cache in FP8 has one scale for all keys of a layer, and one for all "
            "values; leave --kv-cache-dtype out"
        )
    return next(iter(values), 1.0)


def _refuse_zeros(file: WeightsFile) -> None:
    zeros = [name for name in file.tensors if name.endswith(KV_ZEROS)]
    if zeros:
        raise ModelLoadError(
            f"{min(zeros)}: zero points of a KV cache are not supported: leave --kv-cache-dtype out"
        )
