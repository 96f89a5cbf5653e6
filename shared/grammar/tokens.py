"""The model's vocabulary for llguidance."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

from llguidance import LLTokenizer

from pagewire.shared.base.errors import InvalidRequestError

_ESCAPE = re.compile(r"\\+(?:u([0-9a-fA-F]{4}))?")  # an escape in JSON or in a regular expression


@lru_cache(maxsize=4)
def load_vocabulary(model: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> LLTokenizer:
    """Return the vocabulary of a model.

    Args:
        model: the model's directory.
        vocab_size: number of logits of a row. If it exceeds the number of tokens, the other ids are
            never allowed.
        eos_token_ids: end-of-sequence tokens; allowed where the grammar may end.

    Raises:
        InvalidRequestError: the model has no usable tokenizer.json, or no end-of-sequence token.
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


def spells_special(text: str, vocabulary: LLTokenizer) -> bool:
    """Whether a grammar text contains the text of a special token, perhaps with escapes."""
    plain = _ESCAPE.sub(lambda found: chr(int(found[1], 16)) if found[1] else "", text)
    encoded = plain.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return any(map(vocabulary.is_special_token, vocabulary.tokenize_str(encoded)))


def mask_words(vocab_size: int) -> int:
    """Return the number of 32-bit words of a row's mask."""
    return -(-vocab_size // 32)
