"""Splits of contexts, combined, against the softmax over all of a context."""

from __future__ import annotations

import math

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


@pytest.mark.parametrize("window", [0, 40, 1000])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("splits", [2, 5])
def test_splits_give_the_attention_of_the_whole(splits, has_sinks, window):
    torch.manual_seed(0)
    query_lens, seq_lens, group, kv_heads, dim = (9, 0, 1, 14, 2), (200, 3, 40, 61, 12), 3, 2, 16
    heads, tokens = group * kv_heads, sum(query_lens)
    sinks = torch.randn(heads) * 3 if has_sinks else None
    untouched = 7.0
    out, expected = torch.full((2, tokens, heads, dim), untouched)
    partial = torch.full((splits, tokens, heads, dim), torch.nan)
    lse = torch.full((splits, tokens, heads), torch.nan)
    token = 0
    for query_len, seq_len in zip(query_lens, seq_lens, strict=True):
        scores, values = 4 * torch.randn(seq_len, heads), torch.randn(seq_len + TILE, dim)
        for row in range(query_len * group):
            program = row // ROWS * ROWS
            last = min(program + ROWS, query_len * group) - 1
            ends = (seq_len - query_len + each // group for each in (program, row, last))
            first_position, position, last_position = ends
            spans = _spans(first_position, last_position, splits, window)
            lowest = max(position - window + 1, 0) if window else 0
            if len(spans) == 1:
                continue  # the attention kernel has written it
            for head in range(row % group, heads, group):
                at = token + row // group, head
                for split, span in enumerate(spans):
                    seen = [lowest <= each <= position for each in span]
                    span_scores = torch.zeros(len(span))
                    inside = range(span.start, min(span.stop, seq_len))
                    span_scores[: len(inside)] = scores[inside, head]
                    span_values = values[span.start : span.start + len(span)]
                    partial[split, *at], lse[split, *at] = _attend(span_scores, span_values, seen)
                all_scores, all_values = scores[lowest : position + 1, head], values
                sums = [*all_scores, *([] if sinks is None else [sinks[head] / math.log(2)])]
                weights = (torch.stack(sums).double() * math.log(2)).softmax(0).float()
                seen_values = all_values[lowest : position + 1]
                expected[at] = weights[: len(seen_values)] @ seen_values
        token += query_len
    starts = torch.tensor([0, *torch.tensor(query_lens).cumsum(0)], dtype=torch.int32)
    combine_prefill_splits(
        partial, lse, starts, torch.tensor(seq_lens, dtype=torch.int32), max(query_lens), out,
        group, ROWS, TILE, LEAST, window, sinks,
    )  # fmt: skip
    torch.testing.assert_close(out, expected)
    assert (expected == untouched).any(), "some contexts stay whole"
    assert (expected != untouched).any()
