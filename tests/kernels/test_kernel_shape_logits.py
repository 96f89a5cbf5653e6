"""Shaped logits: each step by its definition, their order, and Triton against the reference."""

from __future__ import annotations

import math
import random

import pytest
import torch

from pagewire.kernels.bench.inputs import shaping_inputs
from pagewire.kernels.shaping_tables import (
    HISTORY,
    MOST_BAD_WORDS,
    MOST_BIASES,
    ROW_WORDS,
    ShapingRow,
    ShapingTables,
    pack_bits,
)

BOTH = pytest.mark.parametrize("backend", ["kernels", "reference"])
INF = math.inf


@pytest.fixture
def shape(backend, request, device):
    """Shapes one row of logits, and returns it as a list."""
    ops = request.getfixturevalue(backend)

    def run(logits, row, prompt=(), **limits):
        x = shaping_inputs(
            torch.tensor([logits], device=device), [row], [list(prompt)],
            **{name: {0: tokens} for name, tokens in limits.items()},
        )  # fmt: skip
        return ops.shape_logits(*x)[0].tolist()

    return run


@BOTH
def test_a_row_that_asks_for_nothing_is_copied(shape):
    assert shape([1.0, -2.5, 0.0, 3.0], ShapingRow(), prompt=[1, 2]) == [1.0, -2.5, 0.0, 3.0]


@BOTH
def test_nan_and_infinities_are_those_of_sampling(shape):
    shaped = shape([math.nan, INF, -INF, 1.0], ShapingRow(biases={0: 5.0, 2: 5.0}))
    assert shaped == [-INF, torch.finfo(torch.float32).max, -INF, 1.0]


@BOTH
def test_masks_and_allowed_tokens_leave_what_both_allow(shape):
    row = ShapingRow(is_limited=True, biases={0: 100.0})
    assert shape([1.0, 2.0, 3.0, 4.0], row, allowed=[1, 2], masks=[2, 3]) == [-INF, -INF, 3.0, -INF]


@BOTH
def test_repetition_divides_positive_logits_and_multiplies_others(shape):
    row = ShapingRow(output_start=2, repetition=2.0, output=[3])
    shaped = shape([4.0, -4.0, 4.0, -1.0, 0.0], row, prompt=[0, 1])
    assert shaped == [2.0, -8.0, 4.0, -2.0, 0.0]


@BOTH
def test_frequency_and_presence_are_of_the_output_alone(shape):
    row = ShapingRow(output_start=2, frequency=0.5, presence=0.25, output=[1, 2, 2, 2])
    assert shape([1.0, 1.0, 1.0], row, prompt=[0, 0]) == [1.0, 0.25, -0.75]


@BOTH
def test_stop_tokens_are_banned_until_the_answer_is_long_enough(shape):
    for length, banned in ((0, True), (1, True), (2, False)):
        row = ShapingRow(5, stops_from=7, stop_ids=[1, 3], biases={1: 50.0}, output=[2] * length)
        shaped = shape([0.0] * 4, row, prompt=[0] * 5)
        assert [value == -INF for value in shaped] == [False, banned, False, banned]


BAD_WORDS = [[7], [1, 2], [2, 2, 3], [5, 6]]


@BOTH
@pytest.mark.parametrize(
    ("output", "banned"),
    [
        ([], {7}),
        ([1], {7, 2}),
        ([2], {7}),
        ([2, 2], {7, 3}),
        ([1, 2, 2], {7, 3}),
        ([2, 1], {7, 2}),
        ([5, 5], {7, 6}),
        ([0] * 40 + [2, 2], {7, 3}),
    ],
)
def test_bad_words_are_never_finished(shape, output, banned):
    # The prompt ends with the beginning of a bad word: only the output counts.
    row = ShapingRow(output_start=3, bad_words=BAD_WORDS, output=output)
    shaped = shape([0.0] * 8, row, prompt=[0, 0, 1])
    assert {index for index, value in enumerate(shaped) if value == -INF} == banned


@BOTH
def test_a_bad_word_may_be_as_long_as_the_history(shape):
    word = [n % 5 for n in range(HISTORY)]
    for output, is_banned in ((word[:-1], True), ([0, *word[:-1]], True), (word[1:-1], False)):
        row = ShapingRow(output_start=1, bad_words=[word], output=output)
        shaped = shape([0.0] * 5, row, prompt=[0])
        assert (shaped[word[-1]] == -INF) == is_banned


@BOTH
def test_the_order_is_that_of_vllm(shape):
    """Masks, biases, then penalties; each other order gives another value."""
    row = ShapingRow(
        2, is_limited=True, biases={0: 3.0, 1: 3.0}, repetition=2.0, frequency=1.0,
        presence=0.5, output=[0, 0],
    )  # fmt: skip
    # 0: (-1 + 3) / 2 - 2 * 1 - 0.5; penalties before the bias would give -2 - 2.5 + 3
    assert shape([-1.0, 5.0, 1.0], row, prompt=[0, 1], allowed=[0, 2]) == [-1.5, -INF, 1.0]


def _random_row(rng, vocab, prompt):
    """Return a row that asks for a random choice of everything."""

    def some(value, nothing):
        return value if rng.random() < 0.5 else nothing

    output = [rng.randrange(vocab) for _ in range(rng.choice([0, 1, 5, 33, 70]))]
    words = [
        [rng.choice(output or [0]) for _ in range(rng.randrange(3))] + [rng.randrange(vocab)]
        for _ in range(20)
    ]
    if len(output) > 2:
        words.append([*output[-2:], rng.randrange(vocab)])
    return ShapingRow(
        output_start=len(prompt),
        stops_from=len(prompt) + rng.choice([0, 3, 100]),
        stop_ids=some([rng.randrange(vocab) for _ in range(3)], []),
        biases=some({rng.randrange(vocab): rng.uniform(-9, 9) for _ in range(40)}, {}),
        bad_words=some(words, []),
        is_limited=rng.random() < 0.3,
        repetition=some(1.3, 1.0),
        frequency=some(0.4, 0.0),
        presence=some(-0.7, 0.0),
        output=output,
    )


@pytest.mark.parametrize("vocab", [1, 123, 5000])
def test_triton_equals_the_reference(vocab, device, dtype, kernels, reference):
    rng = random.Random(vocab)
    prompts = [[rng.randrange(vocab) for _ in range(rng.randrange(50))] for _ in range(12)]
    rows = [_random_row(rng, vocab, prompt) for prompt in prompts]
    halves = {row: [t for t in range(vocab) if rng.random() < 0.5] for row in range(0, 12, 2)}
    masks = {row: [t for t in range(vocab) if rng.random() < 0.8] for row in (1, 4, 5)}
    logits = (3 * torch.randn(24, vocab + 3, device=device)).to(dtype)[::2, 3:]
    x = shaping_inputs(logits, rows, prompts, halves, masks)
    before = logits.clone()
    expected = reference.shape_logits(*x)
    out = torch.empty(20, vocab, device=device)[4:16]
    assert kernels.shape_logits(*x, out=out) is out
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-6)
    assert torch.equal(out.isinf(), expected.isinf())
    assert torch.equal(logits, before)


@BOTH
def test_a_row_does_not_depend_on_its_batch(backend, request, device):
    ops = request.getfixturevalue(backend)
    rng = random.Random(3)
    prompts = [[rng.randrange(300) for _ in range(9)] for _ in range(6)]
    rows = [_random_row(rng, 300, prompt) for prompt in prompts]
    x = shaping_inputs(torch.randn(6, 300, device=device), rows, prompts)
    together = ops.shape_logits(*x)
    for index in range(6):
        part = slice(index, index + 1)
        alone = ops.shape_logits(
            x.logits[part], x.slots[part], x.positions[part], x.tables, x.masks,
            x.mask_of_row[part],
        )  # fmt: skip
        assert torch.equal(alone[0], together[index])


def test_no_rows_give_no_rows(device, kernels):
    x = shaping_inputs(torch.zeros(0, 40, device=device), [])
    assert kernels.shape_logits(*x).shape == (0, 40)


@BOTH
def test_the_bounds_of_a_row_are_taken_whole(shape):
    biases = dict.fromkeys(range(MOST_BIASES), 1.0)
    words = [[n] for n in range(MOST_BAD_WORDS)]
    shaped = shape([0.0] * 1200, ShapingRow(biases=biases, bad_words=words))
    assert shaped == [-INF] * MOST_BAD_WORDS + [1.0] * (MOST_BIASES - MOST_BAD_WORDS) + [0.0] * 176


def test_what_a_row_cannot_take_is_refused():
    for row in (
        ShapingRow(biases=dict.fromkeys(range(MOST_BIASES + 1), 0.0)),
        ShapingRow(bad_words=[[1]] * (MOST_BAD_WORDS + 1)),
    ):
        with pytest.raises(ValueError, match="of which a row takes"):
            row.words()


# What is known of tokens


def _tokens_case(vocab, device):
    rng = random.Random(7)
    lengths, starts = [0, 1, 2500, 64], [0, 1, 1700, 0]
    tokens = [rng.randrange(vocab) for _ in range(sum(lengths))]
    tables = ShapingTables.zeros(6, vocab, device)
    for table in tables:
        table.fill_(-5)  # what others have left
    arguments = (
        torch.tensor([4, 0, 3, 1], device=device),
        torch.tensor(lengths, device=device).cumsum(0),
        torch.tensor(starts, device=device),
        torch.tensor(tokens, device=device),
        max(lengths),
    )
    return tables, arguments, tokens


@BOTH
@pytest.mark.parametrize("vocab", [40, 5000])
def test_entered_tokens_replace_what_was_known(vocab, backend, request, device):
    tables, arguments, tokens = _tokens_case(vocab, device)
    request.getfixturevalue(backend).enter_tokens(tables, *arguments)
    counts, seen = tables.counts.tolist(), tables.seen.tolist()
    own = {4: ([], []), 0: (tokens[:1], []), 3: (tokens[1:1701], tokens[1701:2501])}
    own[1] = ([], tokens[2501:])
    for slot, (before, after) in own.items():
        assert seen[slot] == pack_bits(before + after, vocab).tolist()
        assert counts[slot] == [after.count(token) for token in range(vocab)]
    for slot in (2, 5):
        assert set(counts[slot]) == set(seen[slot]) == {-5}


@BOTH
def test_noted_tokens_are_those_that_would_have_been_entered(backend, request, device):
    """The state is a function of prompt and output, however it came about."""
    ops = request.getfixturevalue(backend)
    vocab, prompt, output = 50, [3, 4, 5], [n * 7 % 50 for n in range(45)]
    noted = ShapingTables(*(table.clone() for table in ShapingTables.zeros(3, vocab, device)))
    bad_words = [[1, 2]]
    row = ShapingRow(3, bad_words=bad_words, frequency=1.0)
    noted.rows[1] = torch.from_numpy(row.words())
    slots = torch.tensor([2, 1], device=device)
    for index, token in enumerate(output):
        at = torch.tensor([9, len(prompt) + index], device=device)
        ops.record_tokens(noted, torch.tensor([8, token], device=device), slots, at)
    whole = ShapingRow(3, bad_words=bad_words, frequency=1.0, output=output)
    assert noted.rows[1].tolist() == whole.words().tolist()
    assert noted.counts[1].tolist() == [output.count(token) for token in range(vocab)]
    assert noted.seen[1].tolist() == pack_bits(output, vocab).tolist()
    assert not noted.rows[2].any() and not noted.counts[2].any()  # it asks for nothing
    assert noted.rows.shape == (3, ROW_WORDS)
