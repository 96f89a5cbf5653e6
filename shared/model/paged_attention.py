"""Attention of a step's tokens over the paged KV cache."""

from __future__ import annotations

from contextlib import nullcontext
from functools import lru_cache
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
    """Fill `out` [T, H, D] for prefill chunks and decode rows.

    In a CUDA graph, chunks and decode rows are two branches. Small chunks leave SMs idle, and the
    memory limits decode attention even on half of the SMs.

    Args:
        ops: kernels that suit the device.
        q: [T, H, D], rotated.
        k_cache: [NB, KH, BS, D], with the step's keys.
        v_cache: [NB, KH, BS, D], with the step's values.
        batch: the step, as the layer's cache group sees it.
        scale: factor of the scores.
        out: [T, H, D], where the result goes.
        options: `window`, `soft_cap`, `sinks` and `kv_scales` of the kernels.
    """
    tables, seq_lens, rows = batch.decode_block_tables, batch.decode_seq_lens, batch.num_decodes
    starts, lengths = batch.prefill_cu_query_lens, batch.prefill_seq_lens
    branch = _branch_stream(q.device) if _has_branch(batch, q) else None
    if branch is not None:
        branch.wait_stream(torch.cuda.current_stream())
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
            chunks=batch.chunks,
            **options,
        )
    if tables is not None and seq_lens is not None:
        with nullcontext() if branch is None else torch.cuda.stream(branch):
            ops.paged_decode(
                q[:rows], k_cache, v_cache, tables, seq_lens, scale, out=out[:rows], **options
            )
    if branch is not None:
        torch.cuda.current_stream().wait_stream(branch)


def _has_branch(batch: ForwardBatch, q: torch.Tensor) -> bool:
    has_both = batch.decode_block_tables is not None and batch.prefill_block_tables is not None
    return has_both and q.is_cuda and torch.cuda.is_current_stream_capturing()


@lru_cache(maxsize=16)
def _branch_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
