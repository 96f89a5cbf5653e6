"""Log probabilities of tokens: Triton against the reference, and the reference against torch."""

from __future__ import annotations

import math

import pytest
import torch

NAN, INF = math.nan, math.inf


def _case(rows, vocab, device, dtype=torch.float32):
    logits = (3 * torch.randn(rows, vocab, device=device)).to(dtype)
    tokens = torch.randint(vocab, (rows,), device=device)
    return logits, tokens


def _assert_equal(actual, expected):
    for name, got, want in zip(("ids", "logprobs", "ranks"), actual, expected, strict=True):
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-6, msg=lambda m, n=name: n + m)


@pytest.mark.parametrize(("vocab", "top"), [(1, 1), (31, 20), (123, 0), (5000, 1), (9000, 20)])
def test_matches_reference(vocab, top, device, dtype, kernels, reference):
    logits, tokens = _case(6, vocab, device, dtype)
    rows = torch.tensor([4, 0, 5], device=device)
    actual = kernels.token_logprobs(logits, rows, tokens, top)
    _assert_equal(actual, reference.token_logprobs(logits, rows, tokens, top))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab", [128256, 151936])
def test_matches_reference_at_real_vocabularies(vocab, dtype, kernels, reference):
    logits, tokens = _case(64, vocab, "cuda", dtype)
    rows = torch.arange(64, device="cuda")
    actual = kernels.token_logprobs(logits, rows, tokens, 20)
    _assert_equal(actual, reference.token_logprobs(logits, rows, tokens, 20))


@pytest.mark.parametrize("backend", ["kernels", "reference"])
def test_is_the_log_softmax_in_float32(backend, request, device):
    logits, tokens = _case(5, 3000, device)
    wanted = torch.log_softmax(logits.double(), -1)
    ops = request.getfixturevalue(backend)
    ids, logprobs, ranks = ops.token_logprobs(logits, torch.arange(5, device=device), tokens, 7)
    assert torch.equal(ids[:, 0].long(), tokens)
    assert torch.equal(ids[:, 1:].long(), wanted.topk(7).indices)
    found = wanted.gather(1, ids.long())
    torch.testing.assert_close(logprobs.double(), found, atol=1e-5, rtol=0)
    token_logprob = wanted.gather(1, tokens[:, None])
    assert torch.equal(ranks.long(), 1 + (wanted > token_logprob).sum(-1))


@pytest.mark.parametrize("backend", ["kernels", "reference"])
def test_ties_nan_and_infinities(backend, request, device):
    logits = torch.tensor(
        [
            [1.0, 3.0, 3.0, 2.0],
            [NAN, 1.0, NAN, 0.0],
            [-INF, -INF, -5.0, -INF],
            [-INF] * 4,
            [1.0, INF, NAN, 2.0],
            [-0.0, 0.0, -1.0, -0.0],
        ],
        device=device,
    )
    tokens = torch.tensor([2, 0, 2, 1, 1, 3], device=device)
    ops = request.getfixturevalue(backend)
    rows = torch.arange(6, device=device)
    ids, logprobs, ranks = ops.token_logprobs(logits, rows, tokens, 3)
    tops = [[1, 2, 3], [1, 3, 0], [2, 0, 1], [0, 1, 2], [1, 3, 0], [0, 1, 3]]
    assert ids[:, 1:].tolist() == tops
    assert ranks.tolist() == [1, 3, 1, 1, 1, 1]
    assert not logprobs.isnan().any()
    assert logprobs[1, 0] == -INF
    assert logprobs[2].tolist() == [0.0, 0.0, -INF, -INF]
    assert logprobs[3].tolist() == [-INF] * 4
    assert logprobs[4, 0] == 0.0


@pytest.mark.parametrize("backend", ["kernels", "reference"])
def test_strided_logits_and_no_rows(backend, request, device):
    ops = request.getfixturevalue(backend)
    whole, _ = _case(6, 300, device)
    logits = whole[::2, 5:205]
    tokens = torch.tensor([7, 8, 9], device=device)
    rows = torch.tensor([2], device=device)
    found = ops.token_logprobs(logits, rows, tokens, 2)
    _assert_equal(found, ops.token_logprobs(logits.contiguous(), rows, tokens, 2))
    shapes = [tuple(part.shape) for part in ops.token_logprobs(logits, rows[:0], tokens, 2)]
    assert shapes == [(0, 3), (0, 3), (0,)]
