"""Finds which tensors of a checkpoint are quantised by looking at its files."""

from __future__ import annotations

import dataclasses

from pagewire.shared.base.errors import ModelLoadError
from pagewire.shared.model.quantization.config import QuantConfig
from pagewire.shared.model.safetensors_header import WeightsFile

# Scales of a KV cache in FP8, which are not used if it has the dtype of activations, or if they are
# of other things: of queries, of attention's probabilities, or of the output of a fused projection.
KV_SCALES = (
    *(".k_scale", ".v_scale", ".kv_scale", ".q_scale"),
    *(".prob_scale", ".prob_output_scale", ".output_scale"),
)
KV_ZEROS = (".k_zero_point", ".v_zero_point")  # of a KV cache in integers
# Scales of inputs are not used where each token's has its own, or inputs are not quantised.
INPUT_SCALE = ".input_scale"

_EMBEDDING = "model.embed_tokens"
_WEIGHT = ".weight"
_PACKED = (".qweight", ".weight_packed")
_FP8 = "F8_E4M3"
_BLOCKS = "_blocks"  # after the name of experts in MXFP4
# Names that some writers give to scales, and the names here. All multiply: "inv" stands for the
# inverse of what weights were multiplied by.
_RENAMED = {".weight_scale_inv": ".weight_scale", ".activation_scale": INPUT_SCALE}


def settle_formats(
    quantization: QuantConfig | None, checkpoint: list[WeightsFile]
) -> tuple[list[WeightsFile], QuantConfig | None]:
    """Return the files with the names that scales have here, and what is quantised in them.

    Args:
        quantization: what config.json says.
        checkpoint: the model's weights files.

    Raises:
        ModelLoadError: embeddings are quantised, or weights of which config.json says nothing; one
            line.
    """
    quantised = frozenset(
        name.removesuffix(_BLOCKS) if name.endswith(_BLOCKS) else name.rpartition(".")[0]
        for file in checkpoint
        for name, entry in file.tensors.items()
        if name.endswith((*_PACKED, _BLOCKS)) or (name.endswith(_WEIGHT) and entry.dtype == _FP8)
    )
    if quantization is None or quantization.while_loading:
        if quantised:
            raise ModelLoadError(
                f"{min(quantised)} is quantised, but config.json has no quantization_config that "
                "says how: it is of another checkpoint, so download both again"
            )
        return checkpoint, quantization
    if _EMBEDDING in quantised:
        raise ModelLoadError(
            f"{_EMBEDDING} is quantised, which is not supported: only projections may be, pass a "
            "checkpoint whose embeddings are not"
        )
    return (
        [_with_names(file) for file in checkpoint],
        dataclasses.replace(quantization, quantised=quantised),
    )


def added_biases(quantization: QuantConfig | None) -> frozenset[str]:
    """Return the names of biases, all zero, that writers add to projections that have none."""
    if quantization is None or quantization.dialect != "gptq":
        return frozenset()
    return frozenset(f"{name}.bias" for name in quantization.quantised or ())


def _with_names(file: WeightsFile) -> WeightsFile:
    tensors = {_renamed(name): entry for name, entry in file.tensors.items()}
    return file if len(tensors) < len(file.tensors) else dataclasses.replace(file, tensors=tensors)


def _renamed(name: str) -> str:
    for theirs, ours in _RENAMED.items():
        if name.endswith(theirs):
            return name.removesuffix(theirs) + ours
    return name
