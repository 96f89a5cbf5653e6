"""Model inputs of decode rows, which only the device knows: alone, or in front of chunks."""

from __future__ import annotations

import torch

from pagewire.shared.engine.execution.device_state import DeviceState
from pagewire.shared.model.inputs import ForwardBatch


def decode_inputs(state: DeviceState, slots: torch.Tensor, block_size: int) -> ForwardBatch:
    """Return the model's view of decode rows in these device slots, [B] int64.

    Everything is read on the device, so that this can be captured.
    """
    position = state.position[slots]
    tables = state.block_tables[slots]  # [B, G, max_blocks]
    is_real = slots != state.padding_slot
    index = (position // block_size)[:, None, None].expand(-1, state.num_groups, 1)
    blocks = tables.gather(2, index).squeeze(2)
    blocks = blocks.t().to(torch.int64, memory_format=torch.contiguous_format)  # [G, B]
    slot_mapping = blocks * block_size + position % block_size
    slot_mapping = torch.where(is_real, slot_mapping, -1)
    input_ids = state.last_token[slots]
    seq_lens = torch.where(is_real, position + 1, 0).to(torch.int32)
    return ForwardBatch.of_groups(
        ForwardBatch(
            input_ids=input_ids,
            positions=position,
            slot_mapping=slot_mapping[group],
            num_decodes=slots.shape[0],
            decode_block_tables=tables[:, group],
            decode_seq_lens=seq_lens,
            prefill_block_tables=None,
            prefill_cu_query_lens=None,
            prefill_seq_lens=None,
            max_query_len=0,
        )
        for group in range(state.num_groups)
    )


def joined(decodes: ForwardBatch, prefills: ForwardBatch) -> ForwardBatch:
    """Put decode rows in front of prefill chunks, where these have no tokens of their own.

    Args:
        decodes: B decode rows; the last ones may be padding rows, without KV slots.
        prefills: T tokens, at least B; those of the chunks begin after the last real decode row.
    """
    count = decodes.num_decodes
    is_real = decodes.slot_mapping >= 0

    def with_rows(tokens: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.where(is_real, rows, tokens[:count]), tokens[count:]])

    input_ids = with_rows(prefills.input_ids, decodes.input_ids)
    positions = with_rows(prefills.positions, decodes.positions)
    # A padding row would otherwise get zeros, perhaps after a chunk's token got its result there.
    lengths = decodes.decode_seq_lens
    lengths = None if lengths is None else torch.where(is_real, lengths, -1)
    return ForwardBatch.of_groups(
        ForwardBatch(
            input_ids=input_ids,
            positions=positions,
            slot_mapping=with_rows(chunks.slot_mapping, rows.slot_mapping),
            num_decodes=rows.num_decodes,
            decode_block_tables=rows.decode_block_tables,
            decode_seq_lens=lengths,
            prefill_block_tables=chunks.prefill_block_tables,
            prefill_cu_query_lens=chunks.prefill_cu_query_lens,
            prefill_seq_lens=chunks.prefill_seq_lens,
            max_query_len=chunks.max_query_len,
            chunks=chunks.chunks,
        )
        for rows, chunks in zip(decodes.groups, prefills.groups, strict=True)
    )
