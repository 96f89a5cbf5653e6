"""Model inputs of a step with prefill chunks: known on the host, sent in one copy."""

from __future__ import annotations

import bisect
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from pagewire.shared.engine.execution.host_copies import uploaded
from pagewire.shared.engine.scheduling.step import PrefillChunk
from pagewire.shared.model.inputs import ForwardBatch

_Integers = npt.NDArray[np.int64]
BlockTables = npt.NDArray[np.int64]  # [device slots, G, blocks of a sequence], on the host


class HostStep(NamedTuple):
    """A step as the host knows it.

    Attributes:
        decodes: device slots of the decode rows.
        chunks: of prompts.
        block_size: tokens of a block.
        tables: the device slots' block tables.
    """

    decodes: list[int]
    chunks: list[PrefillChunk]
    block_size: int
    tables: BlockTables


@dataclass(frozen=True, slots=True)
class StepShape:
    """The shape that a step's inputs are padded to, so that one CUDA graph serves many steps.

    Attributes:
        num_decodes: B, most decode rows; at most T.
        num_tokens: T, most tokens: decode rows and all chunks together.
        num_chunks: P, most chunks.
        max_context: most tokens of a chunk and the context before it; None for any number.
            Attention decides by it whether contexts are split.
    """

    num_decodes: int
    num_tokens: int
    num_chunks: int
    max_context: int | None = None

    @property
    def num_samples(self) -> int:
        """N, the most rows that sample: decode rows, and chunks that end their prompt.

        A step with B decode rows and such a chunk needs a shape with more decode rows.
        """
        return max(self.num_decodes, self.num_chunks)


@dataclass(frozen=True, slots=True)
class Rounding:
    """Numbers of rows and tokens to which steps are padded that no CUDA graph replays.

    So such a step runs only kernels that were compiled before, for a step of these numbers.

    Attributes:
        rows: numbers of decode rows, and of rows that sample, ascending.
        tokens: numbers of tokens, ascending; a step with more than the last keeps its number.
        padding_slot: device slot of padding rows.
    """

    rows: list[int]
    tokens: tuple[int, ...]
    padding_slot: int

    def rows_for(self, count: int) -> int:
        """Return how many rows a step with `count` rows has; none stay none."""
        return self.rows[bisect.bisect_left(self.rows, count)] if count else 0

    def tokens_for(self, count: int) -> int:
        """Return how many tokens a step with `count` tokens has."""
        place = bisect.bisect_left(self.tokens, count)
        return self.tokens[place] if place < len(self.tokens) else count


@dataclass(frozen=True, slots=True)
class StepInputs:
    """All inputs of a step with prefill chunks in one int64 buffer, and where each part lies.

    The order:

    - of the decode rows: device slots [B];
    - of the step's tokens: ids [T], positions [T], KV slots [G, T] in the cache groups;
    - of the chunks: device slots [P], sequence lengths [P], index of each chunk's first token and
      the end of the last chunk [P + 1];
    - of the rows that sample, decode rows first: index of their hidden state [N], device slot [N],
      position of the new token [N].

    The step's tokens are those of the decode rows, which only the device knows, then those of the
    chunks. Padding tokens come after all of them, so the chunks of a padded step may begin among
    its first B tokens.

    Attributes:
        table_blocks: entries of a block table that the chunks may need; None for all.
        lengths: see `ForwardBatch.chunks`.
    """

    buffer: torch.Tensor
    num_decodes: int
    num_tokens: int
    num_chunks: int
    num_samples: int
    max_query_len: int
    num_groups: int
    table_blocks: int | None
    lengths: tuple[tuple[int, int], ...] | None = None

    @classmethod
    def build(cls, step: HostStep, rounding: Rounding | None = None) -> StepInputs:
        """Lay out the inputs of a step with at least one chunk.

        Args:
            step: the step.
            rounding: pads rows and tokens as `build_padded` does; None adds none.
        """
        decodes, chunks, block_size, tables = step
        rows, samples = len(decodes), len(decodes) + sum(chunk.samples for chunk in chunks)
        tokens = len(decodes) + sum(chunk.length for chunk in chunks)
        longest, slot = max(chunk.length for chunk in chunks), 0
        if rounding is not None:
            rows, samples = rounding.rows_for(rows), rounding.rows_for(samples)
            tokens = rounding.tokens_for(max(tokens, rows))
            longest, slot = max(longest, rounding.tokens[0]), rounding.padding_slot
        counts, groups = (rows, tokens, len(chunks), samples), tables.shape[1]
        flat = _lay_out(step, _sizes(*counts, groups), slot)
        blocks = -(-max(chunk.end for chunk in chunks) // block_size)
        lengths = tuple((chunk.length, chunk.end) for chunk in chunks)
        return cls(torch.from_numpy(flat), *counts, longest, groups, blocks, lengths)

    @classmethod
    def build_padded(cls, step: HostStep, shape: StepShape, padding_slot: int) -> StepInputs:
        """Lay out the inputs of a step, perhaps without any rows, in a shape for more.

        Padding rows have the padding device slot. Padding tokens belong to no chunk, and their KV
        is not written; padding chunks are empty. Tokens that padding samples go to the padding
        device slot, at position 0.
        """
        counts = (shape.num_decodes, shape.num_tokens, shape.num_chunks, shape.num_samples)
        groups = step.tables.shape[1]
        flat = _lay_out(step, _sizes(*counts, groups), padding_slot)
        blocks = None if shape.max_context is None else -(-shape.max_context // step.block_size)
        return cls(torch.from_numpy(flat), *counts, shape.num_tokens, groups, blocks)

    def to(self, device: torch.device) -> StepInputs:
        """Copy to the device without waiting."""
        return replace(self, buffer=uploaded(self.buffer, device))

    def forward_batch(self, block_tables: torch.Tensor) -> ForwardBatch:
        """Return the model's view of the step without its decode rows.

        Args:
            block_tables: [S, G, max_blocks], of all device slots.
        """
        sizes = self._sizes()[:7]
        parts = self.buffer[: sum(sizes)].split(sizes)
        _, ids, positions, mapping, slots, lengths, cumulative = parts
        tables = block_tables[slots][..., : self.table_blocks]
        seq_lens, cu_query_lens = lengths.to(torch.int32), cumulative.to(torch.int32)
        return ForwardBatch.of_groups(
            ForwardBatch(
                input_ids=ids,
                positions=positions,
                slot_mapping=mapping[group * self.num_tokens : (group + 1) * self.num_tokens],
                num_decodes=0,
                decode_block_tables=None,
                decode_seq_lens=None,
                prefill_block_tables=tables[:, group],
                prefill_cu_query_lens=cu_query_lens,
                prefill_seq_lens=seq_lens,
                max_query_len=self.max_query_len,
                chunks=self.lengths,
            )
            for group in range(self.num_groups)
        )

    def _sizes(self) -> list[int]:
        counts = (self.num_decodes, self.num_tokens, self.num_chunks, self.num_samples)
        return _sizes(*counts, self.num_groups)

    def _tail(self, part: int) -> torch.Tensor:
        end = self.buffer.shape[0] - (2 - part) * self.num_samples
        return self.buffer[end - self.num_samples : end]

    @property
    def decode_slots(self) -> torch.Tensor:
        """[B] device slots of the decode rows."""
        return self.buffer[: self.num_decodes]

    @property
    def sample_rows(self) -> torch.Tensor:
        """[N] hidden states that are sampled from, of T."""
        return self._tail(0)

    @property
    def sample_slots(self) -> torch.Tensor:
        """[N] device slots of the sequences that sample."""
        return self._tail(1)

    @property
    def sample_positions(self) -> torch.Tensor:
        """[N] positions that the new tokens will have; -1 after the device slot's own position."""
        return self._tail(2)


def _sizes(
    num_decodes: int, num_tokens: int, num_chunks: int, num_samples: int, num_groups: int
) -> list[int]:
    """Return the sizes of the buffer's parts in their order."""
    tokens = [num_tokens, num_tokens, num_groups * num_tokens]
    return [num_decodes, *tokens, *[num_chunks] * 2, num_chunks + 1, *[num_samples] * 3]


def _lay_out(step: HostStep, sizes: list[int], padding_slot: int) -> _Integers:
    """Return the buffer; what decode rows and chunks do not fill of its parts is padding."""
    decodes, chunks, block_size, tables = step
    flat = np.zeros(sum(sizes), np.int64)
    parts = [flat[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]
    decode_slots, ids, positions, mapping, *of_chunks, rows, sample_slots, sampled = parts
    slots, lengths, cumulative = of_chunks
    mapping[:] = -1
    decode_slots[:] = slots[:] = sample_slots[:] = padding_slot
    mapping = mapping.reshape(tables.shape[1], -1)
    cumulative[:] = end = count = len(decodes)
    decode_slots[:count] = sample_slots[:count] = decodes
    rows[:count], sampled[:count] = np.arange(count), -1
    for i, chunk in enumerate(chunks):
        start, end = end, end + chunk.length
        position = np.arange(chunk.start, chunk.end)
        ids[start:end] = chunk.token_ids
        positions[start:end] = position
        blocks = tables[chunk.slot][:, position // block_size]
        mapping[:, start:end] = blocks * block_size + position % block_size
        slots[i], lengths[i] = chunk.slot, chunk.end
        cumulative[i + 1 :] = end
        if chunk.samples:
            rows[count] = end - 1
            sample_slots[count], sampled[count] = chunk.slot, chunk.end
            count += 1
    return flat
