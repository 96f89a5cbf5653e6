"""The model's vocabulary as llguidance sees it."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from llguidance import LLTokenizer

from pagewire.shared.errors import InvalidRequestError


@lru_cache(maxsize=4)
def load_vocabulary(model: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> LLTokenizer:
    """Return the vocabulary of a model.

    Args:
        model: its directory.
        vocab_size: logits of a row, which may be more than there are tokens; the rest is never
            allowed.
        eos_token_ids: what ends an answer. Allowed where a grammar may end.

    Raises:
        InvalidRequestError: the model has no tokenizer.json, or nothing ends its answers, so
            that grammars cannot be followed.
    """
    path = model / "tokenizer.json"
    if not eos_token_ids:
        raise InvalidRequestError("structured output: the model has no end-of-sequence token")
    try:
        text = path.read_text(encoding="utf-8")
        return LLTokenizer(text, n_vocab=vocab_size, eos_token=list(eos_token_ids))
    except (OSError, ValueError) as exc:
        raise InvalidRequestError(
            f"structured output: the model's tokenizer.json cannot be used for it: {exc}"
        ) from exc


def mask_words(vocab_size: int) -> int:
    """Return the number of 32-bit words of a row's mask."""
    return -(-vocab_size // 32)
