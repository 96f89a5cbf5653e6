"""The decode rows that continue from step to step, so that a step need not look at each of them.

A sequence joins when its device slot will have its next input token. It leaves when it loses its
device slot or has nothing more to compute. In between it runs in every step. One counter advances
the computed tokens of the whole batch. A calendar has the steps at which a row needs attention: it
needs a block, or it ends.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from itertools import compress

from pagewire.shared.base.errors import IntegrityError
from pagewire.shared.engine.scheduling.sequence import Sequence, StepCount, device_slot_of


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Decode rows in a plan's order, as columns.

    Steps in flight share these lists, so they must not be changed. The lists in `token_ids` are the
    sequences' own lists, and grow with them.

    Attributes:
        stop_token_ids: the stop tokens of all rows together.
        constrained: the rows that follow a grammar, with their index.
    """

    sequences: list[Sequence] = field(default_factory=list)
    device_slots: list[int] = field(default_factory=list)
    request_ids: list[str] = field(default_factory=list)
    token_ids: list[list[int]] = field(default_factory=list)
    stop_token_ids: frozenset[int] = frozenset()
    constrained: list[tuple[int, Sequence]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.sequences)

    def append_tokens(
        self, tokens: list[int], individual: Set[Sequence]
    ) -> tuple[list[str], list[int]]:
        """Append a token to each row's sequence, except to individual ones.

        Args:
            tokens: one for each row.
            individual: sequences whose tokens are looked at one by one; they get none here.

        Returns:
            Request ids and tokens of the sequences that got one.

        Raises:
            IntegrityError: there are more or fewer tokens than rows.
        """
        if len(tokens) != len(self):
            raise IntegrityError(f"{len(tokens)} tokens for {len(self)} rows")
        request_ids, token_lists = self.request_ids, self.token_ids
        if individual:
            is_bulk = [sequence not in individual for sequence in self.sequences]
            request_ids = list(compress(request_ids, is_bulk))
            token_lists = list(compress(token_lists, is_bulk))
            tokens = list(compress(tokens, is_bulk))
        deque(map(list.append, token_lists, tokens), maxlen=0)  # a loop in C
        return request_ids, tokens


NO_ROWS = DecodeRows()


@dataclass(slots=True)
class DecodeBatch:
    """The sequences that run in every step, in the order in which they joined.

    At every `stride`-th step they get the blocks that they need until the next such step: many at
    once cost the host less than a few at each step.

    Attributes:
        usual_gap_s: what the gap between tokens should be at most, of requests that do not say.
    """

    block_size: int
    usual_gap_s: float = math.inf
    stride: int = field(init=False)
    _steps: StepCount = field(default_factory=StepCount)
    _members: dict[Sequence, int] = field(default_factory=dict)  # tokens at step 0, see `contexts`
    _at_start: int = 0  # the sum of these
    _stops: Counter[frozenset[int]] = field(default_factory=Counter)
    _gaps: Counter[float] = field(default_factory=Counter)
    _calendar: dict[int, dict[Sequence, None]] = field(default_factory=dict)
    _rows: DecodeRows | None = None  # None after a change

    def __post_init__(self) -> None:
        self.stride = max(1, self.block_size // 4)

    def __len__(self) -> int:
        return len(self._members)

    @property
    def contexts(self) -> int:
        """How many tokens the members together attend to in the next step, themselves included.

        Each attends to one token more in each step. So what each would have had at step 0 says it
        for all steps.
        """
        return self._at_start + len(self._members) * (self._steps.number + 1)

    @property
    def gap_s(self) -> float:
        """The smallest gap between tokens that a member's request asks for."""
        return min(self._gaps, default=math.inf)

    @property
    def num_ahead(self) -> int:
        """How many steps are to run with the blocks that are given out now."""
        return self.stride - self._steps.number % self.stride

    @property
    def rows(self) -> DecodeRows:
        """The present members; the same object until one joins or leaves."""
        if self._rows is None:
            sequences = list(self._members)
            self._rows = DecodeRows(
                sequences,
                [device_slot_of(sequence) for sequence in sequences],
                [sequence.request_id for sequence in sequences],
                [sequence.token_ids for sequence in sequences],
                frozenset().union(*self._stops),
                [row for row in enumerate(sequences) if row[1].spec.grammar is not None],
            )
        return self._rows

    def join(self, sequence: Sequence) -> None:
        """Take a sequence into all steps from the next one on."""
        at_start = sequence.num_computed_tokens - self._steps.number
        self._at_start += at_start - self._members.get(sequence, 0)
        self._members[sequence] = at_start
        self._stops[sequence.stop_token_ids] += 1
        self._gaps[sequence.spec.slo_gap_s or self.usual_gap_s] += 1
        self._rows = None
        sequence.follow(self._steps)

    def leave(self, sequence: Sequence) -> None:
        """Take a sequence out, unless it is not in."""
        if sequence not in self._members:
            return
        self._at_start -= self._members.pop(sequence)
        self._stops[sequence.stop_token_ids] -= 1
        if not self._stops[sequence.stop_token_ids]:
            del self._stops[sequence.stop_token_ids]
        gap_s = sequence.spec.slo_gap_s or self.usual_gap_s
        self._gaps[gap_s] -= 1
        if not self._gaps[gap_s]:
            del self._gaps[gap_s]
        self._rows = None
        sequence.follow(None)

    def due(self) -> list[Sequence]:
        """Members that need attention before the next step."""
        marked = self._calendar.get(self._steps.number, ())
        return [sequence for sequence in marked if sequence in self._members]

    def mark(self, sequences: Iterable[Sequence]) -> None:
        """Note when these members are due: before they lack a block, and before their last step.

        Earlier marks stay: a member that is due too early is marked again.
        """
        members, calendar, now = self._members, self._calendar, self._steps.number
        block_size, stride = self.block_size, self.stride
        for sequence in sequences:
            if sequence in members:
                number = sequence.step_of(len(sequence.tables[-1]) * block_size)
                number -= number % stride
                last = sequence.step_of(sequence.run_until - 1)
                if number > last:
                    number = last
                calendar.setdefault(number if number > now else now, {})[sequence] = None

    def advance(self) -> None:
        """Count a token of each member as computed: the step has been decided."""
        self._calendar.pop(self._steps.number, None)
        self._steps.number += 1
