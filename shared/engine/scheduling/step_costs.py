"""How long a step takes, learnt from the steps before it. Pure: it reads no clock.

    seconds = fixed + rows * per row + tokens * per token + products * per product

The coefficients are the least squares of relative errors over recent steps, none below 0. What
recent steps do not show, such as the price of a token while there is no prompt, stays as it was.
"""

from __future__ import annotations

from dataclasses import dataclass, field

DECAY = 0.95  # a step's weight in terms of the next one's
SHORTEST_S = 1e-4  # shorter steps have the weight of such a one
SOLVE_EVERY = 16  # observations, unless one of a chunk shows an error
TOLERANCE = 0.1  # of a prediction
SMALLEST_CHUNK = 16
# Sizes at which the terms may be of about the same importance, so that the equations are balanced.
_SCALES = (1.0, 16.0, 16.0, 16384.0)
# How much each term is held to its last value, relative to the steps' weight: tokens least, which
# explain the first step alone.
_RIDGES = (1e-2, 1e-4, 1e-6, 1e-3)

Vector = tuple[float, float, float, float]


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step computes.

    Attributes:
        rows: its decode rows.
        tokens: prompt tokens, in chunks.
        products: pairs of a chunk's token and a token that it attends to, itself included.
    """

    rows: int = 0
    tokens: int = 0
    products: int = 0

    def with_chunk(self, start: int, count: int) -> StepWork:
        """Return this work and a chunk of `count` tokens after `start` others of its sequence."""
        products = count * start + count * (count + 1) // 2
        return StepWork(self.rows, self.tokens + count, self.products + products)

    @property
    def text(self) -> str:
        """This work in words."""
        return f"{self.tokens} prompt tokens and {self.rows} decode rows"

    @property
    def terms(self) -> Vector:
        """What the coefficients are multiplied with."""
        scales = _SCALES
        return (
            1.0,
            self.rows / scales[1],
            self.tokens / scales[2],
            self.products / scales[3],
        )


@dataclass(slots=True)
class StepCosts:
    """Predicts the duration of a step from its work."""

    _coefficients: Vector = (0.0, 0.0, 0.0, 0.0)
    # The normal equations: left-hand side without its ridge, and right-hand side.
    _matrix: list[list[float]] = field(default_factory=lambda: [[0.0] * 4 for _ in range(4)])
    _vector: list[float] = field(default_factory=lambda: [0.0] * 4)
    _unsolved: int = 0

    def observe(self, work: StepWork, seconds: float) -> None:
        """Learn from a step, and how many seconds it took."""
        expected, terms = self.predict(work), work.terms
        # An outlier counts less than a step that took as long as expected, but is not ignored: the
        # machine may be slower from now on.
        weight = 1.0 / (max(seconds, SHORTEST_S) * max(expected or seconds, SHORTEST_S))
        for index, row in enumerate(self._matrix):
            weighted = weight * terms[index]
            for other, term in enumerate(terms):
                row[other] = DECAY * row[other] + weighted * term
            self._vector[index] = DECAY * self._vector[index] + weighted * seconds
        self._unsolved += 1
        is_wrong = work.tokens and abs(expected - seconds) > TOLERANCE * seconds
        if is_wrong or self._unsolved >= SOLVE_EVERY:
            self._unsolved = 0
            self._coefficients = _solve(self._matrix, self._vector, self._coefficients)

    def predict(self, work: StepWork) -> float:
        """Return how many seconds a step takes; 0 before any was observed."""
        pairs = zip(self._coefficients, work.terms, strict=True)
        return sum([coefficient * term for coefficient, term in pairs])

    def tokens_within(self, seconds: float, work: StepWork, start: int) -> int:
        """Return how many tokens a further chunk of a step may have, to keep it within a time.

        Chunks have a few sizes only, so that equal prompts are mostly cut alike.

        Args:
            seconds: how long the step may take.
            work: the step's other work.
            start: tokens of the chunk's sequence before it.

        Returns:
            At least `SMALLEST_CHUNK` if the step has no other chunk, otherwise that or 0.
        """
        _, _, per_token, per_product = self._coefficients
        per_token, per_product = per_token / _SCALES[2], per_product / _SCALES[3]
        left = seconds - self.predict(work)
        square, linear = per_product / 2, per_token + per_product * (start + 0.5)
        if left <= 0 or (square == 0 and linear == 0):
            count = 0 if left <= 0 else 1 << 30
        else:
            # The positive root of square * n^2 + linear * n = left, without cancellation.
            root = (linear * linear + 4 * square * left) ** 0.5
            count = int(min(2 * left / (linear + root), 1 << 30))
        if count < SMALLEST_CHUNK:
            return 0 if work.tokens else SMALLEST_CHUNK
        return count - count % max(SMALLEST_CHUNK, 1 << (count.bit_length() - 3))


def _solve(matrix: list[list[float]], vector: list[float], last: Vector) -> Vector:
    """Return the least squares without negative coefficients.

    As long as a coefficient is negative, the most negative one is set to 0 and the rest is solved
    again.

    Args:
        matrix: left-hand side of the normal equations.
        vector: their right-hand side.
        last: the coefficients so far.
    """
    held = [ridge * matrix[0][0] for ridge in _RIDGES]
    used = [0, 1, 2, 3]
    while used:
        solution = _eliminate(
            [[matrix[i][j] + (held[i] if i == j else 0.0) for j in used] for i in used],
            [vector[i] + held[i] * last[i] for i in used],
        )
        lowest = min(range(len(used)), key=lambda index: solution[index])
        if solution[lowest] >= 0:
            found = dict(zip(used, solution, strict=True))
            return (found.get(0, 0.0), found.get(1, 0.0), found.get(2, 0.0), found.get(3, 0.0))
        del used[lowest]
    return (0.0, 0.0, 0.0, 0.0)


def _eliminate(matrix: list[list[float]], vector: list[float]) -> list[float]:
    """Solve a positive definite system of equations by Gaussian elimination."""
    size = len(vector)
    for pivot in range(size):
        for row in range(pivot + 1, size):
            factor = matrix[row][pivot] / matrix[pivot][pivot]
            for column in range(pivot, size):
                matrix[row][column] -= factor * matrix[pivot][column]
            vector[row] -= factor * vector[pivot]
    solution = [0.0] * size
    for row in reversed(range(size)):
        known = sum(matrix[row][column] * solution[column] for column in range(row + 1, size))
        solution[row] = (vector[row] - known) / matrix[row][row]
    return solution
