"""The references against independent truth, and their independence of the batch."""

from __future__ import annotations

import pytest
import torch

from pagewire.kernels.bench.inputs import PagedCase, decode_case

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def _context(cache, table, length):
    """Token-by-token lookup `[length, KH, D]` in float64."""
    block_size = cache.shape[2]
    rows = [cache[int(table[t // block_size]), :, t % block_size] for t in range(length)]
    return torch.stack(rows).double()


def _naive_attention(q, keys, values, scale):
    """One query `[H, D]` over its context, head by head, in float64."""
    group = q.shape[0] // keys.shape[1]
    out = []
    for head, query in enumerate(q.double()):
        weights = torch.softmax(keys[:, head // group] @ query * scale, 0)
        out.append(weights @ values[:, head // group])
    return torch.stack(out)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [16, 32])
def test_attention_is_softmax_over_the_context(block_size, dtype, reference, assert_close):
    case = PagedCase((1, 6, 17), (33, 6, 40), 6, 2, 16, block_size)
    x = case.build("cpu", dtype)
    lengths = (x.cu_query_lens, x.seq_lens, x.max_query_len)
    out = reference.paged_prefill(x.q, x.k_cache, x.v_cache, x.block_tables, *lengths, x.scale)
    row = 0
    for sequence, (query_len, seq_len) in enumerate(
        zip(case.query_lens, case.seq_lens, strict=True)
    ):
        table = x.block_tables[sequence]
        for position in range(seq_len - query_len, seq_len):
            keys = _context(x.k_cache, table, position + 1)
            values = _context(x.v_cache, table, position + 1)
            assert_close(out[row], _naive_attention(x.q[row], keys, values, x.scale).to(dtype))
            row += 1


def test_decode_is_softmax_over_the_context(reference, assert_close):
    x = decode_case((33, 0, 16, 1), 6, 2, 16).build("cpu", torch.float32)
    args = (x.k_cache, x.v_cache)
    out = reference.paged_decode(x.q, *args, x.block_tables, x.seq_lens, x.scale)
    assert not out[1].any()
    for row in (0, 2, 3):
        keys, values = (_context(c, x.block_tables[row], int(x.seq_lens[row])) for c in args)
        assert_close(out[row], _naive_attention(x.q[row], keys, values, x.scale).float())


def test_long_chunks_are_tiled_without_a_seam(reference, assert_close):
    x = PagedCase((700,), (1300,), 2, 1, 16).build("cpu", torch.float32)
    args = (x.q, x.k_cache, x.v_cache, x.block_tables)
    out = reference.paged_prefill(*args, x.cu_query_lens, x.seq_lens, 700, x.scale)
    for row in (0, 511, 512, 699):
        keys = _context(x.k_cache, x.block_tables[0], 601 + row)
        values = _context(x.v_cache, x.block_tables[0], 601 + row)
        assert_close(out[row], _naive_attention(x.q[row], keys, values, x.scale).float())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_residual", [False, True], ids=["plain", "residual"])
def test_rms_norm_is_hugging_faces(dtype, with_residual, reference):
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    x, residual = torch.randn(2, 5, 123).to(dtype)
    norm = LlamaRMSNorm(123, eps=1e-5).to(dtype)
    torch.nn.init.normal_(norm.weight)
    normed, summed = reference.rms_norm(
        x, norm.weight.detach(), 1e-5, residual if with_residual else None
    )
    expected = x + residual if with_residual else x
    assert torch.equal(summed, expected)
    assert torch.equal(normed, norm(expected).detach())


def test_rotation_is_hugging_faces(reference):
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    positions = torch.tensor([0, 5, 49, 1])
    angles = torch.rand(50, 16) * 6
    q, k = torch.randn(4, 6, 32), torch.randn(4, 2, 32)
    doubled = torch.cat([angles, angles], -1)[positions]
    cos, sin = doubled.cos()[None], doubled.sin()[None]
    expected_q, expected_k = apply_rotary_pos_emb(
        q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin
    )
    k_cache, v_cache = torch.zeros(2, 1, 2, 16, 32)
    cos_sin = torch.cat([angles.cos(), angles.sin()], -1)
    reference.rotary_and_cache(positions, q, k, k, cos_sin, k_cache, v_cache, torch.arange(4))
    torch.testing.assert_close(q, expected_q[0].transpose(0, 1))
    torch.testing.assert_close(k_cache[0, :, :4], expected_k[0])
    assert torch.equal(v_cache[0, :, :4], k.transpose(0, 1))


def test_norm_and_rotation_of_a_part_are_hugging_faces(reference):
    from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    angles = torch.rand(4, 12) * 6
    q, k = torch.randn(4, 6, 32), torch.randn(4, 2, 32)
    norms = [Qwen3RMSNorm(32, eps=1e-3) for _ in range(2)]
    for norm in norms:
        torch.nn.init.normal_(norm.weight)
    doubled = torch.cat([angles, angles], -1)
    expected_q, expected_k = apply_rotary_pos_emb(
        norms[0](q).detach().transpose(0, 1)[None],
        norms[1](k).detach().transpose(0, 1)[None],
        doubled.cos()[None],
        doubled.sin()[None],
    )
    k_cache, v_cache = torch.zeros(2, 1, 2, 16, 32)
    cos_sin = torch.cat([angles.cos(), angles.sin()], -1)
    slots, weights = torch.arange(4), [norm.weight.detach() for norm in norms]
    reference.rotary_and_cache(slots, q, k, k, cos_sin, k_cache, v_cache, slots, *weights, 1e-3)
    torch.testing.assert_close(q, expected_q[0].transpose(0, 1))
    torch.testing.assert_close(k_cache[0, :, :4], expected_k[0])
    assert torch.equal(v_cache[0, :, :4], k.transpose(0, 1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_silu_and_mul_is_torchs(dtype, reference, assert_close):
    x = 5 * torch.randn(7, 246).to(dtype)
    gate, up = x.double().chunk(2, -1)
    assert_close(reference.silu_and_mul(x), (torch.nn.functional.silu(gate) * up).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gelu_and_mul_is_torchs(dtype, reference, assert_close):
    x = 5 * torch.randn(7, 246).to(dtype)
    gate, up = x.double().chunk(2, -1)
    expected = torch.nn.functional.gelu(gate, approximate="tanh") * up
    assert_close(reference.gelu_and_mul(x), expected.to(dtype))


@pytest.fixture(params=[1, 2, 3], ids="{}-threads".format)
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("tokens", [2, 7, 100])
def test_pointwise_rows_have_the_same_bits_alone(tokens, threads, reference):
    x = torch.randn(tokens, 2 * 700)
    weight = torch.randn(1400)
    activated, gelu = reference.silu_and_mul(x), reference.gelu_and_mul(x)
    normed, _ = reference.rms_norm(x, weight, 1e-5, x)
    for row in range(tokens):
        one = x[row : row + 1]
        assert torch.equal(reference.silu_and_mul(one)[0], activated[row])
        assert torch.equal(reference.gelu_and_mul(one)[0], gelu[row])
        assert torch.equal(reference.rms_norm(one, weight, 1e-5, one)[0][0], normed[row])


def test_log_probabilities_have_the_same_bits_alone(threads, reference):
    """A vocabulary as long as real ones, whose sum torch would split among threads."""
    logits, tokens = torch.randn(48, 151936), torch.arange(48)
    together = reference.token_logprobs(logits, torch.arange(48), tokens, 3)
    for row in range(48):
        alone = reference.token_logprobs(logits, torch.tensor([row]), tokens, 3)
        assert all(torch.equal(a[0], b[row]) for a, b in zip(alone, together, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_rows_have_the_same_bits_alone(dtype, threads, reference):
    x = PagedCase((1, 33, 5, 1, 16), (33, 33, 120, 77, 16), 6, 2, 32).build("cpu", dtype)
    args = (x.k_cache, x.v_cache)
    lengths = (x.cu_query_lens, x.seq_lens, x.max_query_len)
    prefilled = reference.paged_prefill(x.q, *args, x.block_tables, *lengths, x.scale)
    decoded = reference.paged_decode(x.q[:5], *args, x.block_tables, x.seq_lens, x.scale)
    for row in range(5):
        table, seq_len = x.block_tables[row : row + 1], x.seq_lens[row : row + 1]
        start, stop = x.cu_query_lens[row : row + 2].tolist()
        cu_query_lens = torch.tensor([0, stop - start], dtype=torch.int32)
        lengths = (cu_query_lens, seq_len, stop - start)
        alone = reference.paged_prefill(x.q[start:stop], *args, table, *lengths, x.scale)
        assert torch.equal(alone, prefilled[start:stop])
        alone = reference.paged_decode(x.q[row : row + 1], *args, table, seq_len, x.scale)
        assert torch.equal(alone[0], decoded[row])
