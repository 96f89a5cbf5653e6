"""How a GPU's memory is divided; a worker and `pagewire estimate` use the same arithmetic."""

from __future__ import annotations

from pagewire.shared.kv.kv_layout import KvLayout

GRAPH_BYTES = 1 << 30  # for CUDA graphs
MIN_BLOCKS = 16  # of a KV pool


def trial_blocks(max_num_batched_tokens: int, layout: KvLayout) -> int:
    """Return the blocks of the pool with which a worker measures a full step."""
    return (layout.blocks_for(max_num_batched_tokens) + 1) * len(layout.groups)


def pool_bytes(
    total: int,
    utilization: float,
    peak: int,
    *,
    cuda_graphs: bool,
    staging: int,
    in_use_by_others: int = 0,
) -> int:
    """Return how many bytes are left for the KV pool; negative if none are left.

    Args:
        total: the GPU's memory.
        utilization: share of it that the worker may use.
        peak: weights, tables, the trial pool and the activations of a full step.
        cuda_graphs: whether steps are captured.
        staging: memory for KV transfer.
        in_use_by_others: memory that other processes use.
    """
    graphs = GRAPH_BYTES if cuda_graphs else 0
    return min(int(total * utilization), total - in_use_by_others) - peak - graphs - staging
