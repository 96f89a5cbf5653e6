"""Model inputs of a step's prefill chunks: known on the host, copied in one piece."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from pagewire.shared.engine.scheduler import ScheduledTokens
from pagewire.shared.model.inputs import ForwardBatch


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
    def build(cls, chunks: list[ScheduledTokens], block_size: int) -> PrefillInputs:
        """Lay out the inputs of some chunks."""
        lengths = np.array([chunk.length for chunk in chunks], dtype=np.int64)
        cumulative = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])
        positions = [np.arange(chunk.start, chunk.end, dtype=np.int64) for chunk in chunks]
        slot_mapping = [
            np.asarray(chunk.sequence.block_ids, dtype=np.int64)[position // block_size]
            * block_size
            + position % block_size
            for chunk, position in zip(chunks, positions, strict=True)
        ]
        samples = [i for i, chunk in enumerate(chunks) if chunk.samples]
        parts = [
            *(chunk.sequence.token_ids[chunk.start : chunk.end] for chunk in chunks),
            *positions,
            *slot_mapping,
            [chunk.sequence.slot for chunk in chunks],
            [chunk.end for chunk in chunks],
            cumulative,
            [cumulative[i + 1] - 1 for i in samples],
            [chunks[i].sequence.slot for i in samples],
            [chunks[i].end for i in samples],
        ]
        flat = np.concatenate([np.asarray(part, dtype=np.int64) for part in parts])
        return cls(
            torch.from_numpy(flat), int(cumulative[-1]), len(chunks), len(samples), max(lengths)
        )

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
            max_query_len=int(self.max_query_len),
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
