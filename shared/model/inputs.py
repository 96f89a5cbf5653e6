"""The inputs of a model for one step: packed tokens and where their KV is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

# Called with the number of a layer that has been launched, its writes to the KV pool included.
OnLayerEnd = Callable[[int], None]


class LayerKv(NamedTuple):
    """Where a layer's keys and values are, or its latent vectors.

    Attributes:
        group: index of its cache group, and of that group's batch in `ForwardBatch.groups`.
        cache: `[NB, 2, KH, BS, D]`, the layer's part of all blocks; with latent vectors
            `[NB, 1, 1, BS, C + R]`.
    """

    group: int
    cache: torch.Tensor


@dataclass(slots=True)
class ForwardBatch:
    """The tokens of one step: first one of each decode row, then the prefill chunks, packed.

    The host reads none of its tensors, so that a CUDA graph can replay the step. `num_decodes` is
    then the most decode rows that it can have: the last ones may be padding rows, and the chunks
    begin at the first of these.

    Attributes:
        input_ids: `[T]` int64.
        positions: `[T]` int64, each token's place in its sequence.
        slot_mapping: `[T]` int64, `block * block_size + offset` of each token; -1: no write.
        num_decodes: leading tokens that are decode rows, or places of padding rows.
        decode_block_tables: `[num_decodes, max_blocks]` int32; None without decode rows.
        decode_seq_lens: `[num_decodes]` int32, this token included; 0 is a padding row, -1 the
            place of one, where a chunk's token may be.
        prefill_block_tables: `[P, max_blocks]` int32; None without prefill chunks.
        prefill_cu_query_lens: `[P + 1]` int32, index of each chunk's first token, and the end of
            the last chunk.
        prefill_seq_lens: `[P]` int32, cached prefix and chunk together.
        max_query_len: longest chunk; 0 without one.
        chunks: length and context of each chunk, where the host knows them: no CUDA graph replays
            such a step. None: only the device knows them.
        others: the same tokens with the blocks of the other cache groups.
        kept_rows: `[N]` int64, the tokens whose outputs the layer returns; None for all. The model
            sets it for its last layer.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    num_decodes: int
    decode_block_tables: torch.Tensor | None
    decode_seq_lens: torch.Tensor | None
    prefill_block_tables: torch.Tensor | None
    prefill_cu_query_lens: torch.Tensor | None
    prefill_seq_lens: torch.Tensor | None
    max_query_len: int
    chunks: tuple[tuple[int, int], ...] | None = None
    others: tuple[ForwardBatch, ...] = ()
    kept_rows: torch.Tensor | None = None

    @classmethod
    def of_groups(cls, batches: Iterable[ForwardBatch]) -> ForwardBatch:
        """Return the batch of the first cache group, which has those of the others."""
        first, *others = batches
        return replace(first, others=tuple(others))

    @property
    def groups(self) -> tuple[ForwardBatch, ...]:
        """The batch as each cache group's layers see it."""
        return (self, *self.others)

    def kept(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the rows of `[T, ...]` whose outputs the layer returns, `[N, ...]`."""
        return tokens if self.kept_rows is None else tokens[self.kept_rows]
