"""What a request of `/v1/embeddings` has besides its prompts."""

from __future__ import annotations

import msgspec

from pagewire.shared.control.protocol import PoolingMode


class EmbeddingForm(msgspec.Struct, frozen=True):
    """How the embeddings are made and written.

    Attributes:
        normalize: they have the length 1.
        dimensions: how many of the first numbers are wanted; None: all.
        as_base64: they are written as base64 of float32, not as lists of numbers.
    """

    pooling: PoolingMode
    normalize: bool
    dimensions: int | None
    as_base64: bool
