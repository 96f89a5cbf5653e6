"""Encoding a text with a tokenizer of the `tokenizers` library."""

from __future__ import annotations

import tokenizers

from pagewire.shared.errors import InvalidRequestError


def encode_text(backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    """Return the token ids of a text.

    Args:
        backend: the tokenizer.
        text: any length.
        add_special_tokens: begin and end the text as the model wants it.

    Raises:
        InvalidRequestError: the text is not valid Unicode.
    """
    try:
        # Unlike `encode`, this lets other threads run meanwhile: a long text takes seconds.
        encodings = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    except TypeError as exc:  # JSON can carry one, and then the library sees no text.
        raise InvalidRequestError("the text is not valid Unicode: a lone surrogate") from exc
    ids: list[int] = encodings[0].ids
    return ids
