"""Checkpoints with quantised weights: what their files have, and what is quantised in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagewire.kernels import load_ops
from pagewire.shared.base.errors import ModelLoadError
from pagewire.shared.model import loader
from pagewire.shared.model.config import load_config, model_fingerprint
from pagewire.shared.model.demo import demo_model_path
from pagewire.shared.model.loader import load_model
from pagewire.shared.model.weights_copy import TensorCopy, copy_weights
from pagewire.shared.worker.estimate import weight_bytes
from pagewire.tests.support.fp8_checkpoints import Layout, write_fp8
from pagewire.tests.support.quantised_checkpoints import WEIGHTS
from pagewire.tests.support.tiny_models import write_tiny_model

CPU, FLOAT = torch.device("cpu"), torch.float32


def quantise(path: Path, layout: Layout) -> Path:
    write_tiny_model(path / "plain", "llama", "groups-of-2-odd-vocabulary")
    write_fp8(path / "plain", path / "stored", path / "meant", layout)
    return path / "stored"


def edit(path: Path, name: str, tensor: torch.Tensor | None) -> None:
    tensors = load_file(path / WEIGHTS)
    tensors.pop(name, None)
    save_file(tensors if tensor is None else {**tensors, name: tensor}, path / WEIGHTS)


UP = "model.layers.0.mlp.up_proj"
WRONG = {
    "no-scale": (f"{UP}.weight_scale", None, f"1 tensor is missing ({UP}.weight_scale)"),
    "scale-of-another-shape": (
        f"{UP}.weight_scale",
        torch.ones(3, 1),
        f"1 tensor is of another shape ({UP}.weight_scale has [3, 1], not [80, 1])",
    ),
    "scale-of-another-dtype": (
        f"{UP}.weight_scale",
        torch.ones(80, 1, dtype=torch.int32),
        f"1 tensor is of another dtype ({UP}.weight_scale is I32, not F64 or F32 or F16 or BF16)",
    ),
    "embeddings-in-fp8": (
        "model.embed_tokens.weight",
        torch.ones(131, 48).to(torch.float8_e4m3fn),
        "model.embed_tokens is quantised, which is not supported: only projections may be",
    ),
}


@pytest.mark.parametrize(("name", "tensor", "message"), WRONG.values(), ids=WRONG)
def test_wrong_tensors_are_named(
    tmp_path: Path, name: str, tensor: torch.Tensor | None, message: str
) -> None:
    path = quantise(tmp_path, Layout("compressed-tensors", (1, None)))
    edit(path, name, tensor)
    with pytest.raises(ModelLoadError) as caught:
        load_model(path, load_config(path), CPU, torch.float32, load_ops("torch", "cpu"))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("family", "case", "while_loading", "by_layer"),
    [
        ("llama", "groups-of-2-odd-vocabulary", False, False),
        ("llama", "groups-of-2-odd-vocabulary", True, True),
        ("deepseekv2", "query-latents-biases", False, True),  # `kv_b_proj` leaves FP8
    ],
    ids=["as in the files", "quantised while loading", "latent attention"],
)
def test_a_model_whose_weights_are_converted_is_loaded_layer_by_layer(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    case: str,
    while_loading: bool,
    by_layer: bool,
) -> None:
    write_tiny_model(tmp_path / "plain", family, case)
    write_fp8(tmp_path / "plain", tmp_path / "stored", tmp_path / "meant", Layout("fp8", (32, 32)))
    path = tmp_path / ("plain" if while_loading else "stored")
    config = load_config(path, quantization="fp8" if while_loading else None)
    calls: list[int] = []

    def counting(fills: list[TensorCopy], on_bytes: Callable[[int], None]) -> None:
        calls.append(len(fills))
        copy_weights(fills, on_bytes)

    monkeypatch.setattr(loader, "copy_weights", counting)
    load_model(path, config, CPU, torch.float32, load_ops("torch", "cpu"))
    assert len(calls) == (config.num_layers + 2 if by_layer else 1)


def test_scales_of_a_quantised_cache_are_left_out_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = quantise(tmp_path, Layout("compressed-tensors", (1, None)))
    scales = ("k_scale", "v_scale", "q_scale", "prob_scale", "prob_output_scale")
    names = (*scales, "attn.kv_scale", "k_proj.output_scale", "k_zero_point", "v_zero_point")
    for name in names:
        edit(path, f"model.layers.0.self_attn.{name}", torch.ones(1))
    with caplog.at_level("INFO", "pagewire"):
        load_model(path, load_config(path), CPU, torch.float32, load_ops("torch", "cpu"))
    assert all(f"1 of *.{name.rpartition('.')[2]}" in caplog.text for name in names)


@pytest.mark.parametrize(
    "layout", [Layout("fp8", (None, None)), Layout("compressed-tensors", (1, None), inputs=False)]
)
def test_scales_of_inputs_that_have_their_own_are_left_out(tmp_path: Path, layout: Layout) -> None:
    path = quantise(tmp_path, layout)
    before = list(
        load_model(path, load_config(path), CPU, FLOAT, load_ops("torch", "cpu")).stored()
    )
    edit(path, f"{UP}.input_scale", torch.tensor(0.02))
    after = list(load_model(path, load_config(path), CPU, FLOAT, load_ops("torch", "cpu")).stored())
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


SHAPES = {
    "channel-flat": ((1, None), (-1,)),
    "channel-in-a-row": ((1, None), (1, -1)),
    "tensor-of-1": ((None, None), (1,)),
    "tensor-of-1-by-1": ((None, None), (1, 1)),
}


@pytest.mark.parametrize(("block", "shape"), SHAPES.values(), ids=SHAPES)
def test_scales_may_have_any_shape_of_their_numbers(
    tmp_path: Path, block: tuple[int | None, int | None], shape: tuple[int, ...]
) -> None:
    path = quantise(tmp_path, Layout("compressed-tensors", block))
    before = list(
        load_model(path, load_config(path), CPU, FLOAT, load_ops("torch", "cpu")).stored()
    )
    scale = load_file(path / WEIGHTS)[f"{UP}.weight_scale"]
    edit(path, f"{UP}.weight_scale", scale.reshape(shape))
    after = list(load_model(path, load_config(path), CPU, FLOAT, load_ops("torch", "cpu")).stored())
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


@pytest.mark.parametrize("tensor", ["qweight", "weight_packed", "weight"])
def test_quantised_weights_that_nothing_describes_are_named(tmp_path: Path, tensor: str) -> None:
    write_tiny_model(tmp_path, "llama", "groups-of-2-odd-vocabulary")
    dtype = torch.float8_e4m3fn if tensor == "weight" else torch.int32
    edit(tmp_path, f"{UP}.{tensor}", torch.ones(80, 48).to(dtype))
    message = f"{UP} is quantised, but config.json has no quantization_config"
    with pytest.raises(ModelLoadError, match=message):
        load_model(tmp_path, load_config(tmp_path), CPU, FLOAT, load_ops("torch", "cpu"))


def test_scales_of_a_quantised_cache_alone_are_left_out(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "llama", "groups-of-2-odd-vocabulary")
    edit(tmp_path, "model.layers.0.self_attn.k_scale", torch.ones(1))
    load_model(tmp_path, load_config(tmp_path), CPU, torch.float32, load_ops("torch", "cpu"))


def test_a_weight_that_the_file_has_unquantised_is_taken_so(tmp_path: Path) -> None:
    path = quantise(tmp_path, Layout("compressed-tensors", (1, None)))
    plain = load_file(tmp_path / "meant" / WEIGHTS)[f"{UP}.weight"]
    edit(path, f"{UP}.weight_scale", None)
    edit(path, f"{UP}.weight", plain)
    model = load_model(path, load_config(path), CPU, torch.float32, load_ops("torch", "cpu"))
    assert torch.equal(dict(model.targets())[f"{UP}.weight"], plain)


@pytest.mark.parametrize(
    "layout",
    [
        Layout("compressed-tensors", (1, None)),
        Layout("compressed-tensors", (None, None), static=True),
        Layout("fp8", (32, 32)),
        Layout("fp8", (128, 128), skipped=r"lm_head|.*k_proj"),
    ],
    ids=["channel", "static", "blocks", "large-blocks"],
)
def test_estimated_bytes_are_those_of_the_loaded_model(tmp_path: Path, layout: Layout) -> None:
    path = quantise(tmp_path, layout)
    model = load_model(path, load_config(path), CPU, torch.bfloat16, load_ops("torch", "cpu"))
    expected = sum(each.nbytes for each in model.stored())
    assert weight_bytes(load_config(path), torch.bfloat16) == expected


def test_quantising_while_loading_is_another_model_with_fewer_bytes() -> None:
    path = demo_model_path()
    plain, quantised = load_config(path), load_config(path, quantization="fp8")
    assert model_fingerprint(path, plain) != model_fingerprint(path, quantised)
    assert model_fingerprint(path, plain, "dummy") != model_fingerprint(path, quantised, "dummy")
    assert quantised.quantization is not None
    other = replace(quantised, quantization=replace(quantised.quantization, kept=()))
    assert model_fingerprint(path, other) != model_fingerprint(path, quantised)
    fewer = weight_bytes(quantised, torch.bfloat16)
    assert fewer < 0.75 * weight_bytes(plain, torch.bfloat16)
    model = load_model(path, quantised, CPU, torch.bfloat16, load_ops("torch", "cpu"))
    assert sum(each.nbytes for each in model.stored()) == fewer


def test_quantising_while_loading_is_not_for_transformers_code() -> None:
    with pytest.raises(ModelLoadError, match="--quantization fp8 is only for models that"):
        load_config(demo_model_path(), "transformers", "fp8")
