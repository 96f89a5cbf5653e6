"""Model inputs of a step's prefill chunks: known on the host, sent in one copy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from pagewire.shared.engine.scheduling.step import PrefillChunk
from pagewire.shared.model.inputs import ForwardBatch

_Integers = npt.NDArray[np.int64]
BlockTables = npt.NDArray[np.int64]  # [device slots, G, blocks of a sequence], on the host


@dataclass(frozen=True, slots=True)
class PrefillShape:
    """What prefill inputs are padded to, so that one CUDA graph serves many steps.

    Attributes:
        num_tokens: T, of all chunks together.
        num_chunks: P; as many may sample.
    """

    num_tokens: int
    num_chunks: int


@dataclass(frozen=True, slots=True)
class PrefillInputs:
    """All of a step's prefill inputs in one int64 buffer, and where each part lies.

    The order: token ids [T], positions [T], KV slots [G, T] of the cache groups, device slots [P],
    sequence lengths [P], cumulative query lengths [P + 1], then for the chunks that sample: row of
    the last token [N], device slot [N], position of the new token [N].
    """

    buffer: torch.Tensor
    num_tokens: int
    num_chunks: int
    num_samples: int
    max_query_len: int
    num_groups: int

    @classmethod
    def build(
        cls, chunks: list[PrefillChunk], block_size: int, tables: BlockTables
    ) -> PrefillInputs:
        """Lay out the inputs of some chunks; `tables` has the device slots' block tables."""
        num_samples = sum(chunk.samples for chunk in chunks)
        num_tokens = sum(chunk.length for chunk in chunks)
        longest = max(chunk.length for chunk in chunks)
        groups = tables.shape[1]
        sizes = _sizes(num_tokens, len(chunks), num_samples, groups)
        flat = torch.from_numpy(_lay_out(chunks, block_size, tables, sizes, padding_slot=0))
        return cls(flat, num_tokens, len(chunks), num_samples, longest, groups)

    @classmethod
    def build_padded(
        cls,
        chunks: list[PrefillChunk],
        block_size: int,
        tables: BlockTables,
        shape: PrefillShape,
        padding_slot: int,
    ) -> PrefillInputs:
        """Lay out the inputs of some chunks, or of none, in a shape that is large enough.

        Padding tokens are written nowhere and belong to no chunk; padding chunks are empty and
        sample into the device slot that belongs to nobody, at position 0.
        """
        tokens, rows, groups = shape.num_tokens, shape.num_chunks, tables.shape[1]
        sizes = _sizes(tokens, rows, rows, groups)
        flat = torch.from_numpy(_lay_out(chunks, block_size, tables, sizes, padding_slot))
        return cls(flat, tokens, rows, rows, tokens, groups)

    def to(self, device: torch.device) -> PrefillInputs:
        """Copy to the device without waiting."""
        buffer = self.buffer.pin_memory() if device.type == "cuda" else self.buffer
        return replace(self, buffer=buffer.to(device, non_blocking=True))

    def forward_batch(self, block_tables: torch.Tensor) -> ForwardBatch:
        """Return the model's view of the chunks, with their device slots' block tables.

        Args:
            block_tables: [S, G, max_blocks], of all device slots.
        """
        sizes = self._sizes()[:6]
        ids, positions, mapping, slots, lengths, cumulative = self.buffer[: sum(sizes)].split(sizes)
        tables = block_tables[slots]
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
            )
            for group in range(self.num_groups)
        )

    def _sizes(self) -> list[int]:
        return _sizes(self.num_tokens, self.num_chunks, self.num_samples, self.num_groups)

    def _tail(self, part: int) -> torch.Tensor:
        end = self.buffer.shape[0] - (2 - part) * self.num_samples
        return self.buffer[end - self.num_samples : end]

    @property
    def rows(self) -> torch.Tensor:
        """[N] rows whose hidden states are sampled from."""
        return self._tail(0)

    @property
    def sample_slots(self) -> torch.Tensor:
        """[N] device slots of the sequences that sample."""
        return self._tail(1)

    @property
    def sample_positions(self) -> torch.Tensor:
        """[N] positions that the new tokens will have."""
        return self._tail(2)


def _sizes(num_tokens: int, num_chunks: int, num_samples: int, num_groups: int) -> list[int]:
    """Return the sizes of the buffer's parts in their order."""
    tokens = [num_tokens, num_tokens, num_groups * num_tokens]
    return [*tokens, *[num_chunks] * 2, num_chunks + 1, *[num_samples] * 3]


def _lay_out(
    chunks: list[PrefillChunk],
    block_size: int,
    tables: BlockTables,
    sizes: list[int],
    padding_slot: int,
) -> _Integers:
    """Return the buffer; what the chunks do not fill of its parts is padding."""
    flat = np.zeros(sum(sizes), np.int64)
    parts = [flat[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]
    ids, positions, mapping, slots, lengths, cumulative, rows, sample_slots, sampled = parts
    mapping[:], slots[:], sample_slots[:] = -1, padding_slot, padding_slot
    mapping = mapping.reshape(tables.shape[1], -1)
    end = num_samples = 0
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
            rows[num_samples], sample_slots[num_samples] = end - 1, chunk.slot
            sampled[num_samples] = chunk.end
            num_samples += 1
    return flat
