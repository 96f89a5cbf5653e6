"""Token ids beyond the vocabulary: they change nothing, and what lies beside a row stays as it is.

Each test has other rows around those with such ids, where a store out of bounds would show.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from pagewire.kernels.bench.inputs import shaping_inputs
from pagewire.kernels.shaping_tables import ShapingRow, ShapingTables, pack_bits

BOTH = pytest.mark.parametrize("backend", ["kernels", "reference"])
VOCAB = 70  # whose last word of a mask has bits to spare
# The next row's first id, the spare bits of a mask, rows further on and before, the largest id.
BEYOND = [VOCAB, VOCAB + 25, 3 * VOCAB - 1, -1, -VOCAB]
FAR = [*BEYOND, 2**31 - 1, -(2**31)]
GUARD = 12345


@pytest.fixture
def ops(backend, request, device):
    return request.getfixturevalue(backend)


def _shaped(ops, logits, row):
    """Return three rows of which the middle one is shaped, and the memory around them."""
    rows = [ShapingRow(output_start=4), row, ShapingRow(output_start=4)]
    x = shaping_inputs(logits, rows)
    memory = torch.full((9, VOCAB), float(GUARD), device=logits.device)
    ops.shape_logits(*x, out=memory[3:6])
    return memory


UNKNOWN: dict[str, dict[str, Any]] = {
    "biases": {"biases": dict.fromkeys(FAR, 50.0)},
    "stops": {"stops_from": 9, "stop_ids": FAR},
    "bad words": {"bad_words": [[token] for token in FAR]},
    "ends of bad words": {"bad_words": [[5, 6, token] for token in FAR], "output": [5, 6]},
    "penalised biases": {"biases": dict.fromkeys(FAR, 50.0), "repetition": 2.0, "frequency": 1.0},
}
KNOWN: dict[str, dict[str, Any]] = {
    "biases": {"biases": {0: 2.0, VOCAB - 1: -3.0}},
    "stops": {"stops_from": 9, "stop_ids": [0, VOCAB - 1]},
    "bad words": {"bad_words": [[0], [VOCAB - 1]]},
    "ends of bad words": {"bad_words": [[5, 6, 0], [6, VOCAB - 1]], "output": [5, 6]},
    "penalised biases": {"biases": {0: 2.0, 5: 1.0}, "repetition": 2.0, "frequency": 1.0},
}


def _together(name):
    """Return the fields of a row with ids that are known, and others before and after them."""
    known, unknown = KNOWN[name], UNKNOWN[name]
    fields = {**known, **unknown}
    for field in {"stop_ids", "bad_words"} & fields.keys():
        fields[field] = [unknown[field][0], *known[field], *unknown[field]]
    if "biases" in fields:
        fields["biases"] = {FAR[0]: 9.0, **known["biases"], **unknown["biases"]}
    return fields


@BOTH
@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_ids_shape_nothing(name, ops, device):
    logits = torch.randn(3, VOCAB, device=device)
    expected = _shaped(ops, logits, ShapingRow(output_start=4, **KNOWN[name]))
    assert not torch.equal(expected[4], logits[1])
    assert expected[3].tolist() == logits[0].tolist()
    actual = _shaped(ops, logits, ShapingRow(output_start=4, **_together(name)))
    assert actual.tolist() == expected.tolist()
    assert set(actual[[0, 1, 2, 6, 7, 8]].flatten().tolist()) == {GUARD}


@BOTH
def test_a_row_may_have_unknown_ids_alone(ops, device):
    logits = torch.randn(3, VOCAB, device=device)
    fields = {k: v for each in UNKNOWN.values() for k, v in each.items() if k != "output"}
    shaped = _shaped(ops, logits, ShapingRow(output_start=4, **fields))
    assert shaped[3:6].tolist() == logits.tolist()


def test_a_mask_has_no_unknown_ids():
    assert pack_bits([3, *FAR, 2**40, 69], VOCAB).tolist() == pack_bits([3, 69], VOCAB).tolist()
    assert pack_bits(FAR, VOCAB).tolist() == [0, 0, 0]


# What is known of tokens


def _guarded_tables(device):
    """Return tables of three device slots within larger ones, whose other rows are guards."""
    whole = [torch.full_like(t, GUARD) for t in ShapingTables.zeros(7, VOCAB, device)]
    tables = ShapingTables(*(table[2:5] for table in whole))
    for table in tables:
        table.zero_()
    return tables, whole


def _assert_untouched(whole, *slots):
    for table in whole:
        assert set(table[[0, 1, 5, 6]].flatten().tolist()) == {GUARD}
        assert not table[[2 + slot for slot in slots]].any()


@BOTH
def test_entered_tokens_leave_unknown_ones_out(ops, device):
    tables, whole = _guarded_tables(device)
    tokens = [3, *FAR, 4, 69, *FAR, 4]
    ops.enter_tokens(
        tables,
        torch.tensor([1], device=device),
        torch.tensor([len(tokens)], device=device),
        torch.tensor([len(FAR) + 1], device=device),
        torch.tensor(tokens, device=device),
        len(tokens),
    )
    assert tables.seen[1].tolist() == pack_bits([3, 4, 69], VOCAB).tolist()
    assert tables.counts[1].tolist() == [{4: 2, 69: 1}.get(token, 0) for token in range(VOCAB)]
    assert not tables.rows.any()
    _assert_untouched(whole, 0, 2)


@BOTH
def test_noted_tokens_are_counted_if_they_are_known(ops, device):
    tables, whole = _guarded_tables(device)
    tables.rows[1] = torch.from_numpy(ShapingRow(output_start=2, frequency=1.0).words())
    output = [3, *FAR, 69]
    for position, token in enumerate(output, start=2):
        at = [torch.tensor([value], device=device) for value in (token, 1, position)]
        ops.record_tokens(tables, *at)
    assert tables.seen[1].tolist() == pack_bits([3, 69], VOCAB).tolist()
    assert tables.counts[1].tolist() == [int(token in (3, 69)) for token in range(VOCAB)]
    # Of the history, which is compared and is no index, unknown tokens are a part.
    row = ShapingRow(output_start=2, frequency=1.0, output=output)
    assert tables.rows[1].tolist() == row.words().tolist()
    _assert_untouched(whole, 0, 2)


# Log probabilities


@BOTH
@pytest.mark.parametrize("vocab", [VOCAB, 5000])
@pytest.mark.parametrize("top", [0, 3])
def test_an_unknown_token_has_no_probability(vocab, top, ops, device):
    unknown = [vocab, vocab + 1, 2**31 - 1, -1, -vocab]
    logits = torch.randn(2 * len(unknown) + 1, vocab, device=device)
    logits[3, 5] = -math.inf
    rows = torch.arange(len(logits), device=device)
    tokens = torch.arange(len(logits), device=device) + 30
    expected = ops.token_logprobs(logits, rows, tokens, top)
    tokens[1::2] = torch.tensor(unknown, device=device)
    ids, logprobs, ranks = ops.token_logprobs(logits, rows, tokens, top)
    for found, wanted in zip((ids, logprobs, ranks), expected, strict=True):
        assert torch.equal(found[::2], wanted[::2])
    assert torch.equal(ids[:, 1:], expected[0][:, 1:])
    assert torch.equal(logprobs[:, 1:], expected[1][:, 1:])
    assert ids[1::2, 0].tolist() == unknown
    assert logprobs[1::2, 0].tolist() == [-math.inf] * len(unknown)
    finite = (logits > -math.inf).sum(-1)[1::2]
    assert ranks[1::2].tolist() == (finite + 1).tolist()
