"""Writes a model directory without weights, for servers that use random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pagewire.loadtest.bench.shapes import LLAMA_8B


def write_model(directory: Path, shape: dict[str, Any] = LLAMA_8B) -> None:
    """Write a configuration, and a tokenizer with one word per token id.

    Args:
        directory: where the files are written.
        shape: content of config.json.
    """
    (directory / "config.json").write_text(json.dumps(shape))
    words = {f"t{i}": i for i in range(shape["vocab_size"])}
    words_model = models.WordLevel(words, unk_token="t0")  # noqa: S106 - a token of text
    tokenizer = Tokenizer(words_model)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(directory / "tokenizer.json"))
    end = f"t{shape['eos_token_id']}"
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end})
    )
