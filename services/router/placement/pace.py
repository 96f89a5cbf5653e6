"""Learns from first tokens how many times as long as predicted a worker takes.

Workers learn the prices of their steps themselves. But these may be wrong, or leave something out
that takes time, and two workers' prices that err in opposite directions send prompts to the wrong
one of them. A worker that seems slow may get no prompts that would show otherwise, so what was
learnt fades with time, too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

FADE = 0.97  # by which earlier prompts count less with each further one
PRIOR_S = 1.0  # before any prompt: as if this had been predicted rightly
FADE_S = 60.0  # after which what was learnt counts 1/e as much
LARGEST_ERROR = 4.0  # beyond this factor, something else than computing took the time


@dataclass(slots=True)
class Pace:
    """How many times as long as predicted one worker takes, the latest prompts most of all.

    Times of one clock, in seconds, are passed in as `now`.
    """

    _expected_s: float = PRIOR_S
    _seconds: float = PRIOR_S
    _observed_at: float = 0.0

    def factor(self, now: float) -> float:
        """Return the time that prompts took, relative to what was predicted."""
        expected_s, seconds = self._faded(now)
        return seconds / expected_s

    def observe(self, expected_s: float, seconds: float, now: float) -> None:
        """Learn from a prompt: how long it was predicted to take, and how long it took."""
        seconds = max(expected_s / LARGEST_ERROR, min(expected_s * LARGEST_ERROR, seconds))
        before_expected_s, before_s = self._faded(now)
        self._expected_s = FADE * before_expected_s + expected_s
        self._seconds = FADE * before_s + seconds
        self._observed_at = now

    def _faded(self, now: float) -> tuple[float, float]:
        """Return both sums, closer to the prior the longer ago the last prompt was."""
        left = math.exp((self._observed_at - now) / FADE_S)
        expected_s = PRIOR_S + left * (self._expected_s - PRIOR_S)
        return expected_s, PRIOR_S + left * (self._seconds - PRIOR_S)
