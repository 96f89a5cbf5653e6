"""What a request of `/v1/embeddings` has in addition to its prompts."""

from __future__ import annotations

import msgspec

from pagewire.shared.control.protocol import PoolingMode


class EmbeddingForm(msgspec.Struct, frozen=True):
    """How embeddings are computed and written.

    Attributes:
        pooling: how a prompt's hidden states become one vector.
        normalize: whether they have the length 1.
        dimensions: how many of their first numbers to return; None: all.
        as_base64: whether they are written as base64 of float32, not as lists of numbers.
    """

    pooling: PoolingMode
    normalize: bool
    dimensions: int | None
    as_base64: bool
