"""Kernels of other projects, where these are installed, on the bench's own inputs."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch

from pagewire.kernels.bench.inputs import PagedInputs


def flash_attention_3(x: PagedInputs) -> Callable[[], object] | None:
    """Return a call of FlashAttention 3 (vLLM's build) on `x`; None without vLLM or with sinks."""
    try:
        module = importlib.import_module("vllm.vllm_flash_attn")
    except ImportError:
        return None
    out = torch.empty_like(x.q, memory_format=torch.contiguous_format)
    q = x.q.contiguous()
    keys, values = x.k_cache.transpose(1, 2), x.v_cache.transpose(1, 2)  # [NB, BS, KH, D]
    longest = int(x.seq_lens.max())
    window, soft_cap = x.options.get("window"), x.options.get("soft_cap", 0.0)
    if "sinks" in x.options:
        return None

    def run() -> object:
        return module.flash_attn_varlen_func(
            q=q,
            k=keys,
            v=values,
            out=out,
            cu_seqlens_q=x.cu_query_lens,
            max_seqlen_q=x.max_query_len,
            seqused_k=x.seq_lens,
            max_seqlen_k=longest,
            softmax_scale=x.scale,
            causal=True,
            window_size=None if window is None else [window - 1, 0],
            softcap=soft_cap,
            block_table=x.block_tables,
            fa_version=3,
        )

    return run
