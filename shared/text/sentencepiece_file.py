"""Reads SentencePiece's `tokenizer.model`, a protocol buffer, with the classes of its package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError
from sentencepiece import sentencepiece_model_pb2

from pagewire.shared.base.errors import ModelLoadError

MAX_BYTES = 64 << 20
KINDS = {1: "unigram", 2: "bpe"}  # by the values of `model_type`


def read_sentencepiece(file: Path) -> Any:
    """Read a `tokenizer.model`; returns a `ModelProto` (sentencepiece_model.proto).

    Raises:
        ModelLoadError: it cannot be read, or is of a kind that is not supported; one line.
    """
    try:
        if file.stat().st_size > MAX_BYTES:
            raise ModelLoadError(f"{file} has more than {MAX_BYTES >> 20} MiB; check the file")
        data = file.read_bytes()
    except OSError as exc:
        raise ModelLoadError(f"{file} cannot be read: {exc.strerror}") from exc
    try:
        model = sentencepiece_model_pb2.ModelProto.FromString(data)
    except DecodeError as exc:
        raise _refusal(file, "it is corrupt") from exc
    trainer = model.trainer_spec
    if not model.pieces or trainer.model_type not in KINDS:
        raise _refusal(file, "it has no tokens, or is neither of the kind BPE nor unigram")
    if trainer.treat_whitespace_as_suffix or not model.normalizer_spec.escape_whitespaces:
        raise _refusal(file, "it marks spaces in another way than at the start of words")
    if max(trainer.unk_id, trainer.bos_id, trainer.eos_id) >= len(model.pieces):
        raise _refusal(file, "it names a special token that it does not have")
    return model


def _refusal(file: Path, reason: str) -> ModelLoadError:
    return ModelLoadError(
        f"{file} is not a SentencePiece model that can be converted ({reason}); fetch the model "
        "again, or one with a tokenizer.json"
    )
