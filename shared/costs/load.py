"""How busy a worker is: what workers report, and what routers add for requests under way."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

_Count = Annotated[int, Meta(ge=0, lt=2**40)]


class Load(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """How busy a worker is, or how much busier a request makes it.

    Attributes:
        blocks: active KV blocks.
        tokens: prompt tokens that are still to be computed.
        seconds: predicted time in which the worker computes them.
        rows: answers that it decodes, or will when their prompts are computed or have arrived.
        room: prompt tokens that each of its steps may have next to these; 0: unknown. A request's
            load has none.
    """

    blocks: _Count = 0
    tokens: _Count = 0
    seconds: Annotated[float, Meta(ge=0)] = 0.0
    rows: _Count = 0
    room: _Count = 0

    def plus(self, other: Load) -> Load:
        """Return the sum of two loads."""
        return Load(
            self.blocks + other.blocks,
            self.tokens + other.tokens,
            self.seconds + other.seconds,
            self.rows + other.rows,
            self.room or other.room,
        )


NO_LOAD = Load()
