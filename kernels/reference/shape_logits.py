"""Shaped logits in plain torch: row by row, one change after another."""

from __future__ import annotations

import torch

from pagewire.kernels import shaping_tables as layout
from pagewire.kernels.shaping_tables import ShapingTables

_LARGEST = torch.finfo(torch.float32).max


def unpack_bits(words: torch.Tensor, count: int) -> torch.Tensor:
    """Return the first `count` bits of int32 words, the lowest of each first."""
    shifts = torch.arange(32, dtype=torch.int32, device=words.device)
    return ((words[:, None] >> shifts) & 1).bool().view(-1)[:count]


def _float(row: torch.Tensor, column: int) -> float:
    return row[column : column + 1].view(torch.float32).item()


def _add_biases(scores: torch.Tensor, row: torch.Tensor, count: int) -> None:
    ids = row[layout.BIAS_IDS : layout.BIAS_IDS + count].long()
    values = row[layout.BIAS_VALUES : layout.BIAS_VALUES + count].view(torch.float32)
    is_known = (ids >= 0) & (ids < len(scores))
    scores[ids[is_known]] += values[is_known]


def _penalize(
    scores: torch.Tensor, row: torch.Tensor, seen: torch.Tensor, counts: torch.Tensor
) -> torch.Tensor:
    repetition = _float(row, layout.REPETITION)
    repeated = torch.where(scores > 0, scores / repetition, scores * repetition)
    scores = torch.where(unpack_bits(seen, len(counts)), repeated, scores)
    scores = scores - _float(row, layout.FREQUENCY) * counts
    return scores - _float(row, layout.PRESENCE) * (counts > 0)


def _banned(row: list[int], position: int) -> list[int]:
    """Return the tokens that may not come next: early stop tokens, and last tokens of bad words."""
    banned = []
    if position < row[layout.STOPS_FROM]:
        banned += row[layout.STOP_IDS : layout.STOP_IDS + row[layout.NUM_STOPS]]
    start = 0
    for end in row[layout.BAD_ENDS : layout.BAD_ENDS + row[layout.NUM_BAD_WORDS]]:
        *before, last = row[layout.BAD_TOKENS + start : layout.BAD_TOKENS + end]
        start = end
        if len(before) > position - row[layout.OUTPUT_START]:
            continue
        places = range(position - len(before), position)
        if before == [row[layout.HISTORY_AT + place % layout.HISTORY] for place in places]:
            banned.append(last)
    return banned


def shape_logits(
    logits: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    tables: ShapingTables,
    masks: torch.Tensor,
    mask_of_row: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return logits with the masks, biases and penalties of their device slots' requests.

    Shapes and meaning are those of `pagewire.kernels.ShapeLogits`.
    """
    shaped = logits.float().nan_to_num(nan=-torch.inf, posinf=_LARGEST, neginf=-torch.inf)
    vocab_size = logits.shape[1]
    columns = zip(slots.tolist(), positions.tolist(), mask_of_row.tolist(), strict=True)
    for index, (slot, position, mask) in enumerate(columns):
        row, scores = tables.rows[slot], shaped[index]
        words = row.tolist()
        flags = words[layout.FLAGS]
        if mask >= 0:
            scores = scores.masked_fill(~unpack_bits(masks[mask], vocab_size), -torch.inf)
        if flags & layout.IS_LIMITED:
            allowed = unpack_bits(tables.allowed[slot], vocab_size)
            scores = scores.masked_fill(~allowed, -torch.inf)
        if words[layout.NUM_BIASES]:
            scores = scores.clone()
            _add_biases(scores, row, words[layout.NUM_BIASES])
        if flags & layout.IS_PENALIZED:
            scores = _penalize(scores, row, tables.seen[slot], tables.counts[slot])
        shaped[index] = scores
        banned = [token for token in _banned(words, position) if 0 <= token < vocab_size]
        shaped[index, banned] = -torch.inf
    return shaped if out is None else out.copy_(shaped)
