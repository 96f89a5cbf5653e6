"""Attention of a step's tokens over the paged KV cache."""

from __future__ import annotations

from typing import Any

import torch

from pagewire.kernels import Ops
from pagewire.shared.model.inputs import ForwardBatch


def attend(
    ops: Ops,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: ForwardBatch,
    scale: float,
    out: torch.Tensor,
    **options: Any,
) -> None:
    """Fill `out` [T, H, D]: decode rows first, then the prefill chunks.

    In this order, because decode attention writes zeros for padding rows, where chunks may be.

    Args:
        ops: kernels that suit the device.
        q: [T, H, D], rotated.
        k_cache: [NB, KH, BS, D], with the step's keys.
        v_cache: likewise.
        batch: the step, as the layer's cache group sees it.
        scale: factor of the scores.
        out: [T, H, D], where the result goes.
        options: `window`, `soft_cap` and `sinks` of the kernels.
    """
    decodes = batch.num_decodes
    if batch.decode_block_tables is not None and batch.decode_seq_lens is not None:
        ops.paged_decode(
            q[:decodes],
            k_cache,
            v_cache,
            batch.decode_block_tables,
            batch.decode_seq_lens,
            scale,
            out=out[:decodes],
            **options,
        )
    starts, lengths = batch.prefill_cu_query_lens, batch.prefill_seq_lens
    if batch.prefill_block_tables is not None and starts is not None and lengths is not None:
        ops.paged_prefill(
            q,
            k_cache,
            v_cache,
            batch.prefill_block_tables,
            starts,
            lengths,
            batch.max_query_len,
            scale,
            out=out,
            **options,
        )


def attend_latent(
    ops: Ops,
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    cache: torch.Tensor,
    batch: ForwardBatch,
    scale: float,
    out: torch.Tensor,
) -> None:
    """Fill `out` [T, H, C]: decode rows first, then the prefill chunks, as `attend` does.

    Args:
        ops: kernels that suit the device.
        q_latent: [T, H, C].
        q_rope: [T, H, R], rotated.
        cache: [NB, BS, C + R], with the step's rows.
        batch: the step, as the layer's cache group sees it.
        scale: factor of the scores.
        out: [T, H, C], where the result goes.
    """
    decodes = batch.num_decodes
    if batch.decode_block_tables is not None and batch.decode_seq_lens is not None:
        ops.latent_attention(
            q_latent[:decodes],
            q_rope[:decodes],
            cache,
            batch.decode_block_tables,
            batch.decode_seq_lens,
            scale,
            out=out[:decodes],
        )
    if batch.prefill_block_tables is not None and batch.prefill_seq_lens is not None:
        ops.latent_attention(
            q_latent,
            q_rope,
            cache,
            batch.prefill_block_tables,
            batch.prefill_seq_lens,
            scale,
            batch.prefill_cu_query_lens,
            batch.max_query_len,
            out=out,
        )
