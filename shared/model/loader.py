"""Builds a model and fills its parameters, from safetensors files or at random."""

from __future__ import annotations

import dataclasses
import logging
import math
import zlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch

from pagewire.kernels import Ops
from pagewire.kernels.four_bits import EXPONENT_BIAS
from pagewire.shared.base.errors import ModelLoadError
from pagewire.shared.model.families import ARCHITECTURES
from pagewire.shared.model.kv_scales import has_kv_scales, separate_kv_scales
from pagewire.shared.model.latent_config import LatentConfig
from pagewire.shared.model.layers.decoder import DecoderModel
from pagewire.shared.model.layers.factory import LayerFactory
from pagewire.shared.model.layers.fp8 import E4M3
from pagewire.shared.model.layers.int4 import GROUP_INDEX
from pagewire.shared.model.layers.norm import Norm
from pagewire.shared.model.layers.parameters import (
    NamedParameters,
    TensorTarget,
    named_targets,
)
from pagewire.shared.model.load_progress import LoadProgress
from pagewire.shared.model.model_config import ModelConfig
from pagewire.shared.model.quantization.checkpoint import (
    INPUT_SCALE,
    KV_SCALES,
    KV_ZEROS,
    added_biases,
    settle_formats,
)
from pagewire.shared.model.safetensors_header import WeightsFile, find_weights, rename_tensors
from pagewire.shared.model.shard import WHOLE, Communicator, Shard
from pagewire.shared.model.tied_head import EMBEDDING, HEAD, settle_tie, without_head
from pagewire.shared.model.weights_copy import TensorCopy, copy_weights
from pagewire.shared.model.weights_match import FLOAT_DTYPES, Expected, match_weights

logger = logging.getLogger(__name__)

LoadFormat = Literal["safetensors", "dummy"]
Progress = Callable[[str], None]

_STACKED = ".experts.gate_up_proj"
_DUMMY_STD = 0.002
_DUMMY_STD_OF_NUMBERS = 6.0  # before scales: of random numbers of 4 bits less zeros; in FP8, too
_DUMMY_STD_OF_E2M1 = 2.9
_DUMMY_ROWS = 4096  # made at a time in float32
# Dtypes in a file of what fills a parameter of this dtype; others are filled from any float dtype.
_FILLED_BY = {
    E4M3: ("F8_E4M3",),
    torch.uint8: ("U8",),
    torch.int32: ("I32",),
    torch.int64: ("I64", "I32"),
}
_DUMMY_STD_OF = {EMBEDDING.removesuffix(".weight"): 1.0, HEAD.removesuffix(".weight"): 0.02}


def load_model(
    path: Path | None,
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    ops: Ops,
    load_format: LoadFormat = "safetensors",
    max_positions: int | None = None,
    progress: Progress = lambda _line: None,
    shard: Shard = WHOLE,
    communicator: Communicator | None = None,
) -> DecoderModel:
    """Return a model that is ready to run.

    Weights go to the device in parts, by several threads, converted to `dtype` on the way.

    Args:
        path: the model's directory; not used for `dummy`.
        config: the result of `load_config`.
        device: device of the parameters.
        dtype: dtype of parameters and activations.
        ops: kernels that suit the device.
        load_format: `dummy` fills the parameters with random values, the same on each device of one
            kind.
        max_positions: longest sequence; None takes the model's.
        progress: called with a line every few seconds if stderr is not a terminal; a terminal
            gets a bar.
        shard: the part of the model that this rank runs; of files it reads only this part.
        communicator: of the model's ranks; None if the model is whole.

    Raises:
        ModelLoadError: files are missing, corrupt, or of another model, the device has no memory
            for them, or this number of ranks cannot share the model; one line.
    """
    positions = max_positions or config.max_position_embeddings
    _warn_of_long_factors(config, positions)
    checkpoint: list[WeightsFile] = []
    stacked = False
    fills: dict[str, TensorCopy] = {}
    if load_format == "safetensors":
        checkpoint, config = _find_checkpoint(path, config, dtype)
        stacked = _has_stacked_experts(checkpoint)
        # Check the files' headers before memory is allocated, against a model on the meta
        # device, which has only shapes.
        meta = torch.device("meta")
        shapes = build_model(config, meta, dtype, ops, 1, stacked, shard, communicator)
        fills = _match(shapes, checkpoint)
    with _naming_memory(config, device, dtype):
        model = build_model(config, device, dtype, ops, positions, stacked, shard, communicator)
    if load_format == "dummy":
        _fill_randomly(model, device)
    else:
        _fill(model, fills, progress)
    return model


def _find_checkpoint(
    path: Path | None, config: ModelConfig, dtype: torch.dtype
) -> tuple[list[WeightsFile], ModelConfig]:
    """Return a model's files, and its configuration, adjusted to whether they have a head."""
    if path is None:
        raise ModelLoadError("load_format safetensors needs a model directory")
    prefixes = ARCHITECTURES[config.architecture].renamed_prefixes
    checkpoint = [rename_tensors(file, prefixes) for file in find_weights(path)]
    if without_head(checkpoint):
        checkpoint = [rename_tensors(file, {"": "model."}) for file in checkpoint]
        config = dataclasses.replace(config, tie_word_embeddings=True)
        logger.warning(
            "checkpoint has no lm_head: generated text would be random, use it for embeddings only"
        )
    checkpoint, quantization = settle_formats(config.quantization, checkpoint)
    config = dataclasses.replace(config, quantization=quantization)
    if config.kv_dtype is not None:
        checkpoint, scales = separate_kv_scales(checkpoint, config.num_layers)
        config = dataclasses.replace(config, kv_scales=scales)
    elif has_kv_scales(checkpoint):
        logger.info(
            "the checkpoint has scales for a KV cache in FP8, which --kv-cache-dtype fp8 uses"
        )
    return checkpoint, settle_tie(config, checkpoint, dtype)


@contextmanager
def _naming_memory(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Name what could not be allocated, if an allocation fails."""
    try:
        yield
    except RuntimeError as exc:  # torch.OutOfMemoryError is one, and a CPU raises it bare
        advice = ""
        if device.type == "cuda":
            advice = "; `pagewire estimate` says how many GPUs fit it (--tensor-parallel-size)"
        raise ModelLoadError(
            f"no memory on {device} for a {config.architecture} of {config.num_layers} layers in "
            f"{dtype}: {str(exc).splitlines()[0]}{advice}"
        ) from exc


def _warn_of_long_factors(config: ModelConfig, positions: int) -> None:
    if config.rope.is_long(positions):
        original = config.rope.original_max_position_embeddings
        logger.warning(
            "using longrope's long factors for all sequences, since up to %d tokens are served: "
            "answers within %d differ from Hugging Face's. --max-model-len %d takes the short "
            "factors",
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
    shard: Shard = WHOLE,
    communicator: Communicator | None = None,
) -> DecoderModel:
    """Return a model of the configuration's family with parameters that are not filled.

    A part of a model can run only with a communicator; without one, it shows sizes.

    Raises:
        ModelLoadError: this number of ranks cannot share the model; one line.
    """
    make = LayerFactory(
        device,
        dtype,
        ops,
        max_positions,
        stacked_experts,
        config.quantization,
        shard,
        communicator,
    )
    return ARCHITECTURES[config.architecture].build(config, make)


def _has_stacked_experts(checkpoint: list[WeightsFile]) -> bool:
    """Whether a layer's experts are in one tensor; if not, each has its own."""
    return any(name.endswith(_STACKED) for file in checkpoint for name in file.tensors)


def _fill_randomly(model: DecoderModel, device: torch.device) -> None:
    """Fill matrices and biases with small normal values, normalisations with ones.

    Values depend on a tensor's name and shape alone, so that ranks whose parts have different sizes
    still have the same values in what all of them hold.

    The outputs of layers are so small compared with the embeddings that hidden states differ as
    much as tokens do. With larger values, the hidden states of a prompt's tokens would become
    similar from layer to layer, and a mixture would send all tokens to the same experts.
    """
    generator = torch.Generator(device)
    for section in model.sections():
        for target in named_targets(section):
            generator.manual_seed(zlib.crc32(target.name.encode()))
            _fill_one(target.name, target.tensor, generator)
        if model.config.quantization is not None:
            for _, each in section:
                if not isinstance(each, Norm):  # norms have their final values
                    each.finish()


def _fill_one(name: str, target: torch.Tensor, generator: torch.Generator) -> None:
    std = _DUMMY_STD_OF.get(name.rpartition(".")[0], _DUMMY_STD)
    if name.endswith("norm.weight"):
        target.fill_(1.0)
    elif target.dtype == E4M3:
        for rows in target.split(_DUMMY_ROWS):
            values = torch.empty(rows.shape, device=rows.device, dtype=torch.float32)
            rows.copy_(values.normal_(0.0, _DUMMY_STD_OF_NUMBERS, generator=generator))
    elif target.dtype == torch.uint8:  # of MXFP4: exponents of powers of two, pairs of numbers
        if name.endswith("_scales"):
            target.fill_(EXPONENT_BIAS + round(math.log2(std / _DUMMY_STD_OF_E2M1)))
        else:
            target.random_(0, 256, generator=generator)
    elif target.dtype == torch.int32:  # numbers of 4 bits
        if not name.endswith(GROUP_INDEX):
            target.random_(-(2**31), 2**31, generator=generator)
    elif target.dtype == torch.int64:  # a shape, which is not used
        target.zero_()
    elif name.endswith(("_scale", ".scales")):
        target.fill_(std / _DUMMY_STD_OF_NUMBERS)
    else:
        target.normal_(0.0, std, generator=generator)


def _targets(
    parameters: Iterable[NamedParameters], names: Container[str], tied: bool
) -> Iterator[TensorTarget]:
    """Yield what to fill, by which of these names the checkpoint's tensors have."""
    is_head = tied and HEAD in names and EMBEDDING not in names  # saved under its other name
    for target in named_targets(parameters):
        yield target._replace(name=HEAD) if is_head and target.name == EMBEDDING else target


def _fill(
    model: DecoderModel,
    fills: Mapping[str, TensorCopy],
    progress: Progress,
) -> None:
    """Copy each tensor from the file that holds it, and convert what has another form there.

    Of the fills, targets are still to be replaced: they are those of a model on the meta device.
    If weights have another form in the files, the model is loaded layer by layer: what a layer has
    in that form takes memory only until the next one is loaded.
    """
    total = sum(fill.num_bytes for fill in fills.values())
    config = model.config
    quantization = config.quantization
    is_converted = quantization is not None and (
        quantization.converts or isinstance(config, LatentConfig)  # `kv_b_proj` leaves FP8
    )
    sections = model.sections() if is_converted else [list(model.parameters())]
    with LoadProgress("loading weights", total, progress) as bar:
        for section in sections:
            targets = _targets(section, fills, config.tie_word_embeddings)
            copy_weights(
                [fills[target.name]._replace(target=target.tensor) for target in targets],
                bar.add,
            )
            for _, target in section:
                target.finish()
    logger.info("loaded weights: %s", bar.summary)


def _match(model: DecoderModel, checkpoint: list[WeightsFile]) -> dict[str, TensorCopy]:
    """Return which part of which file fills each tensor, given a model on the meta device.

    Raises:
        ModelLoadError: the checkpoint is of another model; one line.
    """
    config = model.config
    ignored = ARCHITECTURES[config.architecture].ignored_prefixes
    names = {name for file in checkpoint for name in file.tensors}
    tied = config.tie_word_embeddings
    targets = {target.name: target for target in _targets(model.parameters(), names, tied)}
    matched = match_weights(
        {
            name: Expected(each.shape, _FILLED_BY.get(each.tensor.dtype, FLOAT_DTYPES))
            for name, each in targets.items()
        },
        checkpoint,
        surplus=(HEAD,) if tied else (),
        ignored_prefixes=[prefix.format(num_layers=config.num_layers) for prefix in ignored],
        ignored_suffixes=(*KV_SCALES, *KV_ZEROS, INPUT_SCALE),
        zeros=added_biases(config.quantization),
    )
    if matched.ignored:
        counts = ", ".join(f"{count} of {names}" for names, count in matched.ignored.items())
        logger.info("skipping tensors that %s does not use: %s", config.architecture, counts)
    return {
        name: TensorCopy(file, file.tensors[name], targets[name].tensor, targets[name].cuts)
        for name, file in matched.holders.items()
    }
