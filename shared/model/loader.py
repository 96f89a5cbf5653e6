"""Builds a model and fills its parameters, from safetensors files or at random."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import torch

from pagewire.kernels import Ops
from pagewire.shared.errors import ModelLoadError
from pagewire.shared.model.families import ARCHITECTURES
from pagewire.shared.model.layers.decoder import DecoderModel
from pagewire.shared.model.layers.factory import LayerFactory
from pagewire.shared.model.load_progress import LoadProgress
from pagewire.shared.model.model_config import ModelConfig
from pagewire.shared.model.safetensors_header import WeightsFile, find_weights, rename_tensors
from pagewire.shared.model.tied_head import EMBEDDING, HEAD, settle_tie, without_head
from pagewire.shared.model.weights_copy import Fill, copy_weights
from pagewire.shared.model.weights_match import match_weights

logger = logging.getLogger(__name__)

LoadFormat = Literal["safetensors", "dummy"]
Progress = Callable[[str], None]

_STACKED = ".experts.gate_up_proj"
_DUMMY_SEED = 0
_DUMMY_STD = 0.002
_DUMMY_STD_OF = {EMBEDDING: 1.0, HEAD: 0.02}


def load_model(
    path: Path | None,
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    ops: Ops,
    load_format: LoadFormat = "safetensors",
    max_positions: int | None = None,
    progress: Progress = lambda _line: None,
) -> DecoderModel:
    """Return a model that is ready to run.

    Weights go to the device in parts, by several threads, converted to `dtype` on the way.

    Args:
        path: the model's directory; not looked at for `dummy`.
        config: what `load_config` says of it.
        device: for the parameters.
        dtype: of the parameters and activations.
        ops: kernels that suit the device.
        load_format: `dummy` fills the parameters at random, always alike on one kind of device.
        max_positions: longest sequence; None takes the model's.
        progress: takes a line now and then, if stderr is not a terminal, which gets a bar.

    Raises:
        ModelLoadError: files are missing, corrupt, or of another model, or the device has no
            memory for them; one line.
    """
    positions = max_positions or config.max_position_embeddings
    _note_long_factors(config, positions)
    checkpoint: list[WeightsFile] = []
    stacked = False
    holders: dict[str, WeightsFile] = {}
    if load_format == "safetensors":
        checkpoint, config = _find_checkpoint(path, config, dtype)
        stacked = _has_stacked_experts(checkpoint)
        # A wrong or corrupt file should not cost the allocation of a large model: check its
        # header against a model that is all shapes and no memory.
        shapes = build_model(config, torch.device("meta"), dtype, ops, 1, stacked)
        holders = _match(shapes, checkpoint)
    model = _allocate(config, device, dtype, ops, positions, stacked)
    if load_format == "dummy":
        _fill_randomly(model, device)
    else:
        _fill(_targets(model, checkpoint), holders, device, progress)
        model.finish_loading()
    return model


def _find_checkpoint(
    path: Path | None, config: ModelConfig, dtype: torch.dtype
) -> tuple[list[WeightsFile], ModelConfig]:
    """Return a model's files, and the configuration as they say whether it has an output head."""
    if path is None:
        raise ModelLoadError("load_format safetensors needs a model directory")
    prefixes = ARCHITECTURES[config.architecture].renamed_prefixes
    checkpoint = [rename_tensors(file, prefixes) for file in find_weights(path)]
    if without_head(checkpoint):
        checkpoint = [rename_tensors(file, {"": "model."}) for file in checkpoint]
        config = dataclasses.replace(config, tie_word_embeddings=True)
        logger.warning("the weights have no output head: only embeddings mean something")
    return checkpoint, settle_tie(config, checkpoint, dtype)


def _allocate(
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    ops: Ops,
    positions: int,
    stacked: bool,
) -> DecoderModel:
    try:
        return build_model(config, device, dtype, ops, positions, stacked)
    except RuntimeError as exc:  # torch.OutOfMemoryError is one, and a CPU raises it bare
        raise ModelLoadError(
            f"no memory on {device} for a {config.architecture} of {config.num_layers} layers in "
            f"{dtype}: {str(exc).splitlines()[0]}"
        ) from exc


def _note_long_factors(config: ModelConfig, positions: int) -> None:
    if config.rope.is_long(positions):
        original = config.rope.original_max_position_embeddings
        logger.warning(
            "all sequences have longrope's long factors, as up to %d tokens are served: answers "
            "within %d differ from Hugging Face's. --max-model-len %d takes the short factors",
            positions,
            original,
            original,
        )


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
    """Fill matrices and biases with small normal values, normalisations with ones.

    What layers add is so small next to the embeddings that hidden states stay as different as
    tokens are. With larger values, what the tokens of a prompt have in common grows from layer to
    layer, and a mixture sends all of them to the same experts.
    """
    generator = torch.Generator(device).manual_seed(_DUMMY_SEED)
    for name, target in model.targets():
        if name.endswith("norm.weight"):
            target.fill_(1.0)
        else:
            std = _DUMMY_STD_OF.get(name, _DUMMY_STD)
            target.normal_(0.0, std, generator=generator)


def _targets(model: DecoderModel, checkpoint: list[WeightsFile]) -> dict[str, torch.Tensor]:
    """Return what each tensor of the checkpoint fills, by its name there."""
    targets = dict(model.targets())
    names = {name for file in checkpoint for name in file.tensors}
    if model.config.tie_word_embeddings and HEAD in names and EMBEDDING not in names:
        targets[HEAD] = targets.pop(EMBEDDING)  # one tensor, saved under its other name
    return targets


def _fill(
    targets: Mapping[str, torch.Tensor],
    holders: Mapping[str, WeightsFile],
    device: torch.device,
    progress: Progress,
) -> None:
    """Copy each tensor from the file that holds it."""
    fills = [Fill(file, file.tensors[name], targets[name]) for name, file in holders.items()]
    total = sum(fill.entry.num_bytes for fill in fills)
    with LoadProgress("loading weights", total, progress) as shown:
        copy_weights(fills, device, shown.add)
    logger.info("loaded weights: %s", shown.summary)


def _match(model: DecoderModel, checkpoint: list[WeightsFile]) -> dict[str, WeightsFile]:
    """Return the file of each tensor, given a model that is all shapes and no memory.

    Raises:
        ModelLoadError: the checkpoint is of another model; one line.
    """
    config = model.config
    ignored = ARCHITECTURES[config.architecture].ignored_prefixes
    found = match_weights(
        {name: tuple(target.shape) for name, target in _targets(model, checkpoint).items()},
        checkpoint,
        surplus=(HEAD,) if config.tie_word_embeddings else (),
        ignored_prefixes=[prefix.format(num_layers=config.num_layers) for prefix in ignored],
    )
    if found.ignored:
        counts = ", ".join(f"{count} of {prefix}*" for prefix, count in found.ignored.items())
        logger.info("tensors that %s does not use are not loaded: %s", config.architecture, counts)
    return found.holders
