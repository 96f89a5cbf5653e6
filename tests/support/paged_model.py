"""Runs a model over a paged pool the way an engine does, to compare it with a plain forward."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch

from pagewire.shared.model.inputs import ForwardBatch, LayerKv
from pagewire.shared.model.layers.decoder import DecoderModel

GARBAGE = 1e4  # content of unwritten KV slots, which nothing may read


@dataclass
class PagedSequence:
    """A token sequence with scattered blocks, of which the first `done` tokens have been run."""

    token_ids: list[int]
    block_ids: list[int]
    done: int = 0
    logits: list[torch.Tensor] = field(default_factory=list)  # [vocab] each

    @property
    def remaining(self) -> int:
        return len(self.token_ids) - self.done


# A sequence and a position in it; None is a padding row.
Token = tuple[PagedSequence | None, int]


class PagedModel:
    """A model, a pool full of garbage, and sequences whose blocks lie in random order."""

    def __init__(self, model: DecoderModel, *, num_blocks: int, block_size: int, seed: int) -> None:
        config = model.config
        device, dtype = model.embed_tokens.device, model.embed_tokens.dtype
        token = config.cached_token
        layers = (num_blocks, config.num_layers)
        shape = (*layers, token.components, token.heads, block_size, token.size)
        self.model = model
        self.pool = torch.full(shape, GARBAGE, dtype=dtype, device=device)
        self.layers = [LayerKv(0, cache) for cache in self.pool.unbind(1)]
        self.block_size = block_size
        self.device = device
        self._random = random.Random(seed)
        self._free = self._random.sample(range(num_blocks), num_blocks)

    def add(self, token_ids: list[int]) -> PagedSequence:
        blocks = -(-len(token_ids) // self.block_size)
        return PagedSequence(token_ids, [self._free.pop() for _ in range(blocks)])

    def step(
        self,
        decodes: list[PagedSequence],
        prefills: list[tuple[PagedSequence, int]],
        padding_rows: int = 0,
    ) -> None:
        """Run one token of each of `decodes` and a chunk of each of `prefills`, in one batch."""
        batch = self.batch(decodes, prefills, padding_rows)
        logits = self.model.compute_logits(self.model.forward(batch, self.layers))
        tokens = self._tokens(decodes, prefills, padding_rows)
        for (sequence, _), row in zip(tokens, logits, strict=True):
            if sequence is not None:
                sequence.logits.append(row)
                sequence.done += 1

    def run(self, sequences: list[PagedSequence], chunk: int) -> None:
        """Run sequences to their ends, one after another, in chunks of this many tokens."""
        for sequence in sequences:
            while sequence.remaining:
                self.step([], [(sequence, min(chunk, sequence.remaining))])

    def run_mixed(self, sequences: list[PagedSequence], max_chunk: int) -> None:
        """Run sequences together, in random mixtures of decode rows and chunks."""
        while any(sequence.remaining for sequence in sequences):
            decodes: list[PagedSequence] = []
            prefills: list[tuple[PagedSequence, int]] = []
            for sequence in sequences:
                choice = self._random.choice(["decode", "prefill", "wait"])
                if not sequence.remaining or choice == "wait":
                    continue
                if choice == "decode" and sequence.done:
                    decodes.append(sequence)
                else:
                    length = self._random.randint(1, max_chunk)
                    prefills.append((sequence, min(length, sequence.remaining)))
            if decodes or prefills:
                padding = self._random.randint(0, 2) if decodes else 0
                self.step(decodes, prefills, padding)

    def batch(
        self,
        decodes: list[PagedSequence],
        prefills: list[tuple[PagedSequence, int]],
        padding_rows: int = 0,
    ) -> ForwardBatch:
        """Return the inputs of a step, see `step`."""
        tokens = self._tokens(decodes, prefills, padding_rows)
        lengths = [length for _, length in prefills]
        cumulative = torch.tensor([len(decodes), *lengths]).cumsum(0)
        # With chunks, padding rows have places of chunks' tokens.
        seen = [s.done + 1 for s in decodes] + [-1 if prefills else 0] * padding_rows
        has_decodes, has_prefills = bool(seen), bool(prefills)
        return ForwardBatch(
            input_ids=self._tensor([s.token_ids[p] if s else 0 for s, p in tokens]),
            positions=self._tensor([p for _, p in tokens]),
            slot_mapping=self._tensor([self._slot(s, p) for s, p in tokens]),
            num_decodes=len(seen),
            decode_block_tables=self._tables([*decodes, *[None] * padding_rows], has_decodes),
            decode_seq_lens=self._int32(seen) if has_decodes else None,
            prefill_block_tables=self._tables([s for s, _ in prefills], has_prefills),
            prefill_cu_query_lens=self._int32(cumulative.tolist()) if has_prefills else None,
            prefill_seq_lens=self._int32([s.done + n for s, n in prefills])
            if has_prefills
            else None,
            max_query_len=max(lengths, default=0),
            # The host does not know the chunks of a step that a CUDA graph replays.
            chunks=self._random.choice([None, tuple((n, s.done + n) for s, n in prefills)]),
        )

    def _tokens(
        self,
        decodes: list[PagedSequence],
        prefills: list[tuple[PagedSequence, int]],
        padding_rows: int,
    ) -> list[Token]:
        parts = [*((sequence, 1) for sequence in decodes), *prefills]
        tokens: list[Token] = [
            (sequence, position)
            for sequence, length in parts
            for position in range(sequence.done, sequence.done + length)
        ]
        # Places of padding rows are tokens of chunks, or padding tokens after them.
        return tokens + [(None, 0)] * (len(decodes) + padding_rows - len(tokens))

    def _slot(self, sequence: PagedSequence | None, position: int) -> int:
        if sequence is None:
            return -1
        block = sequence.block_ids[position // self.block_size]
        return block * self.block_size + position % self.block_size

    def _tables(self, rows: list[PagedSequence | None], present: bool) -> torch.Tensor | None:
        """Return block tables whose unused entries are random blocks; None without rows."""
        if not present:
            return None
        width = max(len(row.block_ids) if row else 0 for row in rows) + 2
        table = torch.randint(self.pool.shape[0], (len(rows), width), dtype=torch.int32)
        for index, row in enumerate(rows):
            if row is not None:
                table[index, : len(row.block_ids)] = torch.tensor(row.block_ids)
        return table.to(self.device)

    def _tensor(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def _int32(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)
