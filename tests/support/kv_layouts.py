"""Layouts of made-up models' KV blocks, and the models' identities."""

from collections.abc import Sequence

from pagewire.shared.kv.kv_layout import CachedToken, KvLayout
from pagewire.shared.kv.model_identity import ModelIdentity


def kv_layout(
    windows: Sequence[int | None] = (None,), block_size: int = 1, size: int = 2
) -> KvLayout:
    """Return a layout of which each layer has `size` numbers of four bytes a token."""
    return KvLayout.of(windows, CachedToken(1, 1, size), block_size, "float32")


def model_identity(
    fingerprint: str = "model", dtype: str = "float32", block_size: int = 4
) -> ModelIdentity:
    return ModelIdentity(
        fingerprint=fingerprint, dtype=dtype, kv_format=dtype, block_size=block_size
    )
