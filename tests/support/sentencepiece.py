"""A small tokenizer of SentencePiece's style."""

from __future__ import annotations

import tokenizers
from tokenizers import Regex, decoders, models, normalizers

from pagewire.shared.text.tokenizer import Tokenizer


def sentencepiece_tokenizer() -> Tokenizer:
    """Return one like Llama 2's: spaces as U+2581, one stripped at the start, byte fallback."""
    words = ["<unk>", "<s>", *(f"<0x{b:02X}>" for b in range(256))]
    words += ["▁", *"abcdefghijklmnopqrstuvwxyz", "▁h", "▁w"]
    vocab = {word: i for i, word in enumerate(words)}
    merges = [("▁", "h"), ("▁", "w")]
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(Regex(" "), "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<s>"])
    return Tokenizer(backend, None, 1, frozenset())
