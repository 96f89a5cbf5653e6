"""Decides whether a checkpoint's output head is the embedding table, as Hugging Face does.

A configuration may say that the two are tied although the checkpoint has both, with different
values: then each is used for its own purpose. A fine-tune that trained the head, saved with the
base model's configuration, is such a checkpoint.
"""

from __future__ import annotations

import dataclasses

import torch
from safetensors import SafetensorError, safe_open

from pagewire.shared.base.errors import ModelLoadError
from pagewire.shared.model.model_config import ModelConfig
from pagewire.shared.model.safetensors_header import WeightsFile

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
_OF_HEAD = "lm_head."
_BARE_EMBEDDING = EMBEDDING.removeprefix("model.")

_ROWS = 4096  # compared at a time: the tables of a large vocabulary take gigabytes


def without_head(checkpoint: list[WeightsFile]) -> bool:
    """Whether a checkpoint has the names of a model without an output head, as embedding models."""
    return any(_BARE_EMBEDDING in file.tensors for file in checkpoint)


def settle_tie(
    config: ModelConfig, checkpoint: list[WeightsFile], dtype: torch.dtype
) -> ModelConfig:
    """Return the configuration, not tied where the checkpoint has two different tensors.

    Args:
        config: what `load_config` says of the model.
        checkpoint: the model's weights files.
        dtype: of the parameters; tensors that differ only in what it cannot hold are equal.

    Raises:
        ModelLoadError: a file cannot be read; one line.
    """
    tied = config.tie_word_embeddings and _is_one_tensor(checkpoint, dtype)
    return dataclasses.replace(config, tie_word_embeddings=tied)


def _is_one_tensor(checkpoint: list[WeightsFile], dtype: torch.dtype) -> bool:
    embedding, head = (
        next((file for file in checkpoint if name in file.tensors), None)
        for name in (EMBEDDING, HEAD)
    )
    if head is None:  # perhaps a quantised one is there
        return not any(name.startswith(_OF_HEAD) for file in checkpoint for name in file.tensors)
    if embedding is None:
        return True
    shape = head.tensors[HEAD].shape
    if embedding.tensors[EMBEDDING].shape != shape or len(shape) != 2:
        return False  # the loader says what is wrong with the shape
    return _are_equal(embedding, head, dtype)


def _are_equal(embedding: WeightsFile, head: WeightsFile, dtype: torch.dtype) -> bool:
    rows = head.tensors[HEAD].shape[0]
    try:
        with (
            safe_open(embedding.path, framework="pt") as one,
            safe_open(head.path, framework="pt") as other,
        ):
            table = one.get_slice(embedding.tensors[EMBEDDING].name)
            weights = other.get_slice(head.tensors[HEAD].name)
            return all(
                torch.equal(table[i : i + _ROWS].to(dtype), weights[i : i + _ROWS].to(dtype))
                for i in range(0, rows, _ROWS)
            )
    except (SafetensorError, OSError) as exc:
        raise ModelLoadError(
            f"weights files {embedding.path} and {head.path.name} cannot be read ({exc}); download "
            "them again"
        ) from exc
