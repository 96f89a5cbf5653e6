"""gpt-oss as it is published, with experts in MXFP4: the copy that docs/models.md makes of it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagewire.kernels import load_ops
from pagewire.shared.base.errors import ModelLoadError
from pagewire.shared.model.config import load_config
from pagewire.shared.model.demo import demo_model_path
from pagewire.shared.model.loader import load_model
from pagewire.shared.text.tokenizer import Tokenizer
from pagewire.tests.support.documents import blocks
from pagewire.tests.support.tiny_models import write_tiny_model

SOURCE, COPY = "openai/gpt-oss-20b", "gpt-oss-20b-bf16"
# The OCP Microscaling Formats specification: 32 values share a power of two.
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
GROUP, BIAS = 32, 127
SIZES = {"hidden_size": 64, "intermediate_size": 96}  # multiples of a group
CPU = torch.device("cpu")
CONVERT_S = 300


def mxfp4(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return experts `[E, in, out]` as blocks and scales of each output, and what they mean."""
    groups = weights.float().transpose(1, 2).unflatten(-1, (-1, GROUP))  # [E, out, in / 32, 32]
    exponents = groups.abs().amax(-1).log2().floor() - 2  # the largest value is 6, in 4 to 8
    scaled = groups / exponents.exp2()[..., None]
    codes = (scaled[..., None] - E2M1).abs().argmin(-1)
    blocks = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)
    meant = E2M1[codes] * exponents.exp2()[..., None]
    return blocks, (exponents + BIAS).to(torch.uint8), meant.flatten(2).transpose(1, 2)


def quantise(source: Path, target: Path) -> dict[str, torch.Tensor]:
    """Write a checkpoint as gpt-oss is published; return the weights that it stands for."""
    meant, stored = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for name, weight in load_file(source / "model.safetensors").items():
        value = weight.bfloat16()
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[f"{name}_blocks"], stored[f"{name}_scales"], exact = mxfp4(value)
            value = exact.bfloat16().contiguous()
            assert torch.equal(value.float(), exact)
        else:
            stored[name] = value
        meant[name] = value
    target.mkdir(parents=True)
    save_file(stored, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]
    config |= {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": kept}}
    (target / "config.json").write_text(json.dumps(config))
    for file in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_model_path() / file, target)
    return meant


def test_the_documented_command_makes_a_copy_that_is_served(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "plain", "gptoss", "groups-of-2-odd-vocabulary", **SIZES)
    meant = quantise(tmp_path / "plain", tmp_path / SOURCE)
    with pytest.raises(ModelLoadError, match=r"mxfp4.*docs/models\.md"):
        load_config(tmp_path / SOURCE)
    (command,) = [block.code for block in blocks() if "Mxfp4Config" in block.code]
    assert SOURCE in command and COPY in command
    done = subprocess.run(
        [sys.executable, "-P", "-c", command],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=CONVERT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    copied = load_file(tmp_path / COPY / "model.safetensors")
    assert copied.keys() == meant.keys()
    assert all(torch.equal(copied[name], meant[name]) for name in meant)
    config = load_config(tmp_path / COPY)
    load_model(tmp_path / COPY, config, CPU, torch.bfloat16, load_ops("torch", "cpu"))
    assert config.dtype == "bfloat16"
    before, after = (Tokenizer.from_dir(tmp_path / name) for name in (SOURCE, COPY))
    text = "Lambda  expressions, 東京 🌍\n"
    assert after.encode(text) == before.encode(text)
    assert (tmp_path / COPY / "generation_config.json").exists()
