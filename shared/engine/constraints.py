"""Masks for the rows of a step that follow a grammar, and what happens if a mask is late.

This module also checks rows whose limits, such as allowed tokens and bad words, may leave no token
to sample.

    step n + 1 launched --> tokens of step n read --> masks filled in threads --> masks for n + 1
    |<------------ the forward of step n + 1 runs on the device ------------->|

A row whose mask is late is skipped: it samples nothing in this step, and runs again at the same
position in the next one. The other rows wait for it for a bounded time (`MASK_WAIT_S`). A row that
has no allowed token fails; the other rows do not.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from pagewire.shared.base.errors import InvalidRequestError
from pagewire.shared.engine.launched import Launched
from pagewire.shared.engine.limits import NOTHING_LEFT, is_permitted, may_run_out
from pagewire.shared.engine.scheduling.sequence import Sequence
from pagewire.shared.grammar import compiler
from pagewire.shared.grammar.masks import Follower, MaskFiller, Row

# The shortest and the longest wait for a step's masks. The longest also applies where no row could
# sample without the late ones.
MASK_WAIT_S = (0.002, 0.05)
OF_A_STEP = 0.75  # of the time that a step usually takes: between the two, the wait
OF_A_CALL = 2.0  # of the time that the call for the missing masks usually takes: likewise


@dataclass(slots=True)
class Masked:
    """The masks for a step's sampling.

    Attributes:
        masks: index in the step's tokens -> the tokens that are allowed there.
        skipped: rows whose mask is late, by the same index.
        failed: sequences that cannot continue because of their grammars, and why.
        too_late: sequences that fail because the machine had no time for their masks, and why.
    """

    masks: dict[int, bytes] = field(default_factory=dict)
    skipped: dict[int, Sequence] = field(default_factory=dict)
    failed: list[tuple[Sequence, str]] = field(default_factory=list)
    too_late: list[tuple[Sequence, str]] = field(default_factory=list)


@dataclass(slots=True)
class Constraints:
    """The grammars of an engine's sequences.

    Attributes:
        filler: None where grammars cannot be followed.
        mask_wait_s: the shortest and the longest wait for a step's masks, in seconds.
        limited: sequences whose tokens are checked once they are sampled, and their
            `allowed_token_ids`: they may have had no token to sample.
    """

    filler: MaskFiller | None = None
    mask_wait_s: tuple[float, float] = MASK_WAIT_S
    clock: Callable[[], float] = time.monotonic
    limited: dict[Sequence, frozenset[int] | None] = field(default_factory=dict)
    _followers: dict[Sequence, Follower] = field(default_factory=dict)
    _due_s: float | None = None  # when masks are late, for the step that waits for them

    @property
    def is_active(self) -> bool:
        """Whether any sequence follows a grammar."""
        return bool(self._followers)

    def check(self, sequence: Sequence) -> None:
        """Check that a sequence's grammar, if it has one, can be followed here.

        Raises:
            InvalidRequestError: it cannot.
        """
        if sequence.spec.grammar is not None and self.filler is None:
            raise InvalidRequestError("structured output is not possible in this engine", "grammar")

    def check_text(self, text: str, field: str) -> None:
        """Check that a grammar can be followed, and wait for that.

        Raises:
            InvalidRequestError: it cannot; names the request's field.
        """
        if self.filler is not None:
            self.filler.check(text, field)

    def open(self, sequence: Sequence) -> None:
        """Begin to follow a sequence's grammar, and to check its limits, if it has them."""
        if may_run_out(sequence.spec):
            allowed = sequence.spec.allowed_token_ids
            self.limited[sequence] = None if allowed is None else frozenset(allowed)
        if sequence.spec.grammar is not None and self.filler is not None:
            output = sequence.token_ids[sequence.output_start :]
            self._followers[sequence] = self.filler.open(sequence.spec.grammar, output)

    def close(self, sequence: Sequence) -> None:
        """Stop following a sequence's grammar and checking its limits, if it has them."""
        self.limited.pop(sequence, None)
        if (follower := self._followers.pop(sequence, None)) is not None:
            follower.closed.set()

    def problem_of(self, sequence: Sequence, token: int) -> tuple[str, str] | None:
        """Return why a sequence cannot continue with a sampled token, and the request's field.

        A token that is not permitted is sampled only if no token is permitted.
        """
        if sequence not in self.limited:
            return None
        follower = self._followers.get(sequence)
        permitted = is_permitted(sequence, self.limited[sequence], token)
        if follower is None:
            return None if permitted else (NOTHING_LEFT, "allowed_token_ids")
        num_output = len(sequence.token_ids) - sequence.output_start
        if permitted and follower.mask is not None and follower.position == num_output:
            permitted = bool(follower.mask[token // 8] >> token % 8 & 1)
        return None if permitted else (compiler.cannot_follow(compiler.NOTHING_LEFT), "grammar")

    def is_due(self) -> bool:
        """Whether a step that waits for masks should be looked at; cheap."""
        filler = self.filler
        if filler is None or self._due_s is None:
            return filler is not None
        return filler.news.is_set() or self.clock() > self._due_s

    def fill(self, launched: Launched, wait: bool, usual_step_s: float) -> Masked | None:
        """Return the masks for a step's sampling, or None if it should wait for more of them.

        Args:
            launched: the step; the tokens of all steps before it are known.
            wait: block until all masks are filled or late, instead of returning None.
            usual_step_s: how long a step usually takes.
        """
        filler = self.filler
        rows = self._rows_of(launched)
        if filler is None or not rows:
            self._due_s = None  # those that were waited for may have been aborted
            return Masked()
        pairs = [row for _, _, row in rows]
        if self._due_s is None:
            missing = filler.begin(pairs)
            usual_s = max(OF_A_STEP * usual_step_s, OF_A_CALL * filler.usual_s(len(missing)))
            self._due_s = self._deadline(launched, len(missing), usual_s)
        while True:
            filler.news.clear()
            missing = filler.begin(pairs)
            left_s = self._due_s - self.clock()
            if not missing or left_s <= 0:
                break
            if not wait:
                return None
            filler.news.wait(left_s)
        self._due_s = None
        filler.give_up(missing)
        return _masked(rows)

    def _deadline(self, launched: Launched, missing: int, usual_s: float) -> float:
        """Return until when to wait for masks, given what is usually long enough."""
        shortest, longest = self.mask_wait_s
        wait_s = min(max(shortest, usual_s), longest)
        if missing >= len(launched.schedule.sampled):
            wait_s = longest
        return self.clock() + wait_s

    def _rows_of(self, launched: Launched) -> list[tuple[int, Sequence, Row]]:
        """Return the rows that follow a grammar and are still wanted."""
        schedule, followers = launched.schedule, self._followers
        sampling = [chunk.sequence for chunk in schedule.chunks if chunk.samples]
        found = [*schedule.rows.constrained]
        found += [
            (index, sequence)
            for index, sequence in enumerate(sampling, start=len(schedule.rows))
            if sequence.spec.grammar is not None
        ]
        return [
            (index, s, Row(followers[s], s.token_ids, s.output_start))
            for index, s in found
            if s in followers and s not in launched.lost
        ]


def _masked(rows: list[tuple[int, Sequence, Row]]) -> Masked:
    """Sort rows into those with a mask, those with a late mask, and those that fail."""
    masked = Masked()
    for index, sequence, row in rows:
        follower = row.follower
        if follower.problem is not None:
            failed = masked.too_late if follower.is_late else masked.failed
            failed.append((sequence, follower.problem))
        elif row.is_ready and follower.mask is not None:
            masked.masks[index] = follower.mask
        else:
            masked.skipped[index] = sequence
    return masked
