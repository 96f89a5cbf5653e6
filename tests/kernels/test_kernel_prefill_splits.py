"""Splits of contexts, combined, against the softmax over all of a context."""

from __future__ import annotations

import math
from itertools import accumulate

import pytest
import torch

from pagewire.kernels._prefill_splits import combine_prefill_splits

ROWS, TILE, LEAST = 32, 8, 3  # rows of a program, positions of a tile, tiles of a split
UNSEEN = -1.0e30  # the logarithm of no weight, as the attention kernel writes it


def _spans(first_position, last_position, splits, window):
    """The positions of each split that a program's tiles have, from its first and last row's."""
    start = max(first_position - window + 1, 0) // TILE if window else 0
    end = last_position // TILE + 1
    length = math.ceil((end - start) / max(min(splits, (end - start) // LEAST), 1))
    return [
        range(tile * TILE, min(tile + length, end) * TILE) for tile in range(start, end, length)
    ]


def _attend(scores, values, seen):
    """Output and base 2 logarithm of the sum of weights of one row over the positions it sees."""
    if not any(seen):
        return torch.zeros(values.shape[1]), UNSEEN
    seen = torch.tensor(seen)
    powers = torch.where(seen, scores.double(), -torch.inf) * math.log(2)
    return (powers.softmax(0) @ values.double()).float(), powers.logsumexp(0) / math.log(2)


def _expected(scores, values, positions, sink):
    """The attention of one row over the positions it sees, and its sink."""
    base_2 = [*scores[positions], *([] if sink is None else [sink / math.log(2)])]
    weights = (torch.stack(base_2).double() * math.log(2)).softmax(0).float()
    return weights[: len(positions)] @ values[positions]


@pytest.mark.parametrize("window", [0, 40, 1000])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("splits", [2, 5])
def test_splits_give_the_attention_of_the_whole(splits, has_sinks, window):
    torch.manual_seed(0)
    query_lens, seq_lens, group, kv_heads, dim = (9, 0, 1, 14, 2), (200, 3, 40, 61, 12), 3, 2, 16
    heads, tokens = group * kv_heads, 4 + sum(query_lens) + 3  # decode rows before, padding after
    sinks = torch.randn(heads) * 3 if has_sinks else None
    untouched = 7.0
    out, expected = torch.full((2, tokens, heads, dim), untouched)
    partial = torch.full((splits, tokens, heads, dim), torch.nan)
    lse = torch.full((splits, tokens, heads), torch.nan)
    starts = [*accumulate(query_lens, initial=4)]
    for start, query_len, seq_len in zip(starts, query_lens, seq_lens, strict=False):
        longest = seq_len + TILE  # a tile may reach past the end
        scores, values = 4 * torch.randn(longest, heads), torch.randn(longest, dim)
        for row in range(query_len * group):
            program = row // ROWS * ROWS
            last = min(program + ROWS, query_len * group) - 1
            ends = (seq_len - query_len + each // group for each in (program, row, last))
            first_position, position, last_position = ends
            spans = _spans(first_position, last_position, splits, window)
            if len(spans) == 1:
                continue  # the attention kernel has written it
            seen = range(max(position - window + 1, 0) if window else 0, position + 1)
            for head in range(row % group, heads, group):
                at = start + row // group, head
                for split, span in enumerate(spans):
                    of_span = [each in seen for each in span]
                    partial[split, *at], lse[split, *at] = _attend(
                        scores[list(span), head], values[list(span)], of_span
                    )
                sink = None if sinks is None else sinks[head]
                expected[at] = _expected(scores[:, head], values, list(seen), sink)
    combine_prefill_splits(
        partial,
        lse,
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor(seq_lens, dtype=torch.int32),
        max(query_lens),
        out,
        group=group,
        rows=ROWS,
        tile=TILE,
        least=LEAST,
        window=window,
        sinks=sinks,
    )
    torch.testing.assert_close(out, expected)
    assert (expected == untouched).any(), "some contexts stay whole"
    assert (expected != untouched).any()
