"""Model inputs of a step's prefill chunks: known on the host, copied in one piece."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from pagewire.shared.engine.step import PrefillChunk
from pagewire.shared.model.inputs import ForwardBatch

_Integers = npt.NDArray[np.int64]
BlockTables = npt.NDArray[np.int64]  # [slots, blocks of a sequence], on the host


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

    The order: token ids [T], positions [T], slot mapping [T], slots [P], sequence lengths [P],
    cumulative query lengths [P + 1], then for the chunks that sample: row of the last token [N],
    slot [N], position of the new token [N].
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
        """Lay out the inputs of some chunks; `tables` has the slots' block tables."""
        num_samples = sum(chunk.samples for chunk in chunks)
        num_tokens = sum(chunk.length for chunk in chunks)
        longest = max(chunk.length for chunk in chunks)
        flat = torch.from_numpy(np.concatenate(_columns(chunks, block_size, tables)))
        return cls(flat, num_tokens, len(chunks), num_samples, longest)

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
        sample into the slot that belongs to nobody, at position 0.
        """
        tokens, rows = shape.num_tokens, shape.num_chunks
        num_tokens = sum(chunk.length for chunk in chunks)
        sizes = [tokens, tokens, tokens, rows, rows, rows + 1, rows, rows, rows]
        fills = [0, 0, -1, padding_slot, 0, num_tokens, 0, padding_slot, 0]
        padded = [
            np.pad(column, (0, size - len(column)), constant_values=fill)
            for column, size, fill in zip(
                _columns(chunks, block_size, tables), sizes, fills, strict=True
            )
        ]
        return cls(torch.from_numpy(np.concatenate(padded)), tokens, rows, rows, tokens)

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
        """Return the model's view of the chunks, block tables taken from the slots' rows."""
        tokens, chunks = self.num_tokens, self.num_chunks
        sizes = [tokens, tokens, tokens, chunks, chunks, chunks + 1]
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
        """[N] slots of the sequences that sample."""
        return self._tail(1)

    @property
    def sample_positions(self) -> torch.Tensor:
        """[N] positions that the new tokens will have."""
        return self._tail(2)


def _columns(chunks: list[PrefillChunk], block_size: int, tables: BlockTables) -> list[_Integers]:
    """Return the parts of the buffer in their order."""
    cumulative = np.cumsum([0, *(chunk.length for chunk in chunks)], dtype=np.int64)
    positions = [np.arange(chunk.start, chunk.end, dtype=np.int64) for chunk in chunks]
    slot_mapping = [
        tables[chunk.slot, position // block_size] * block_size + position % block_size
        for chunk, position in zip(chunks, positions, strict=True)
    ]
    samples = [i for i, chunk in enumerate(chunks) if chunk.samples]
    return [
        _joined([chunk.token_ids for chunk in chunks]),
        _joined(positions),
        _joined(slot_mapping),
        _integers([chunk.slot for chunk in chunks]),
        _integers([chunk.end for chunk in chunks]),
        cumulative,
        _integers([cumulative[i + 1] - 1 for i in samples]),
        _integers([chunks[i].slot for i in samples]),
        _integers([chunks[i].end for i in samples]),
    ]


def _integers(values: Sequence[int]) -> _Integers:
    return np.asarray(values, dtype=np.int64)


def _joined(parts: Sequence[Sequence[int] | _Integers]) -> _Integers:
    return np.concatenate([np.zeros(0, dtype=np.int64), *(np.asarray(p, np.int64) for p in parts)])
