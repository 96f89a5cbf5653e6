"""The gated activation of experts; torch is not imported."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GatedSilu:
    """`gate * sigmoid(alpha * gate) * (up + up_offset)`, in float32.

    Attributes:
        alpha: 1 for SiLU; gpt-oss has 1.702.
        up_offset: added to `up`.
        limit: first, `gate` is cut at this, and `up` to the range from its negative to this; None
            means no limit.
    """

    alpha: float = 1.0
    up_offset: float = 0.0
    limit: float | None = None


SILU = GatedSilu()
