"""The records of device slots' tokens (which, how often, the last ones), in plain torch."""

from __future__ import annotations

import torch

from pagewire.kernels import shaping_tables as layout
from pagewire.kernels.shaping_tables import ShapingTables, pack_bits


def enter_tokens(
    tables: ShapingTables,
    slots: torch.Tensor,
    ends: torch.Tensor,
    output_starts: torch.Tensor,
    tokens: torch.Tensor,
    longest: int,
) -> None:
    """Replace the records of device slots' tokens.

    Shapes and meaning are those of `pagewire.kernels.EnterTokens`; `longest` is not needed here.
    """
    vocab_size, start = tables.vocab_size, 0
    for slot, end, first in zip(slots.tolist(), ends.tolist(), output_starts.tolist(), strict=True):
        own, start = tokens[start:end], end
        seen = torch.from_numpy(pack_bits(own.tolist(), vocab_size))
        tables.seen[slot] = seen.to(tables.seen.device)
        output = own[first:]
        output = output[(output >= 0) & (output < vocab_size)]
        tables.counts[slot] = torch.bincount(output, minlength=vocab_size)


def record_tokens(
    tables: ShapingTables, tokens: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor
) -> None:
    """Add an output token to the records of each device slot.

    Shapes and meaning are those of `pagewire.kernels.RecordTokens`.
    """
    is_noted = (tables.rows[slots, layout.FLAGS] & layout.IS_NOTED) != 0
    slots, tokens, positions = slots[is_noted], tokens[is_noted], positions[is_noted]
    tables.rows[slots, layout.HISTORY_AT + positions % layout.HISTORY] = tokens.int()
    is_known = (tokens >= 0) & (tokens < tables.vocab_size)
    slots, tokens = slots[is_known], tokens[is_known]
    bits = torch.ones_like(tokens, dtype=torch.int32) << (tokens % 32).int()
    tables.seen[slots, tokens // 32] |= bits
    tables.counts[slots, tokens] += 1
