"""How many times as long as predicted a worker takes: a router learns it from first tokens.

Workers learn the prices of their steps themselves. But these may be wrong, or leave something out
that takes time, and two workers' prices that err in opposite directions send prompts to the wrong
one of them.
"""

from __future__ import annotations

from dataclasses import dataclass

FADE = 0.97  # by which earlier prompts count less with each further one
PRIOR_S = 1.0  # before any prompt: as if this had been predicted rightly
LARGEST_ERROR = 4.0  # beyond this factor, something else than computing took the time


@dataclass(slots=True)
class Pace:
    """How many times as long as predicted one worker takes, the latest prompts most of all."""

    _expected_s: float = PRIOR_S
    _seconds: float = PRIOR_S

    @property
    def factor(self) -> float:
        """The time that prompts took, relative to what was predicted."""
        return self._seconds / self._expected_s

    def observe(self, expected_s: float, seconds: float) -> None:
        """Learn from a prompt: how long it was predicted to take, and how long it took."""
        seconds = max(expected_s / LARGEST_ERROR, min(expected_s * LARGEST_ERROR, seconds))
        self._expected_s = FADE * self._expected_s + expected_s
        self._seconds = FADE * self._seconds + seconds
