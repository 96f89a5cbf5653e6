"""The facts that decide whether two workers serve the same model.

If they do, a block's hash names the same content at both. Whether they can also exchange the block
is decided by `KvLayout`.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

Tokens = Annotated[int, Meta(ge=1, le=1024)]  # of a block
DtypeName = Annotated[str, Meta(max_length=32)]


class ModelIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """All that a KV block's content depends on, except its request's tokens and salt.

    Attributes:
        fingerprint: hash of the model's configuration and weights.
        weight_version: counts replacements of the weights in running workers; so far always 0.
        dtype: of weights and activations, as torch names it without the prefix, e.g. "bfloat16".
        kv_format: dtype of the KV cache.
        block_size: tokens of a block.
        batch_invariant: whether blocks do not depend on the batches that computed them.
        ranks: number of processes that compute the model together, if blocks are batch-invariant:
            other numbers add up in another order. Otherwise 1.
    """

    fingerprint: Annotated[str, Meta(min_length=1, max_length=64)]
    weight_version: Annotated[int, Meta(ge=0, lt=2**40)] = 0
    dtype: DtypeName
    kv_format: DtypeName
    block_size: Tokens
    batch_invariant: bool = False
    ranks: Annotated[int, Meta(ge=1, le=4096)] = 1


def first_difference(
    its: msgspec.Struct, other: msgspec.Struct, its_name: str, other_name: str
) -> str | None:
    """Return the first field in which two values of one type differ, with both values, or None."""
    for field in its.__struct_fields__:
        here, there = getattr(its, field), getattr(other, field)
        if here != there:
            return f"{its_name} has {field} {here}, {other_name} {there}"
    return None
