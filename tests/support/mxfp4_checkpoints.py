"""Checkpoints as gpt-oss is published, with experts in MXFP4, made of plain ones."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from pagewire.tests.support.quantised_checkpoints import WEIGHTS, write_pair

# The OCP Microscaling Formats specification: 32 values share a power of two.
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
GROUP, BIAS = 32, 127
SIZES = {"hidden_size": 64, "intermediate_size": 96}  # of tiny models: multiples of a group
EXPERTS = ("experts.gate_up_proj", "experts.down_proj")
DESCRIBED = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
    ],
}  # fmt: skip


def mxfp4(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return experts `[E, in, out]` as blocks and scales of each output, and what they mean."""
    groups = weights.float().transpose(1, 2).unflatten(-1, (-1, GROUP))  # [E, out, in / 32, 32]
    exponents = groups.abs().amax(-1).log2().floor() - 2  # the largest value is 6, in 4 to 8
    scaled = groups / exponents.exp2()[..., None]
    codes = (scaled[..., None] - E2M1).abs().argmin(-1)
    blocks = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)
    meant = E2M1[codes] * exponents.exp2()[..., None]
    return blocks, (exponents + BIAS).to(torch.uint8), meant.flatten(2).transpose(1, 2)


def write_mxfp4(plain: Path, stored: Path, meant: Path) -> None:
    """Quantise the experts of a gpt-oss in `plain`; `meant` gets the plain one that it stands for.

    All other weights are in bfloat16, in both.
    """
    tensors, values = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for name, weight in load_file(plain / WEIGHTS).items():
        values[name] = tensors[name] = weight.bfloat16()
        if name.endswith(EXPERTS):
            tensors.pop(name)
            tensors[f"{name}_blocks"], tensors[f"{name}_scales"], exact = mxfp4(weight)
            values[name] = exact.bfloat16().contiguous()
            assert torch.equal(values[name].float(), exact)
    write_pair(plain, (stored, tensors), (meant, values), DESCRIBED)
