"""Lets one suspect run at a time, in turn with other prompts, until it has proved harmless.

A suspect is a sequence with `strikes`. At most one is admitted at a time, and its chunks run in
steps without others', so that it is known whether it is to blame if such a step fails. After each
of these steps it is the others' turn, so that no prompt waits for all chunks of a suspect.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pagewire.shared.control.protocol import CLEARING_TOKENS
from pagewire.shared.engine.scheduling.sequence import Sequence


@dataclass(slots=True)
class Suspects:
    """Decides which suspected sequence may run.

    Attributes:
        must_wait: the last step with chunks had a suspect's: it is the others' turn.
    """

    must_wait: bool = False
    _admitted: Sequence | None = None
    _cleared_at: int = 0  # how many of its tokens must be computed until it is none any more

    def admit(self, sequence: Sequence) -> None:
        """Note that a suspect is admitted; does nothing for another sequence."""
        if sequence.strikes:
            self._admitted = sequence
            self._cleared_at = len(sequence.token_ids) + CLEARING_TOKENS

    def update(self) -> None:
        """Make room for the next suspect if the present one has ended, or has proved harmless."""
        if (suspect := self._admitted) is None:
            return
        if suspect.num_computed_tokens >= self._cleared_at:
            suspect.strikes = 0
        if not suspect.strikes or suspect.device_slot is None:
            self._admitted = None

    def first_of(self, waiting: Iterable[Sequence]) -> Sequence | None:
        """Return the first of the queue; while a suspect is admitted, the first that is none."""
        is_taken = self._admitted is not None
        return next((each for each in waiting if not (is_taken and each.strikes)), None)
