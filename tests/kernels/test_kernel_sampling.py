"""Sampling: the noise, the candidate sets, the distribution, and Triton against the reference."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl
from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from pagewire.kernels.bench.inputs import peaked_logits, sampling_inputs
from pagewire.kernels.reference.philox import gumbel_noise, philox
from pagewire.kernels.sampling import _gumbel

# Random123's known answers for Philox4x32-10: counter, key, words.
KNOWN_ANSWERS = {
    "zeros": ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    "ones": (
        (0xFFFFFFFF,) * 4,
        (0xFFFFFFFF,) * 2,
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    "pi": (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
}
# 0.999 quantiles of chi-square.
CHI_SQUARE = {5: 20.5, 9: 27.9}


@triton.jit
def _words_kernel(seeds_ptr, counters_ptr, out_ptr, COUNT: tl.constexpr):
    index = tl.arange(0, COUNT)
    seed = tl.load(seeds_ptr)
    c0 = tl.load(counters_ptr + index)
    c1 = tl.load(counters_ptr + COUNT + index)
    c2 = tl.load(counters_ptr + 2 * COUNT + index)
    c3 = tl.load(counters_ptr + 3 * COUNT + index)
    w0, w1, w2, w3 = tl.philox(seed, c0, c1, c2, c3)
    tl.store(out_ptr + index, w0.to(tl.int32, bitcast=True))
    tl.store(out_ptr + COUNT + index, w1.to(tl.int32, bitcast=True))
    tl.store(out_ptr + 2 * COUNT + index, w2.to(tl.int32, bitcast=True))
    tl.store(out_ptr + 3 * COUNT + index, w3.to(tl.int32, bitcast=True))


@triton.jit
def _gumbel_kernel(seed_ptr, position_ptr, out_ptr, COUNT: tl.constexpr):
    ids = tl.arange(0, COUNT)
    tl.store(out_ptr + ids, _gumbel(tl.load(seed_ptr), tl.load(position_ptr), ids))


def _int64(*values):
    return [torch.tensor([value], dtype=torch.int64) for value in values]


def _signed32(words):
    return torch.tensor(words, dtype=torch.int64).to(torch.int32)


def _seed(key):
    seed = key[0] | key[1] << 32
    return seed - 2**64 if seed >= 2**63 else seed


def _sample(ops, x, out=None):
    return ops.sample(*x, out=out)


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS.values(), ids=KNOWN_ANSWERS)
def test_reference_philox_gives_the_known_answers(counter, key, words):
    found = philox(tuple(_int64(*counter)), tuple(_int64(*key)))
    assert tuple(int(word) for word in found) == words


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS.values(), ids=KNOWN_ANSWERS)
def test_triton_philox_gives_the_known_answers(counter, key, words, device):
    counters = _signed32(counter)[:, None].repeat(1, 16).to(device)
    out = torch.zeros(4, 16, dtype=torch.int32, device=device)
    seed = torch.tensor([_seed(key)], device=device)
    _words_kernel[(1,)](seed, counters, out, COUNT=16)
    assert torch.equal(out.cpu(), _signed32(words)[:, None].repeat(1, 16))


@pytest.mark.parametrize("seed", [0, 1, -1, 2**62 + 12345, -(2**63)])
@pytest.mark.parametrize("position", [0, 131071, 2**31 + 5])
def test_noise_matches_reference(seed, position, device):
    out = torch.zeros(4096, device=device)
    seeds = torch.tensor([seed], device=device)
    positions = torch.tensor([position], device=device)
    _gumbel_kernel[(1,)](seeds, positions, out, COUNT=4096)
    expected = gumbel_noise(seeds, positions, torch.arange(4096, device=device))[0]
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=1e-5)


def test_noise_is_gumbel_and_fresh_at_every_position():
    ids = torch.arange(4096)
    noise = gumbel_noise(torch.arange(64), torch.arange(64), ids).double()
    assert noise.isfinite().all()
    euler = 0.5772156649015329
    assert abs(noise.mean() - euler) < 0.01
    assert abs(noise.var() - math.pi**2 / 6) < 0.02
    moved = gumbel_noise(torch.arange(64), torch.arange(1, 65), ids)
    assert (moved == noise.float()).float().mean() < 1e-3


@pytest.mark.parametrize("vocab", [1, 123, 5000, 8192])
def test_sample_matches_reference(vocab, device, dtype, kernels, reference):
    rows = 10
    logits = (3 * torch.randn(rows, vocab, device=device)).to(dtype)
    x = sampling_inputs(
        logits,
        temperature=[0, 0.7, 1, 1.3, 0.8, 1, 1, 0, 1e-4, 2],
        top_k=[0, 0, 20, 0, 5, 1, 200, 7, 3, vocab + 9],
        top_p=[1, 1, 1, 0.9, 0.7, 0.5, 0.99, 0.5, 1, 1e-6],
        first_seed=2**40,
    )
    assert torch.equal(_sample(kernels, x), _sample(reference, x))
    x = x._replace(min_p=torch.tensor([0.1, 0.05, 0.2, 0, 0.01] * 2, device=device))
    assert torch.equal(_sample(kernels, x), _sample(reference, x))


def test_parameters_may_be_columns_of_one_tensor(device, kernels, reference):
    x = sampling_inputs(torch.randn(6, 500, device=device), 0.9, 40, 0.9, 0.05)
    names = ("temperature", "top_k", "top_p", "min_p")
    strided = {name: torch.stack([getattr(x, name)] * 2, dim=1).flatten()[::2] for name in names}
    expected = _sample(reference, x)
    assert torch.equal(_sample(kernels, x._replace(**strided)), expected)
    del strided["top_k"]  # now they differ
    assert torch.equal(_sample(kernels, x._replace(**strided)), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab", [128256, 151936])
def test_sample_matches_reference_at_real_vocabularies(vocab, dtype, kernels, reference):
    rows = 64
    logits = (3 * torch.randn(rows, vocab, device="cuda")).to(dtype)
    x = sampling_inputs(
        logits,
        temperature=[0.0, 0.6, 1.0, 1.5] * 16,
        top_k=([0] * 8 + [50] * 8) * 4,
        top_p=[1.0] * 32 + [0.9] * 32,
    )
    agree = (_sample(kernels, x) == _sample(reference, x)).float().mean()
    # Float32 sums and logarithms may move a threshold or a near tie, rarely.
    assert agree >= 0.98


def test_out_and_strided_logits(device, kernels, reference):
    logits = torch.randn(6, 300, device=device)[::2, 5:205]
    x = sampling_inputs(logits, temperature=[0.0, 1.0, 1.0], top_k=[0, 0, 9])
    out = torch.full((3,), -7, device=device)
    assert _sample(kernels, x, out=out) is out
    assert torch.equal(out, _sample(reference, x))


# The largest floats over a tiny temperature are meant to overflow; numpy says so.
@pytest.mark.filterwarnings("ignore:overflow encountered in divide:RuntimeWarning")
@pytest.mark.parametrize("backend", ["kernels", "reference"])
def test_greedy_ties_nan_and_infinities(backend, request, device):
    ops = request.getfixturevalue(backend)
    inf, nan = math.inf, math.nan
    rows = [
        [1.0, 3.0, 3.0, 2.0],  # a tie: the lower id
        [nan, 1.0, nan, 0.0],  # NaN is never chosen
        [-inf, -inf, -5.0, -inf],
        [nan, nan, nan, nan],  # nothing to choose: still in range
        [-inf] * 4,
        [1.0, inf, nan, 2.0],
        [-0.0, 0.0, -1.0, -0.0],
    ]
    logits = torch.tensor(rows, device=device)
    expected = [1, 1, 2, 0, 0, 1, 0]
    assert _sample(ops, sampling_inputs(logits)).tolist() == expected
    cold = sampling_inputs(logits, temperature=1e-6, top_k=1)
    drawn = _sample(ops, cold).tolist()
    assert drawn[1:6] == expected[1:6]
    assert drawn[0] in (1, 2)
    assert drawn[6] in (0, 1, 3)


@pytest.mark.parametrize("backend", ["kernels", "reference"])
def test_a_row_does_not_depend_on_its_batch(backend, request, device):
    ops = request.getfixturevalue(backend)
    x = sampling_inputs(
        torch.randn(8, 700, device=device),
        temperature=[0.0, 0.8, 1.0, 0.8] * 2,
        top_k=[0, 0, 40, 0] * 2,
        top_p=[1.0, 1.0, 1.0, 0.9] * 2,
    )
    together = _sample(ops, x)
    for row in range(8):
        alone = (column[row : row + 1] for column in x)
        assert ops.sample(*alone) == together[row]


_FOURS = [math.log(p) for p in (0.2, 0.4, 0.1, 0.3)]
# logits, temperature, min_p, top_k, top_p -> tokens that can be drawn
MIN_P_SUPPORTS = {
    "min-p": (_FOURS, 1.0, 0.6, 0, 1.0, {1, 3}),
    "min-p-lower": (_FOURS, 1.0, 0.49, 0, 1.0, {0, 1, 3}),
    # at temperature 2 the masses 16 : 4 : 1 become 4 : 2 : 1
    "min-p-at-temperature": ([math.log(p) for p in (16, 4, 1)], 2.0, 0.45, 0, 1.0, {0, 1}),
    "min-p-1-keeps-equals": ([1.0, 2.0, 2.0, 0.0], 1.0, 1.0, 0, 1.0, {1, 2}),
    "min-p-and-top-k": (_FOURS, 1.0, 0.2, 2, 1.0, {1, 3}),
    # of 0.4, 0.3, 0.2, which min-p leaves, 0.4 is 0.444
    "min-p-then-top-p": (_FOURS, 1.0, 0.3, 0, 0.44, {1}),
    "min-p-then-top-p-wider": (_FOURS, 1.0, 0.3, 0, 0.45, {1, 3}),
    "min-p-with-banned": ([-math.inf, 1.0, 1.1, -math.inf], 5.0, 0.01, 0, 1.0, {1, 2}),
}


@pytest.mark.parametrize("backend", ["kernels", "reference"])
@pytest.mark.parametrize("case", MIN_P_SUPPORTS.values(), ids=MIN_P_SUPPORTS)
def test_min_p_comes_before_top_k_and_top_p(case, backend, request, device):
    logits, temperature, min_p, top_k, top_p, support = case
    rows = torch.tensor(logits, device=device).repeat(12, 1)
    x = sampling_inputs(rows, temperature, top_k, top_p, min_p)
    assert set(_sample(request.getfixturevalue(backend), x).tolist()) == support


@pytest.mark.parametrize(
    ("temperature", "min_p", "top_k", "top_p"),
    [(0.7, 0.1, 0, 1.0), (1.5, 0.0, 4, 1.0), (1.2, 0.0, 0, 0.8), (2.0, 0.15, 7, 0.85)],
)
def test_candidates_are_hugging_faces(temperature, min_p, top_k, top_p, reference):
    logits = torch.linspace(-2, 3, 12)[torch.randperm(12)][None]
    warpers = [TemperatureLogitsWarper(temperature), MinPLogitsWarper(min_p)]
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    warpers.append(TopPLogitsWarper(top_p))
    scores = LogitsProcessorList(warpers)(torch.zeros(1, 1, dtype=torch.int64), logits)
    kept = {token for token in range(12) if scores[0, token] > -math.inf}
    assert 1 < len(kept) < 12
    # Rows enough that each candidate is drawn.
    x = sampling_inputs(logits.repeat(600, 1), temperature, top_k, top_p, min_p)
    assert set(_sample(reference, x).tolist()) == kept


SUPPORTS = {
    # logits, temperature, top_k, top_p -> tokens that can be drawn
    "top-k": ([0.0, 3.0, 1.0, 2.0, 2.5], 3.0, 3, 1.0, {1, 3, 4}),
    "top-k-keeps-equals": ([1.0, 2.0, 2.0, 2.0, 0.0], 2.0, 2, 1.0, {1, 2, 3}),
    "top-k-signed-zeros-are-equal": ([-0.0, 0.0, -1.0, 0.0, -2.0], 1.0, 2, 1.0, {0, 1, 3}),
    "top-k-negative": ([-9.0, -7.0, -8.0, -7.5, -20.0], 2.0, 2, 1.0, {1, 3}),
    "top-k-whole-vocabulary": ([0.0, 0.1, 0.2, 0.3, 0.4], 1.0, 5, 1.0, {0, 1, 2, 3, 4}),
    # masses 0.4 0.3 0.2 0.1: before the third stands 0.7
    "top-p": ([math.log(p) for p in (0.2, 0.4, 0.1, 0.3)], 1.0, 0, 0.69, {1, 3}),
    "top-p-takes-the-crossing": (
        [math.log(p) for p in (0.2, 0.4, 0.1, 0.3)],
        1.0,
        0,
        0.71,
        {0, 1, 3},
    ),
    "top-p-keeps-equals": ([1.0, 1.0, 1.0, 1.0], 1.0, 0, 0.3, {0, 1, 2, 3}),
    "top-p-tiny-keeps-one": ([0.0, 5.0, 4.0, 1.0], 1.0, 0, 1e-9, {1}),
    # at temperature 2 the masses 16 : 4 : 1 become 4 : 2 : 1
    "top-p-at-temperature": ([math.log(p) for p in (16, 4, 1)], 2.0, 0, 0.6, {0, 1}),
    # of the top 2 (0.4, 0.3) the first has 0.571
    "top-k-then-top-p": ([math.log(p) for p in (0.2, 0.4, 0.1, 0.3)], 1.0, 2, 0.57, {1}),
    "top-k-then-top-p-wider": ([math.log(p) for p in (0.2, 0.4, 0.1, 0.3)], 1.0, 2, 0.58, {1, 3}),
    "banned-tokens-never": ([-math.inf, 1.0, 1.1, -math.inf], 5.0, 3, 0.99, {1, 2}),
}


@pytest.mark.parametrize("backend", ["kernels", "reference"])
@pytest.mark.parametrize("case", SUPPORTS.values(), ids=SUPPORTS)
def test_candidate_sets_are_exact(case, backend, request, device):
    logits, temperature, top_k, top_p, support = case
    rows = torch.tensor(logits, device=device).repeat(12, 1)
    x = sampling_inputs(rows, temperature, top_k, top_p)
    assert set(_sample(request.getfixturevalue(backend), x).tolist()) == support


def test_many_equal_logits_match_reference(device, dtype, kernels, reference):
    logits = torch.randint(-6, 7, (24, 900), device=device).to(dtype) / 2
    x = sampling_inputs(
        logits,
        temperature=1.1,
        top_k=[1, 2, 10, 50, 200, 0] * 4,
        top_p=[1.0] * 12 + [0.83] * 12,
    )
    assert torch.equal(_sample(kernels, x), _sample(reference, x))


# Candidates from what is kept of each chunk of 4096 tokens, or from the row.

_MIXED = {
    "temperature": [1.0, 0.7, 1.0, 1.3, 0.8, 1.0, 0.0, 1.0, 2.0, 1.0],
    "top_k": [0, 50, 0, 3, 20, 1, 5, 0, 0, 9000],
    "top_p": [0.9, 1.0, 0.99, 0.9, 0.7, 1.0, 0.5, 1e-7, 0.95, 0.9],
    "min_p": [0.0, 0.0, 0.0, 0.01, 0.0, 0.0, 0.1, 0.0, 1e-4, 0.001],
}


def _equal_logits(rows, vocab):
    return torch.full((rows, vocab), 1.25)


def _few_finite(rows, vocab):
    logits = torch.full((rows, vocab), -math.inf)
    logits[:, 17::700] = torch.randn(rows, len(range(17, vocab, 700)))
    logits[:, 5] = math.nan
    return logits


def _equal_in_one_chunk(rows, vocab):
    logits = peaked_logits(rows, vocab)
    logits[:, 4100:4300] = 30.0  # more than a segment takes
    return logits


def _outliers(rows, vocab):
    logits = peaked_logits(rows, vocab)
    logits[:, 1::40] -= 100.0
    logits[:, 2::90] = -math.inf
    logits[:, 3] = 1e4
    return logits


ROWS = {
    "peaked": peaked_logits,
    "noise": torch.randn,
    "all-equal": _equal_logits,
    "few-finite": _few_finite,
    "crowded-chunk": _equal_in_one_chunk,
    "outliers": _outliers,
    "rounded": lambda rows, vocab: (peaked_logits(rows, vocab) * 2).round() / 2,
}


@pytest.mark.parametrize("make", ROWS.values(), ids=ROWS)
def test_rows_of_several_chunks_match_reference(make, device, kernels, reference):
    x = sampling_inputs(make(10, 9001).to(device, torch.float32), **_MIXED, first_seed=3)
    drawn = _sample(kernels, x)
    assert torch.equal(drawn, _sample(reference, x))
    for row in (0, 1, 8) if make in (peaked_logits, _equal_in_one_chunk) else ():
        assert kernels.sample(*(column[row : row + 1] for column in x)) == drawn[row]


@pytest.mark.parametrize("make", ROWS.values(), ids=ROWS)
def test_the_smallest_candidate_is_the_references(make, device, kernels, reference):
    """Each row many times, hot, so that a candidate too many or too few is drawn."""
    rows = 4 if device == "cpu" else 200
    logits = make(1, 4200).repeat(rows, 1).to(device)
    for top_k, top_p, min_p in ((7, 1.0, 0.0), (0, 0.6, 0.0), (12, 0.8, 0.02)):
        x = sampling_inputs(logits, 3.0, top_k, top_p, min_p)
        assert torch.equal(_sample(kernels, x), _sample(reference, x))


def test_many_rows_draw_with_fewer_programs(device, kernels, reference):
    x = sampling_inputs(torch.randn(64, 1500, device=device), 1.0)
    assert torch.equal(_sample(kernels, x), _sample(reference, x))


def _chi_square(drawn, probabilities):
    observed = torch.bincount(drawn, minlength=len(probabilities)).double()
    expected = torch.tensor(probabilities, dtype=torch.float64) * drawn.numel()
    return float(((observed - expected) ** 2 / expected).sum())


@pytest.mark.parametrize(
    ("temperature", "top_k"), [(1.0, 0), (0.5, 0), (2.0, 6)], ids=["plain", "cold", "hot-top-6"]
)
def test_drawn_tokens_follow_the_distribution(temperature, top_k, reference):
    logits = torch.linspace(0, 2, 10)
    x = sampling_inputs(logits.repeat(20000, 1), temperature, top_k)
    drawn = _sample(reference, x)
    kept = logits[-top_k:] if top_k else logits
    expected = torch.softmax(kept.double() / temperature, 0).tolist()
    offset = 10 - len(expected)
    assert int(drawn.min()) >= offset
    assert _chi_square(drawn - offset, expected) < CHI_SQUARE[len(expected) - 1]


def test_one_seed_at_successive_positions_follows_the_distribution(reference):
    logits = torch.linspace(0, 2, 10).repeat(20000, 1)
    x = sampling_inputs(logits, temperature=1.0)._replace(
        seeds=torch.full((20000,), 42),
        positions=torch.arange(20000),
    )
    drawn = reference.sample(*x)
    expected = torch.softmax(logits[0].double(), 0).tolist()
    assert _chi_square(drawn, expected) < CHI_SQUARE[9]
