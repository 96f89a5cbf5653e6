"""Model inputs of a step's prefill chunks: known on the host, sent in one copy."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from pagewire.shared.engine.step import PrefillChunk
from pagewire.shared.model.inputs import ForwardBatch

_Integers = npt.NDArray[np.int64]
BlockTables = npt.NDArray[np.int64]  # [device slots, blocks of a sequence], on the host


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

    The order: token ids [T], positions [T], KV slots [T], device slots [P], sequence lengths [P],
    cumulative query lengths [P + 1], then for the chunks that sample: row of the last token [N],
    device slot [N], position of the new token [N].
    """

    buffer: torch.Tensor
    num_tokens: int
    num_chunks: int
    num_samples: int
    max_query_len: int

    @classmethod
    def build(
        cls, chunks: list[PrefillChunk], block_size: int, tables: BlockTables
    ) -> PrefillInputs:
        """Lay out the inputs of some chunks; `tables` has the device slots' block tables."""
        num_samples = sum(chunk.samples for chunk in chunks)
        num_tokens = sum(chunk.length for chunk in chunks)
        longest = max(chunk.length for chunk in chunks)
        sizes = _sizes(num_tokens, len(chunks), num_samples)
        flat = _lay_out(chunks, block_size, tables, sizes, padding_slot=0)
        return cls(torch.from_numpy(flat), num_tokens, len(chunks), num_samples, longest)

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
        tokens, rows = shape.num_tokens, shape.num_chunks
        flat = _lay_out(chunks, block_size, tables, _sizes(tokens, rows, rows), padding_slot)
        return cls(torch.from_numpy(flat), tokens, rows, rows, tokens)

    def to(self, device: torch.device) -> PrefillInputs:
        """Copy to the device without waiting."""
        buffer = self.buffer.pin_memory() if device.type == "cuda" else self.buffer
        return PrefillInputs(
            buffer.to(device, non_blocking=True),
            self.num_tokens,
            self.num_chunks,
            self.num_samples,
            self.max_query_len,
        )

    def forward_batch(self, block_tables: torch.Tensor) -> ForwardBatch:
        """Return the model's view of the chunks, with their device slots' block tables."""
        sizes = _sizes(self.num_tokens, self.num_chunks, self.num_samples)[:6]
        head = self.buffer[: sum(sizes)].split(sizes)
        return ForwardBatch(
            input_ids=head[0],
            positions=head[1],
            slot_mapping=head[2],
            num_decodes=0,
            decode_block_tables=None,
            decode_seq_lens=None,
            prefill_block_tables=block_tables[head[3]],
            prefill_cu_query_lens=head[5].to(torch.int32),
            prefill_seq_lens=head[4].to(torch.int32),
            max_query_len=self.max_query_len,
        )

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


def _sizes(num_tokens: int, num_chunks: int, num_samples: int) -> list[int]:
    """Return the sizes of the buffer's parts in their order."""
    tokens, chunks, samples = [num_tokens] * 3, [num_chunks] * 2, [num_samples] * 3
    return [*tokens, *chunks, num_chunks + 1, *samples]


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
    end = num_samples = 0
    for i, chunk in enumerate(chunks):
        start, end = end, end + chunk.length
        position = np.arange(chunk.start, chunk.end)
        ids[start:end] = chunk.token_ids
        positions[start:end] = position
        blocks = tables[chunk.slot][position // block_size]
        mapping[start:end] = blocks * block_size + position % block_size
        slots[i], lengths[i] = chunk.slot, chunk.end
        cumulative[i + 1 :] = end
        if chunk.samples:
            rows[num_samples], sample_slots[num_samples] = end - 1, chunk.slot
            sampled[num_samples] = chunk.end
            num_samples += 1
    return flat
