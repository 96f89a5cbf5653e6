"""Learns the prices of an engine's steps from the steps before. Pure: it reads no clock.

The prices are the least squares of relative errors over recent steps, none below 0. Steps with and
without prompt tokens are forgotten at their own paces, so that rare ones are not lost among many of
the other kind. What recent steps do not show, such as the price of a token while there is no
prompt, stays as it was. Prices that recent steps do not separate, as while all prompts have one
length, are those of the steps that ran before there was work, times one factor for each kind.

A step that takes much longer or shorter than predicted is an outlier. It counts as if it had taken
what is just no outlier, unless several follow one another: then the machine or its load has
changed. If other programs slow the machine for a moment, predictions of the next steps follow at
once, and the prices by and by.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from pagewire.shared.costs.least_squares import Equations
from pagewire.shared.costs.step_prices import KNOTS, StepPrices
from pagewire.shared.costs.step_work import NOTHING, StepWork

# By what the weight of a step shrinks with each further step of its kind, and of the other kind.
DECAY, DECAY_BY_OTHERS = 0.95, 0.998
SHORTEST_STEP_S = 1e-4  # shorter steps have the weight of such a one
# Decode steps of equally many rows count as one step of their median time: that takes less of the
# host's time, and a step during which the process was paused does not matter.
MOST_EQUAL_STEPS = 8
SOLVE_EVERY = 32  # steps, unless one with prompt tokens shows an error
TOLERANCE = 0.1  # relative error up to which a prediction counts as right
# A step is an outlier if its relative error is above the first, and above the median error times
# the second.
OUTLIER_ERROR, OUTLIER_MEDIANS = 0.5, 4.0
MOST_OUTLIERS = 3  # in a row that are not believed
# By what the weight of recent steps shrinks with each further outlier: the machine has changed.
DECAY_BY_CHANGE = 0.5
# How far the pace goes from one step to the next: of a step's error, as far as that is not an
# outlier's, and back to 1.
PACE_GAIN, PACE_RETURN, PACE_CLIP = 0.2, 0.1, 0.3
FIRST_WEIGHT = 0.05  # of a step that ran before there was work; a recent one has 1
LEAST_FACTOR = 0.01  # if recent steps take less than this share of their time, they say nothing
BELIEVED_STEPS = 16  # first steps of a kind, which are all believed
# Sizes at which the terms may be of about the same importance, so that the equations are balanced:
# one step, sequences, contexts, products, and the tokens between each two of `KNOTS`.
_SCALES = (1.0, 16.0, 16384.0, 16384.0, 8.0, 24.0, 96.0, 384.0, 512.0)
# How much each term is held to its last value, relative to the steps' weight: tokens least, which
# explain the first step alone.
_RIDGES = (1e-2, 1e-4, 1e-4, 1e-3, 1e-6, 1e-6, 1e-6, 1e-6, 1e-6)
_FIRST_TOKENS = 4  # index of the first term of tokens


@dataclass(slots=True)
class _Kind:
    """What is known from the steps with prompt tokens, or from those without.

    Attributes:
        steps: how many there were.
        error: median relative error of recent predictions; None before there were any.
        outliers: how many of the most recent steps in a row were outliers.
        equations: of recent steps.
        first: of those that ran before there was work.
    """

    steps: int = 0
    error: float | None = None
    outliers: int = 0
    equations: Equations = field(default_factory=lambda: Equations(len(_SCALES)))
    first: Equations = field(default_factory=lambda: Equations(len(_SCALES)))

    def record_error(self, expected: float, seconds: float) -> None:
        """Take a prediction into account that was made before the step."""
        if expected <= 0 or seconds <= 0:
            return
        error = abs(expected / seconds - 1)
        if self.error is None:
            self.error = min(error, 1e3)
        # Up as often as down: that is the median.
        factor = 1 + max(0.05, 1 / (1 + self.steps))
        self.error = max(1e-3, self.error * (factor if error > self.error else 1 / factor))

    def believed(self, expected: float, seconds: float) -> float:
        """Return what to learn from a step's time."""
        most = 1 + max(OUTLIER_ERROR, OUTLIER_MEDIANS * (self.error or 0))
        is_usual = expected / most <= seconds <= expected * most
        if expected <= 0 or self.steps < BELIEVED_STEPS or is_usual:
            self.outliers = 0
            return seconds
        self.outliers += 1
        if self.outliers > MOST_OUTLIERS:
            self.equations.fade(DECAY_BY_CHANGE)
            return seconds
        return expected * most if seconds > expected else expected / most


@dataclass(slots=True)
class StepCosts:
    """Learns prices from each step that ends.

    Attributes:
        prices: the present ones, without errors and counts.
        pace: how many times as long as by the prices the next steps take, as the last few did.
        largest: most prompt tokens that a step had so far; the prices of more are extrapolated.
    """

    prices: StepPrices = field(default_factory=StepPrices)
    largest: int = 0
    pace: float = 1.0
    _decodes: _Kind = field(default_factory=_Kind)
    _prompts: _Kind = field(default_factory=_Kind)
    _terms: list[float] = field(default_factory=lambda: [0.0] * len(_SCALES))  # scaled prices
    # The steps of both kinds that ran before there was work, and the terms that explain them best.
    _first: Equations = field(default_factory=lambda: Equations(len(_SCALES)))
    _first_terms: list[float] = field(default_factory=lambda: [0.0] * len(_SCALES))
    _unsolved: int = 0
    _last_term: int = 0  # the last term of tokens that any step had
    _run: list[float] = field(default_factory=list)  # seconds of equal decode steps
    _run_work: StepWork = NOTHING  # work of the first of these steps

    @property
    def published(self) -> StepPrices:
        """The present prices, with errors and counts; may be read in any thread."""
        decodes, prompts = self._decodes, self._prompts
        return msgspec.structs.replace(
            self.prices,
            error=decodes.error if decodes.steps > prompts.steps else prompts.error,
            prompt_error=prompts.error,
            steps=decodes.steps + len(self._run) + prompts.steps,
            prompt_steps=prompts.steps,
            largest=self.largest,
        )

    def predict(self, work: StepWork) -> float:
        """Return how many seconds a step takes; 0 before any was observed."""
        return self.pace * self.prices.step_s(work)

    def learn(self, work: StepWork, seconds: float) -> None:
        """Learn from a step that nobody predicted, since it ran before there was work."""
        kind, other = self._decodes, self._prompts
        if work.tokens:
            kind, other = other, kind
        self.largest = max(self.largest, work.tokens)
        self._learn(kind, other, work, seconds, 1)
        kind.first.add(_parts(work), seconds, max(seconds, SHORTEST_STEP_S) ** -2)
        self._first = self._decodes.first.plus(self._prompts.first)
        self._first_terms = self._first.solve(_RIDGES, self._first_terms)

    def observe(self, work: StepWork, seconds: float) -> None:
        """Learn from a step, and how many seconds it took."""
        expected = self.predict(work)
        if expected > 0:
            error = min(PACE_CLIP, max(-PACE_CLIP, seconds / expected - 1))
            self.pace += PACE_GAIN * error * self.pace + PACE_RETURN * (1 - self.pace)
        if work.tokens:
            self.largest = max(self.largest, work.tokens)
            self._end_run()
            self._prompts.record_error(expected, seconds)
            self._learn(self._prompts, self._decodes, work, seconds, 1)
            return
        run = self._run
        if run and work.rows != self._run_work.rows:
            self._end_run()
        if not run:
            self._run_work = work
            self._decodes.record_error(expected, seconds)
        run.append(seconds)
        if len(run) >= MOST_EQUAL_STEPS or self._decodes.steps < BELIEVED_STEPS:
            self._end_run()

    def _end_run(self) -> None:
        """Learn from decode steps with equally many rows."""
        if not (count := len(self._run)):
            return
        median = sorted(self._run)[count // 2]
        self._run.clear()
        rows, contexts = self._run_work.rows, self._run_work.contexts
        work = StepWork(rows, contexts + rows * (count - 1) // 2)
        self._learn(self._decodes, self._prompts, work, median, count)

    def _learn(self, kind: _Kind, other: _Kind, work: StepWork, seconds: float, count: int) -> None:
        expected = self.prices.step_s(work)
        seconds = kind.believed(expected, seconds)
        kind.steps += count
        kind.equations.fade(DECAY**count)
        other.equations.fade(DECAY_BY_OTHERS**count)
        shortest_s = SHORTEST_STEP_S
        weight = count / (max(seconds, shortest_s) * max(expected or seconds, shortest_s))
        parts = _parts(work)
        self._last_term = max(self._last_term, parts[-1][0])
        kind.equations.add(parts, seconds, weight)
        self._unsolved += count
        is_wrong = work.tokens and abs(expected - seconds) > TOLERANCE * seconds
        if is_wrong or self._unsolved >= SOLVE_EVERY or kind.steps < BELIEVED_STEPS:
            self._unsolved = 0
            self._solve()

    def _solve(self) -> None:
        """Set the prices to those that explain the steps best."""
        decodes, prompts = self._decodes, self._prompts
        known = decodes.equations.plus(prompts.equations)
        # Work that the first steps did not have would be free by them.
        if all(self._first.has(index) or not known.has(index) for index in range(len(_SCALES))):
            for kind in (decodes, prompts):
                if (factor := kind.equations.factor_of(self._first_terms)) > LEAST_FACTOR:
                    known = known.plus(kind.first, FIRST_WEIGHT, factor)
        self._terms = terms = known.solve(_RIDGES, self._terms)
        prices = [term / scale for term, scale in zip(terms, _SCALES, strict=True)]
        for index in range(_FIRST_TOKENS + 1, len(terms)):
            if index > self._last_term:  # no step ever had as many tokens
                prices[index] = prices[index - 1]
                terms[index] = prices[index] * _SCALES[index]
        self.prices = StepPrices(
            fixed=prices[0],
            per_sequence=prices[1],
            per_context=prices[2],
            per_product=prices[3],
            per_token=tuple(prices[_FIRST_TOKENS:]),
        )


def _parts(work: StepWork) -> list[tuple[int, float]]:
    """Return the terms of a work that are not 0, with their indices."""
    tokens = work.rows + work.tokens
    parts = [(0, 1.0), (1, (work.rows + work.chunks) / _SCALES[1])]
    if work.contexts:
        parts.append((2, work.contexts / _SCALES[2]))
    if work.products:
        parts.append((3, work.products / _SCALES[3]))
    ends = (*KNOTS[1:], tokens)
    for number, (start, end) in enumerate(zip(KNOTS, ends, strict=True)):
        if tokens <= start:
            break
        index = _FIRST_TOKENS + number
        parts.append((index, (min(tokens, max(start, end)) - start) / _SCALES[index]))
    return parts
