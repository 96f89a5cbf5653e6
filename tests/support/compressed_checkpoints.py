"""Checkpoints that compressed-tensors itself writes, and the plain ones that it makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStrategy,
    apply_quantization_config,
)
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file

from pagewire.tests.support.quantised_checkpoints import WEIGHTS, write_pair


def write_compressed(
    plain: Path, stored: Path, meant: Path, schemes: list[QuantizationScheme], ignored: list[str]
) -> None:
    """Quantise a checkpoint.

    Args:
        plain: the unquantised one, in one file.
        stored: where the quantised one goes.
        meant: where the plain one goes that the library makes of it.
        schemes: of the projections that they name and that are not ignored.
        ignored: names of projections, or regular expressions after "re:".
    """
    tensors = load_file(plain / WEIGHTS)
    names = [
        name.removesuffix(".weight")
        for name, tensor in tensors.items()
        if tensor.dim() == 2 and "embed" not in name
    ]
    tree = _linears({name: tensors.pop(f"{name}.weight") for name in names})
    groups = {f"group_{number}": scheme for number, scheme in enumerate(schemes)}
    config = QuantizationConfig(config_groups=groups, ignore=ignored)
    apply_quantization_config(tree, config)
    for name in names:
        _calibrate(tree.get_submodule(name))
    compressor = ModelCompressor.from_pretrained_model(tree)
    compressor.compress_model(tree)
    written = {**tensors, **{n: each.contiguous() for n, each in tree.state_dict().items()}}
    folder = stored.parent / "described"
    folder.mkdir(parents=True)
    compressor.update_config(str(folder))
    described = json.loads((folder / "config.json").read_text())["quantization_config"]
    compressor.decompress_model(tree)
    values = {f"{name}.weight": tree.get_parameter(f"{name}.weight").detach() for name in names}
    write_pair(plain, (stored, written), (meant, {**tensors, **values}), described)


def _linears(weights: dict[str, torch.Tensor]) -> torch.nn.Module:
    """Return projections of these weights, by their full names."""
    root = torch.nn.Module()
    for name, weight in weights.items():
        parent = root
        *outer, last = name.split(".")
        for part in outer:
            if part not in dict(parent.named_children()):
                parent.add_module(part, torch.nn.Module())
            parent = parent.get_submodule(part)
        linear = torch.nn.Linear(*reversed(weight.shape), bias=False)
        linear.weight.data = weight.float()
        parent.add_module(last, linear)
    return root


def _calibrate(linear: Any) -> None:
    """Set scales and zeros of a projection by its smallest and largest weights."""
    scheme = getattr(linear, "quantization_scheme", None)
    if scheme is None:
        return
    low, high = (_extremes(linear.weight.detach(), scheme.weights, most) for most in (False, True))
    scale, zeros = calculate_qparams(low, high, scheme.weights)
    linear.weight_scale.data.copy_(scale.view(linear.weight_scale.shape))
    if hasattr(linear, "weight_zero_point"):
        linear.weight_zero_point.data.copy_(zeros.view(linear.weight_zero_point.shape))
    if hasattr(linear, "input_scale"):
        linear.input_scale.data.fill_(0.02)


def _extremes(weight: torch.Tensor, args: QuantizationArgs, most: bool) -> torch.Tensor:
    """Return the smallest or the largest weight of what has one scale."""
    (outs, ins), strategy = weight.shape, args.strategy
    rows, columns = outs, ins
    if strategy in (QuantizationStrategy.CHANNEL, QuantizationStrategy.GROUP):
        rows = 1
    if strategy == QuantizationStrategy.GROUP:
        columns = args.group_size
    if strategy == QuantizationStrategy.BLOCK:
        rows, columns = args.block_structure
    filled = torch.nn.functional.pad(weight, (0, -ins % columns, 0, -outs % rows))
    blocks = filled.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    return blocks.amax((1, 3)) if most else blocks.amin((1, 3))
