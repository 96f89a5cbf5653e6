"""What an expert makes of its gate and up projections; torch is not imported."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GatedSilu:
    """`gate * sigmoid(alpha * gate) * (up + up_offset)`, in float32.

    Attributes:
        alpha: 1 is SiLU, 1.702 what gpt-oss has.
        up_offset: added to `up`.
        limit: before all else, `gate` is made at most this, and `up` at most this and at least its
            negative; None leaves them as they are.
    """

    alpha: float = 1.0
    up_offset: float = 0.0
    limit: float | None = None


SILU = GatedSilu()
