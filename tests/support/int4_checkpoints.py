"""Checkpoints in INT4 in the layouts of AWQ, GPTQ and compressed-tensors, made of plain ones."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from pagewire.tests.support.quantised_checkpoints import QUANTISED, WEIGHTS, write_pair

AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # of eight, from the lowest bits on
_ONES = 0x11111111  # which the first version of GPTQ subtracts from a word, and so with borrows


@dataclass(frozen=True)
class Int4Layout:
    """How a writer lays out a checkpoint.

    Attributes:
        kind: `awq`, `gptq`, `gptq_v2` or `packed`.
        group: inputs of a group; None: all.
        symmetric: whether all zeros are 8.
        ordered: whether a group's inputs are anywhere.
        skipped: regular expression of projections that are not quantised.
    """

    kind: str
    group: int | None
    symmetric: bool = False
    ordered: bool = False
    skipped: str = r"lm_head"

    def described(self, names: list[str]) -> dict[str, Any]:
        """Return `quantization_config`; `names` are the projections that are not quantised."""
        size = -1 if self.group is None else self.group
        if self.kind == "awq":
            return {
                "quant_method": "awq", "bits": 4, "group_size": size, "version": "gemm",
                "zero_point": True, "modules_to_not_convert": names or None,
            }  # fmt: skip
        if self.kind != "packed":
            return {
                "quant_method": "gptq", "bits": 4, "group_size": size, "desc_act": self.ordered,
                "sym": self.symmetric, "checkpoint_format": self.kind, "damp_percent": 0.1,
                "true_sequential": True, "lm_head": self.skipped == "none",
            }  # fmt: skip
        weights = {
            "actorder": "group" if self.ordered else None, "block_structure": None,
            "dynamic": False, "group_size": self.group, "num_bits": 4, "observer": "minmax",
            "strategy": "channel" if self.group is None else "group",
            "symmetric": self.symmetric, "type": "int",
        }  # fmt: skip
        group = {"weights": weights, "input_activations": None, "output_activations": None}
        return {
            "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": names,
            "config_groups": {"group_0": {**group, "targets": ["Linear"]}},
            "quantization_status": "compressed", "sparsity_config": {}, "version": "0.15.0",
        }  # fmt: skip

    def quantised(self, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Return the tensors of a projection, and what they stand for."""
        outs, ins = weight.shape
        size = self.group or ins
        groups = torch.arange(ins) // size
        if self.ordered:
            groups = groups[torch.randperm(ins)]
        count = int(groups.max()) + 1
        low, high = torch.empty(2, outs, count)
        for number in range(count):
            low[:, number] = weight[:, groups == number].amin(1)
            high[:, number] = weight[:, groups == number].amax(1)
        if self.symmetric:
            scale = torch.maximum(low.abs(), high.abs()) / 7
            zeros = torch.full(scale.shape, 8)
        else:
            scale = (high - low) / 15
            zeros = (-low / scale).round().clamp(0, 15).long()
            zeros[1::5] = 0  # as of weights none of which is negative
        scale = scale.half()
        full = scale.float()[:, groups], zeros[:, groups]
        numbers = (weight / full[0]).round().long().add(full[1]).clamp(0, 15)
        return self._tensors(numbers, scale, zeros, groups), (numbers - full[1]) * full[0]

    def _tensors(
        self, numbers: torch.Tensor, scale: torch.Tensor, zeros: torch.Tensor, groups: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        if self.kind == "packed":
            found = {
                "weight_packed": packed(numbers),
                "weight_scale": scale,
                "weight_shape": torch.tensor(numbers.shape),
            }
            if not self.symmetric:
                found["weight_zero_point"] = packed(zeros.t()).t()
            if self.ordered:
                found["weight_g_idx"] = groups.int()
            return found
        if self.kind == "awq":
            columns = [8 * word + n for word in range(len(numbers) // 8) for n in AWQ_COLUMNS]
            return {
                "qweight": packed(numbers.t()[:, columns]),
                "qzeros": packed(zeros.t()[:, columns]),
                "scales": scale.t(),
            }
        words = packed(zeros.t())
        return {
            "qweight": packed(numbers).t(),
            "qzeros": words - _ONES if self.kind == "gptq" else words,
            "scales": scale.t(),
            "g_idx": groups.int(),
        }


def packed(numbers: torch.Tensor) -> torch.Tensor:
    """Return rows of numbers of 4 bits as words, the lowest bits first."""
    numbers = torch.nn.functional.pad(numbers, (0, -numbers.shape[1] % 8))
    words = (numbers.unflatten(1, (-1, 8)) << torch.arange(0, 32, 4)).sum(2)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def write_int4(plain: Path, stored: Path, meant: Path, layout: Int4Layout) -> None:
    """Quantise the checkpoint in `plain`; `meant` gets the plain one that it stands for."""
    torch.manual_seed(0)
    tensors, values = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    left: list[str] = []
    for name, tensor in load_file(plain / WEIGHTS).items():
        module = name.removesuffix(".weight")
        values[name] = tensor
        is_matrix = tensor.dim() == 2 and "embed" not in name
        if (
            is_matrix
            and re.fullmatch(QUANTISED, module)
            and not re.fullmatch(layout.skipped, module)
        ):
            own, values[name] = layout.quantised(tensor)
            tensors |= {f"{module}.{part}": each.contiguous() for part, each in own.items()}
            continue
        tensors[name] = tensor
        left += [module] if is_matrix else []
    write_pair(plain, (stored, tensors), (meant, values), layout.described(left))
