"""Builds a model and fills its parameters, from safetensors files or at random."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open

from pagewire.kernels import Ops
from pagewire.shared.errors import ModelLoadError
from pagewire.shared.model.families import ARCHITECTURES
from pagewire.shared.model.layers.decoder import DecoderModel
from pagewire.shared.model.layers.factory import LayerFactory
from pagewire.shared.model.model_config import ModelConfig
from pagewire.shared.model.safetensors_header import WeightsFile, find_weights
from pagewire.shared.model.tied_head import EMBEDDING, HEAD, settle_tie

LoadFormat = Literal["safetensors", "dummy"]
# Which tensors to take from which file.
LoadPlan = list[tuple[WeightsFile, list[str]]]

_FLOAT_DTYPES = {"F64", "F32", "F16", "BF16"}
_STACKED = ".experts.gate_up_proj"
_DUMMY_SEED = 0
_DUMMY_STD = 0.02
# Old checkpoints carry the rotary frequencies, which follow from the configuration.
_DERIVED = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")


def load_model(
    path: Path | None,
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    ops: Ops,
    load_format: LoadFormat = "safetensors",
    max_positions: int | None = None,
) -> DecoderModel:
    """Return a model that is ready to run.

    Weights go straight to the device, one tensor at a time, converted to `dtype` on the way.

    Args:
        path: the model's directory; not looked at for `dummy`.
        config: what `load_config` says of it.
        device: for the parameters.
        dtype: of the parameters and activations.
        ops: kernels that suit the device.
        load_format: `dummy` fills the parameters at random, always alike on one kind of device.
        max_positions: longest sequence; None takes the model's.

    Raises:
        ModelLoadError: files are missing, corrupt, or of another model, or the device has no
            memory for them; one line.
    """
    positions = max_positions or config.max_position_embeddings
    checkpoint: list[WeightsFile] = []
    stacked = False
    plan: LoadPlan = []
    if load_format == "safetensors":
        if path is None:
            raise ModelLoadError("load_format safetensors needs a model directory")
        checkpoint = find_weights(path)
        config = settle_tie(config, checkpoint, dtype)
        stacked = _has_stacked_experts(checkpoint)
        # A wrong or corrupt file should not cost the allocation of a large model: check its
        # header against a model that is all shapes and no memory.
        shapes = build_model(config, torch.device("meta"), dtype, ops, 1, stacked)
        plan = _plan(_targets(shapes, checkpoint), checkpoint, config.tie_word_embeddings)
    try:
        model = build_model(config, device, dtype, ops, positions, stacked)
    except RuntimeError as exc:  # torch.OutOfMemoryError is one, and a CPU raises it bare
        raise ModelLoadError(
            f"no memory on {device} for a {config.architecture} of {config.num_layers} layers in "
            f"{dtype}: {str(exc).splitlines()[0]}"
        ) from exc
    if load_format == "dummy":
        _fill_randomly(model, device)
    else:
        _fill(_targets(model, checkpoint), plan, device)
    return model


def build_model(
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    ops: Ops,
    max_positions: int,
    stacked_experts: bool = False,
) -> DecoderModel:
    """Return a model of the configuration's family, its parameters not filled."""
    make = LayerFactory(device, dtype, ops, max_positions, stacked_experts)
    return ARCHITECTURES[config.architecture].build(config, make)


def _has_stacked_experts(checkpoint: list[WeightsFile]) -> bool:
    """Whether a layer's experts are in one tensor; if not, each has its own."""
    return any(name.endswith(_STACKED) for file in checkpoint for name in file.tensors)


def _fill_randomly(model: DecoderModel, device: torch.device) -> None:
    """Fill matrices and biases with small normal values, normalisations with ones."""
    generator = torch.Generator(device).manual_seed(_DUMMY_SEED)
    for name, target in model.targets():
        if name.endswith("norm.weight"):
            target.fill_(1.0)
        else:
            target.normal_(0.0, _DUMMY_STD, generator=generator)


def _targets(model: DecoderModel, checkpoint: list[WeightsFile]) -> dict[str, torch.Tensor]:
    """Return what each tensor of the checkpoint fills, by its name there."""
    targets = dict(model.targets())
    names = {name for file in checkpoint for name in file.tensors}
    if model.config.tie_word_embeddings and HEAD in names and EMBEDDING not in names:
        targets[HEAD] = targets.pop(EMBEDDING)  # one tensor, saved under its other name
    return targets


def _fill(targets: dict[str, torch.Tensor], plan: LoadPlan, device: torch.device) -> None:
    for file, names in plan:
        try:
            with safe_open(file.path, framework="pt", device=str(device)) as weights:
                for name in names:
                    targets[name].copy_(weights.get_tensor(name))
        except (SafetensorError, OSError) as exc:
            raise ModelLoadError(
                f"weights file {file.path} cannot be read ({exc}); download it again"
            ) from exc


def _plan(targets: dict[str, torch.Tensor], checkpoint: list[WeightsFile], tied: bool) -> LoadPlan:
    """Return which tensors to take from which file: every target exactly once.

    Raises:
        ModelLoadError: a tensor is missing, there twice, unknown, or of another shape.
    """
    plan: LoadPlan = []
    holder: dict[str, WeightsFile] = {}
    for file in checkpoint:
        names = [name for name in file.tensors if name in targets or not _is_ignored(name, tied)]
        for name in names:
            _check_tensor(name, targets, file, holder.get(name))
            holder[name] = file
        plan.append((file, names))
    missing = [name for name in targets if name not in holder]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelLoadError(
            f"the weights in {checkpoint[0].path.parent} lack the tensor {missing[0]}{more}; check "
            "that config.json belongs to them, or download them again"
        )
    return plan


def _is_ignored(name: str, tied: bool) -> bool:
    """Whether a checkpoint's tensor adds nothing: it follows from the configuration or another."""
    return _DERIVED.fullmatch(name) is not None or (tied and name == HEAD)


def _check_tensor(
    name: str, targets: dict[str, torch.Tensor], file: WeightsFile, earlier: WeightsFile | None
) -> None:
    entry = file.tensors[name]
    if name not in targets:
        raise ModelLoadError(
            f"weights file {file.path} has a tensor {name} that config.json has no place for; "
            "check that they belong together"
        )
    if earlier is not None:
        raise ModelLoadError(
            f"tensor {name} is both in {earlier.path} and in {file.path.name}; download them again"
        )
    expected = tuple(targets[name].shape)
    if entry.shape != expected:
        raise ModelLoadError(
            f"tensor {name} in {file.path} has shape {list(entry.shape)}, but config.json asks for "
            f"{list(expected)}; check that they belong together"
        )
    if entry.dtype not in _FLOAT_DTYPES:
        raise ModelLoadError(
            f"tensor {name} in {file.path} is {entry.dtype}; quantised weights are not supported, "
            "pass an unquantised checkpoint"
        )
