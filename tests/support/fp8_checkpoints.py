"""Checkpoints in FP8 as their writers lay them out, made of plain ones, and what they stand for."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from pagewire.tests.support.quantised_checkpoints import QUANTISED, WEIGHTS, write_pair

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0


@dataclass(frozen=True)
class Layout:
    """How a writer lays out a checkpoint.

    Attributes:
        dialect: `quant_method`.
        block: rows and columns of a block with one scale; None, None: the whole tensor; 1, None:
            a row.
        static: whether inputs have a scale in the checkpoint.
        skipped: regular expression of projections that are not quantised, in full names.
        scale_dtype: of the weights' scales.
        inputs: whether inputs are quantised.
        config: other fields of `quantization_config`.
        names: what the writer calls scales of weights and of inputs.
    """

    dialect: str
    block: tuple[int | None, int | None]
    static: bool = False
    skipped: str = r"lm_head"
    scale_dtype: torch.dtype = torch.float32
    inputs: bool = True
    config: dict[str, Any] = field(default_factory=dict)
    names: tuple[str, str] = ("weight_scale", "input_scale")

    def quantises(self, name: str) -> bool:
        """Whether a projection is quantised."""
        return bool(re.fullmatch(QUANTISED, name)) and not re.fullmatch(self.skipped, name)

    def scales(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the scales of a weight as the writer stores them."""
        (outs, ins), (rows, columns) = weight.shape, self.block
        rows, columns = rows or outs, columns or ins
        table = torch.empty(-(-outs // rows), -(-ins // columns))
        for i in range(table.shape[0]):
            for j in range(table.shape[1]):
                part = weight[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
                table[i, j] = part.abs().max() / LARGEST
        return table.to(self.scale_dtype)

    def expanded(self, scales: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Return the scale of each number of a weight."""
        rows, columns = self.block[0] or shape[0], self.block[1] or shape[1]
        of_rows = scales.float().repeat_interleave(rows, 0)[: shape[0]]
        return of_rows.repeat_interleave(columns, 1)[:, : shape[1]]

    def described(self, names: list[str]) -> dict[str, Any]:
        """Return `quantization_config`; `names` are the projections that are not quantised."""
        if self.dialect == "fp8":
            own: dict[str, Any] = {
                "quant_method": "fp8",
                "activation_scheme": "static" if self.static else "dynamic",
            }
            if self.block[1] is not None:
                own |= {"fmt": "e4m3", "weight_block_size": list(self.block)}
            return own | {"modules_to_not_convert": names} | self.config
        if self.dialect == "modelopt":
            return {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": names}
        strategy = {(None, None): "tensor", (1, None): "channel"}.get(self.block, "block")
        weights: dict[str, Any] = {
            "actorder": None, "block_structure": None, "dynamic": False, "group_size": None,
            "num_bits": 8, "observer": "minmax", "strategy": strategy, "symmetric": True,
            "type": "float",
        }  # fmt: skip
        inputs = {**weights, "strategy": "tensor" if self.static else "token"}
        inputs |= {"dynamic": not self.static, "observer": None}
        if strategy == "block":
            weights["block_structure"] = list(self.block)
            inputs |= {"strategy": "group", "group_size": self.block[1]}
        group = {
            "weights": weights, "input_activations": inputs if self.inputs else None,
            "output_activations": None, "targets": ["Linear"], "format": "float-quantized",
        }  # fmt: skip
        return {
            "config_groups": {"group_0": group}, "format": "float-quantized",
            "global_compression_ratio": None, "ignore": names, "kv_cache_scheme": None,
            "quant_method": "compressed-tensors", "quantization_status": "compressed",
            "sparsity_config": {}, "transform_config": {}, "version": "0.15.0",
        } | self.config  # fmt: skip


def write_fp8(plain: Path, stored: Path, meant: Path, layout: Layout) -> dict[str, torch.Tensor]:
    """Quantise a checkpoint.

    Args:
        plain: the unquantised one, in one file.
        stored: where the quantised one goes.
        meant: where the plain one that it stands for goes.
        layout: of the quantised one.

    Returns:
        The scales of inputs, by name of the projection.
    """
    tensors, values = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    input_scales: dict[str, torch.Tensor] = {}
    left: list[str] = []
    suffix, of_inputs = layout.names
    if layout.dialect == "fp8" and layout.block[1] is not None:
        suffix = "weight_scale_inv"
    for name, tensor in load_file(plain / WEIGHTS).items():
        module = name.removesuffix(".weight")
        values[name] = tensors[name] = tensor
        if tensor.dim() != 2 or "vision" in name or "embed" in name:
            continue
        if not layout.quantises(module):
            left.append(module)
            continue
        tensor = tensor.float()
        scales = layout.scales(tensor)
        expanded = layout.expanded(scales, tensor.shape)
        tensors[name] = (tensor / expanded).clamp(-LARGEST, LARGEST).to(E4M3)
        values[name] = tensors[name].float() * expanded
        is_scalar = layout.block == (None, None)
        tensors[f"{module}.{suffix}"] = scales.reshape(-1)[0].clone() if is_scalar else scales
        if layout.static:
            # Larger for some projections of the same input, so that none may take another's.
            scale = torch.tensor(0.02 if "k_proj" in module else 0.015)
            tensors[f"{module}.{of_inputs}"] = input_scales[module] = scale
    write_pair(plain, (stored, tensors), (meant, values), layout.described(left))
    return input_scales


class QuantisedLinear(torch.nn.Module):
    """A projection whose inputs are quantised: the reference for the products of FP8 numbers."""

    def __init__(
        self, linear: torch.nn.Linear, columns: int | None, input_scale: torch.Tensor | None
    ) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(linear.weight.detach().float())
        self.bias = linear.bias
        self.columns = columns or linear.in_features
        self.input_scale = input_scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = []
        for part in x.float().split(self.columns, dim=-1):
            scale = self.input_scale
            if scale is None:
                scale = part.abs().amax(-1, keepdim=True) / LARGEST
                scale = torch.where(scale == 0, 1.0, scale)
            parts.append((part / scale).clamp(-LARGEST, LARGEST).to(E4M3).float() * scale)
        y = torch.nn.functional.linear(torch.cat(parts, dim=-1), self.weight)
        return (y if self.bias is None else y + self.bias.float()).to(x.dtype)


def with_quantised_inputs(model: Any, layout: Layout, scales: dict[str, torch.Tensor]) -> Any:
    """Replace the quantised projections of Hugging Face's model, in place; return it."""
    for name, module in list(model.named_modules()):
        if isinstance(module, torch.nn.Linear) and layout.quantises(name):
            parent = model.get_submodule(name.rpartition(".")[0])
            found = QuantisedLinear(module, layout.block[1], scales.get(name))
            setattr(parent, name.rpartition(".")[2], found)
    return model
