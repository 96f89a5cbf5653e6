"""Sampling, the second half of a step: turns the logits that the forward left into tokens.

Sampling is launched right after the forward, or waits for masks (`StepPlan`). It has two
variants: plain, for temperature, min_p, top_k and top_p, and shaped, for batches with a mask or
with a device slot that asks for more. The variant is chosen for the whole batch; a row that asks
for nothing more gets the same token in both.

With CUDA graphs, the two halves share static rows, one for each row of a step that may sample: its
decode rows, then the prefill chunks that sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from pagewire.kernels import Ops
from pagewire.shared.engine.execution.device_state import DeviceState
from pagewire.shared.engine.execution.shaping_state import ShapingState
from pagewire.shared.engine.scheduling.step import StepPlan

_UNMASKED, _SKIPPED = -1, -2  # in place of a mask


class Forwarded(NamedTuple):
    """The output of a forward, for sampling; with CUDA graphs, the next forward overwrites it.

    Attributes:
        logits: [N, vocab] of the rows that sample.
        slots: [N] int64, their device slots.
        positions: [N] int64, which the new tokens will have.
    """

    logits: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor

    def first(self, count: int) -> Forwarded:
        """Return the first `count` rows of each tensor."""
        return Forwarded(*(each[:count] for each in self))


class StaticRows(Forwarded):
    """Memory in which every forward leaves its output, for the CUDA graphs of sampling.

    It has as many rows as sequences run at once.
    """

    @classmethod
    def allocate(cls, logits: torch.Tensor, rows: int, padding_slot: int) -> StaticRows:
        """Allocate padding rows; `logits` has the dtype, the device and the vocabulary."""
        slots = torch.full((rows,), padding_slot, dtype=torch.int64, device=logits.device)
        static = logits.new_zeros((rows, logits.shape[1]))
        return cls(static, slots, torch.zeros_like(slots))

    def copy_rows(self, forwarded: Forwarded) -> Forwarded:
        """Copy a forward's rows, except for logits, which it has written here itself."""
        own = self.first(len(forwarded.slots))
        own.slots.copy_(forwarded.slots)
        own.positions.copy_(forwarded.positions)
        return own


class Sampled(NamedTuple):
    """What a step sampled; if a graph made it, its next replay overwrites it.

    Attributes:
        tokens: [N] int64.
        logits: [N, vocab] as they were before any mask; the next step may overwrite them.
    """

    tokens: torch.Tensor
    logits: torch.Tensor

    def first(self, count: int) -> Sampled:
        """Return the first `count` rows of each tensor."""
        return Sampled(self.tokens[:count], self.logits[:count])


@dataclass(slots=True)
class SamplingStage:
    """Samples rows of logits, plain or shaped, and leaves the tokens in the device slots.

    Attributes:
        vocab_size: number of logits of a row.
        shaping: the shaping tables of the device slots.
    """

    ops: Ops
    state: DeviceState
    vocab_size: int
    shaping: ShapingState = field(init=False)
    _shaped: torch.Tensor = field(init=False)  # [static rows, vocab] float32
    _masks: torch.Tensor = field(init=False)  # [static rows, ceil(vocab / 32)] int32
    _mask_of_row: torch.Tensor = field(init=False)  # [static rows] int64: a _masks row, or above
    _has_masks: bool = False

    def __post_init__(self) -> None:
        rows, device = self.num_rows, self.state.device
        self.shaping = ShapingState(self.ops, self.state, self.vocab_size)
        self._shaped = torch.empty((rows, self.vocab_size), dtype=torch.float32, device=device)
        words = -(-self.vocab_size // 32)
        self._masks = torch.zeros((rows, words), dtype=torch.int32, device=device)
        self._mask_of_row = torch.full((rows,), _UNMASKED, dtype=torch.int64, device=device)

    @property
    def num_rows(self) -> int:
        """Static rows: each sequence samples at most once in a step."""
        return self.state.num_slots

    def apply(self, plan: StepPlan) -> None:
        """Begin a step, without masks so far; store what the device slots' new owners ask for."""
        self.shaping.apply(plan)
        if self._has_masks:
            self._mask_of_row.fill_(_UNMASKED)
            self._has_masks = False

    def is_shaped(self, slots: list[int]) -> bool:
        """Whether a batch of these device slots takes the shaped variant."""
        return self._has_masks or self.shaping.is_shaped(slots)

    def drawn_from(self, sampled: Sampled, shaped: bool) -> torch.Tensor:
        """Return the logits `[N, vocab]` from which rows have just been drawn.

        They are overwritten by the next step's sampling.
        """
        return self._shaped[: len(sampled.tokens)] if shaped else sampled.logits

    def set_masks(self, masks: dict[int, bytes], skipped: Sequence[int] = ()) -> None:
        """Upload the tokens that rows may sample: one bit per token, lowest first, in whole bytes.

        Rows without a mask may sample any token; `skipped` rows sample nothing. This does not wait:
        masks and rows are put into pinned memory, and one copy uploads all of them.
        """
        if not masks and not skipped:
            return
        words = self._masks.shape[1]
        packed = self._on_host(len(masks) * words, torch.int32)
        with packed.numpy().view(np.uint8).data as view:  # each mask is copied once
            for row, mask in enumerate(masks.values()):
                view[row * words * 4 : row * words * 4 + len(mask)] = mask
        rows = self._on_host(self.num_rows, torch.int64)
        mask_of_row = rows.numpy()
        mask_of_row.fill(_UNMASKED)
        mask_of_row[list(masks)] = np.arange(len(masks))
        mask_of_row[list(skipped)] = _SKIPPED
        self._masks[: len(masks)].copy_(packed.view(len(masks), words), non_blocking=True)
        self._mask_of_row.copy_(rows, non_blocking=True)
        self._has_masks = True

    def _on_host(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, pin_memory=self.state.device.type == "cuda")

    def sample(self, rows: Forwarded, shaped: bool) -> Sampled:
        """Sample a token for each row, and write it into the row's device slot.

        Everything is read from and written to the device, so that this can be captured.

        Args:
            rows: the output of a forward.
            shaped: whether to use the shaped variant.
        """
        logits, slots, positions = rows
        if not len(slots):
            # On the device even without rows: a step's end is seen by its tokens.
            return Sampled(slots, logits)
        state = self.state
        tables, count = self.shaping.tables, len(slots)
        if shaped:
            mask_of_row = self._mask_of_row[:count]
            # The token of a skipped row goes to the padding device slot, which stays at position 0.
            is_held = mask_of_row == _SKIPPED
            slots = torch.where(is_held, state.padding_slot, slots)
            positions = torch.where(is_held, 0, positions)
            out = self._shaped[:count]
            logits = self.ops.shape_logits(
                logits, slots, positions, tables, self._masks, mask_of_row, out
            )
        tokens = self.ops.sample(logits, positions=positions, **state.sampling(slots))
        if shaped:
            self.ops.record_tokens(tables, tokens, slots, positions)
        state.last_token.index_copy_(0, slots, tokens)
        state.position.index_copy_(0, slots, positions)
        return Sampled(tokens, rows.logits)
