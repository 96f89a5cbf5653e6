"""Tables on the device that shape the logits of device slots.

They are a pure function of a sequence's spec, prompt and output. They are made when a device slot
gets an owner, and each step that samples for it updates them. So a preempted or migrated sequence
gets the same tokens. Device slots whose spec is not shaped cost nothing here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from pagewire.kernels import Ops
from pagewire.kernels.shaping_tables import ShapingRow, ShapingTables, pack_bits
from pagewire.shared.engine.execution.device_state import DeviceState
from pagewire.shared.engine.scheduling.step import NewDeviceSlot, StepPlan

_NONE_TO_COME = -1


@dataclass(slots=True)
class ShapingState:
    """The tables of all device slots, including the padding one.

    Attributes:
        vocab_size: number of logits of a row.
        tables: see `ShapingTables`.
        known: device slots with a shaped spec -> position of the one token that may still come from
            another worker; -1 once a step on this worker has sampled for the device slot.
    """

    ops: Ops
    state: DeviceState
    vocab_size: int
    tables: ShapingTables = field(init=False)
    known: dict[int, int] = field(default_factory=dict)
    _stale: set[int] = field(default_factory=set)  # rows of owners that are gone

    def __post_init__(self) -> None:
        slots, device = self.state.num_slots + 1, self.state.device
        self.tables = ShapingTables.zeros(slots, self.vocab_size, device)

    def is_shaped(self, slots: Sequence[int]) -> bool:
        """Whether one of these device slots asks for more than a plain batch does."""
        return bool(self.known) and not self.known.keys().isdisjoint(slots)

    def apply(self, plan: StepPlan) -> None:
        """Bring the tables up to date: new owners' rows, and inputs that no step here sampled."""
        for slot in plan.freed if self.known else ():
            if self.known.pop(slot, None) is not None:
                self._stale.add(slot)
        if not (self._stale or any(new.spec.is_shaped for new in plan.new_slots)):
            self._record_tokens(plan)
            return
        rows = {new.slot: _row_of(new) for new in plan.new_slots if new.spec.is_shaped}
        rows |= {
            new.slot: ShapingRow()
            for new in plan.new_slots
            if new.slot in self._stale and new.slot not in rows
        }
        self._stale -= rows.keys()
        self._write(rows, [new for new in plan.new_slots if new.spec.is_shaped])
        self._record_tokens(plan)

    def _write(self, rows: dict[int, ShapingRow], shaped: list[NewDeviceSlot]) -> None:
        if not rows:
            return
        words = np.stack([row.words() for row in rows.values()])
        self.tables.rows.index_copy_(0, self.state.upload(list(rows)), self.state.upload(words))
        limited = [new for new in shaped if new.spec.allowed_token_ids is not None]
        if limited:
            masks = [
                pack_bits(new.spec.allowed_token_ids or (), self.vocab_size) for new in limited
            ]
            slots = self.state.upload([new.slot for new in limited])
            self.tables.allowed.index_copy_(0, slots, self.state.upload(np.stack(masks)))
        self._enter([new for new in shaped if new.spec.is_penalized])
        self.known.update({new.slot: len(new.token_ids) for new in shaped})

    def _enter(self, counted: list[NewDeviceSlot]) -> None:
        """Make the counts of new owners from their tokens."""
        if not counted:
            return
        lengths = [len(new.token_ids) for new in counted]
        columns = np.array(
            [
                [new.slot for new in counted],
                np.cumsum(lengths),
                [new.output_start for new in counted],
            ],
            np.int64,
        )
        slots, ends, starts = self.state.upload(columns)
        tokens = self.state.upload([token for new in counted for token in new.token_ids])
        self.ops.enter_tokens(self.tables, slots, ends, starts, tokens, max(lengths))

    def _record_tokens(self, plan: StepPlan) -> None:
        """Count input tokens that another worker sampled after the device slot was filled.

        The input of a skipped row is not counted again: a step here sampled and counted it.
        """
        if not self.known:
            return
        news = [put for put in plan.inputs if put.position == self.known.get(put.slot)]
        slots = [put.slot for put in plan.inputs]
        slots += [chunk.slot for chunk in plan.chunks if chunk.samples]
        self.known.update(dict.fromkeys(self.known.keys() & slots, _NONE_TO_COME))
        if news:
            columns = [[put.token, put.slot, put.position] for put in news]
            tokens, slots, positions = self.state.upload(np.array(columns, np.int64).T.copy())
            self.ops.record_tokens(self.tables, tokens, slots, positions)


def _row_of(new: NewDeviceSlot) -> ShapingRow:
    spec = new.spec
    return ShapingRow(
        output_start=new.output_start,
        stops_from=new.output_start + spec.min_tokens,
        stop_ids=new.stop_token_ids if spec.min_tokens else (),
        biases=spec.logit_bias,
        bad_words=spec.bad_words,
        is_limited=spec.allowed_token_ids is not None,
        repetition=spec.repetition_penalty,
        frequency=spec.frequency_penalty,
        presence=spec.presence_penalty,
        output=new.token_ids[new.output_start :],
    )
