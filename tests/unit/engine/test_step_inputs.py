"""How a step's inputs are laid out: as they are, and padded to a shape."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest
import torch

from pagewire.shared.engine.execution.step_inputs import HostStep, Rounding, StepInputs, StepShape
from pagewire.shared.engine.scheduling.step import PrefillChunk

BLOCK_SIZE, GROUPS, PADDING_SLOT = 4, 2, 6
TABLES = np.arange(7 * GROUPS * 5).reshape(7, GROUPS, 5)  # a block of its own in each place
CHUNKS = [
    PrefillChunk(3, 0, [11, 12, 13, 14, 15], samples=True),
    PrefillChunk(0, 7, [21], samples=False),
    PrefillChunk(5, 2, [31, 32, 33], samples=True),
]
SHAPE = StepShape(4, 16, 8)


def both(decodes: list[int], chunks: list[PrefillChunk]) -> tuple[StepInputs, StepInputs]:
    step = HostStep(decodes, chunks, BLOCK_SIZE, TABLES)
    return StepInputs.build(step), StepInputs.build_padded(step, SHAPE, PADDING_SLOT)


@pytest.mark.parametrize("decodes", [[], [2], [4, 1, 2, 0]], ids=len)
def test_rows_that_sample_come_first_and_padding_after_them(decodes: list[int]) -> None:
    plain, padded = both(decodes, CHUNKS)
    count = len(decodes)
    assert plain.decode_slots.tolist() == decodes
    assert padded.decode_slots.tolist() == decodes + [PADDING_SLOT] * (4 - count)
    slots, positions = [*decodes, 3, 5], [-1] * count + [5, 5]
    assert plain.sample_slots.tolist() == slots
    assert padded.sample_slots.tolist() == slots + [PADDING_SLOT] * (6 - count)
    assert plain.sample_positions.tolist() == positions
    assert padded.sample_positions.tolist() == positions + [0] * (6 - count)
    # Hidden states of chunks come after those of all decode rows, without padding in between.
    for inputs in (plain, padded):
        assert inputs.sample_rows[: count + 2].tolist() == [*range(count), count + 4, count + 8]


@pytest.mark.parametrize("chunks", [CHUNKS[:1], CHUNKS[1:2], CHUNKS], ids=len)
def test_padding_tokens_are_written_nowhere_and_padding_chunks_are_empty(
    chunks: list[PrefillChunk],
) -> None:
    ids = [token for chunk in chunks for token in chunk.token_ids]
    positions = [position for chunk in chunks for position in range(chunk.start, chunk.end)]
    owners = [chunk.slot for chunk in chunks for _ in chunk.token_ids]
    blocks = TABLES[owners, :, np.array(positions) // BLOCK_SIZE].T  # [G, T]
    kv_slots = (blocks * BLOCK_SIZE + np.array(positions) % BLOCK_SIZE).tolist()
    ends = [*accumulate((chunk.length for chunk in chunks), initial=1)]  # after the decode row
    longest = -(-max(chunk.end for chunk in chunks) // BLOCK_SIZE)
    padding = [(0, 0, longest), (16 - 1 - len(ids), 8 - len(chunks), TABLES.shape[2])]
    for inputs, (tokens, rows, blocks_read) in zip(both([2], chunks), padding, strict=True):
        batch = inputs.forward_batch(torch.from_numpy(TABLES).int())
        assert batch.input_ids.tolist() == [0, *ids] + [0] * tokens
        assert batch.positions.tolist() == [0, *positions] + [0] * tokens
        slots = [*(chunk.slot for chunk in chunks), *[PADDING_SLOT] * rows]
        for group, part in enumerate(batch.groups):
            assert part.slot_mapping.tolist() == [-1, *kv_slots[group]] + [-1] * tokens
            assert part.prefill_block_tables is not None
            tables = TABLES[slots, group, :blocks_read]
            assert part.prefill_block_tables.tolist() == tables.tolist()
        assert batch.prefill_cu_query_lens is not None and batch.prefill_seq_lens is not None
        assert batch.prefill_cu_query_lens.tolist() == ends + ends[-1:] * rows
        assert batch.prefill_seq_lens.tolist() == [chunk.end for chunk in chunks] + [0] * rows


@pytest.mark.parametrize(("max_context", "blocks"), [(8, 2), (9, 3), (100, 5), (None, 5)])
def test_a_shape_for_short_contexts_reads_their_part_of_block_tables(
    max_context: int | None, blocks: int
) -> None:
    shape = StepShape(0, 16, 1, max_context)
    step = HostStep([], CHUNKS[:1], BLOCK_SIZE, TABLES)
    inputs = StepInputs.build_padded(step, shape, PADDING_SLOT)
    batch = inputs.forward_batch(torch.from_numpy(TABLES).int())
    for group, part in enumerate(batch.groups):
        assert part.prefill_block_tables is not None
        assert part.prefill_block_tables.tolist() == [TABLES[3, group, :blocks].tolist()]


@pytest.mark.parametrize(
    ("decodes", "chunks", "rows", "tokens", "samples"),
    [
        ([], CHUNKS[1:2], 0, 16, 0),  # one token, which samples nothing
        ([2], CHUNKS[:1], 1, 16, 2),
        ([2, 4, 1], CHUNKS, 5, 16, 5),
        ([], [PrefillChunk(0, 0, [7] * 17, samples=True)], 0, 20, 1),
        ([2, 4, 1], [PrefillChunk(0, 0, [7] * 19, samples=True)], 5, 22, 5),  # more than any
    ],
)
def test_rounded_steps_have_few_numbers_of_rows_and_tokens(
    decodes: list[int], chunks: list[PrefillChunk], rows: int, tokens: int, samples: int
) -> None:
    rounding = Rounding([1, 2, 5], (16, 20), PADDING_SLOT)
    inputs = StepInputs.build(HostStep(decodes, chunks, BLOCK_SIZE, TABLES), rounding)
    assert (inputs.num_decodes, inputs.num_tokens, inputs.num_samples) == (rows, tokens, samples)
    assert inputs.num_chunks == len(chunks)
    assert inputs.max_query_len == max(16, *(chunk.length for chunk in chunks))
    assert inputs.decode_slots.tolist() == decodes + [PADDING_SLOT] * (rows - len(decodes))
    sampled = [*decodes, *(chunk.slot for chunk in chunks if chunk.samples)]
    padding = [PADDING_SLOT] * (samples - len(sampled))
    assert inputs.sample_slots.tolist() == sampled + padding
    assert inputs.sample_positions[len(sampled) :].tolist() == [0] * len(padding)
    batch = inputs.forward_batch(torch.from_numpy(TABLES).int())
    real = len(decodes) + sum(chunk.length for chunk in chunks)
    assert batch.slot_mapping[real:].tolist() == [-1] * (tokens - real)
