"""A model directory of Llama-3.1-8B's shape without weights, for servers that make up their own."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pagewire.loadtest.bench.engine import LLAMA_8B


def write_model(directory: Path) -> None:
    """Write the configuration, and a tokenizer of one word per token id."""
    (directory / "config.json").write_text(json.dumps(LLAMA_8B))
    words = {f"t{i}": i for i in range(LLAMA_8B["vocab_size"])}
    words_model = models.WordLevel(words, unk_token="t0")  # noqa: S106 - a token of text
    tokenizer = Tokenizer(words_model)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "t128001"})
    )
