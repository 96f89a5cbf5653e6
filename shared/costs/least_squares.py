"""Solves least squares without negative coefficients, for samples that are mostly 0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

_LARGEST_GAIN = 1e100


@dataclass(slots=True)
class Equations:
    """The normal equations of weighted samples, of which older ones count less and less.

    Attributes:
        size: number of terms.
    """

    size: int
    _matrix: list[list[float]] = field(init=False)
    _vector: list[float] = field(init=False)
    # Instead of making all else smaller, `fade` lets later samples be this much larger.
    _gain: float = 1.0

    def __post_init__(self) -> None:
        self._matrix = [[0.0] * self.size for _ in range(self.size)]
        self._vector = [0.0] * self.size

    def fade(self, factor: float) -> None:
        """Let the samples so far count less, by this factor."""
        self._gain /= factor
        if self._gain > _LARGEST_GAIN:
            self._matrix = [[value / self._gain for value in row] for row in self._matrix]
            self._vector = [value / self._gain for value in self._vector]
            self._gain = 1.0

    def add(self, parts: list[tuple[int, float]], result: float, weight: float) -> None:
        """Add a sample: terms that are not 0, with their indices, and their result."""
        weight *= self._gain
        for index, term in parts:
            row, weighted = self._matrix[index], weight * term
            for other, other_term in parts:
                row[other] += weighted * other_term
            self._vector[index] += weighted * result

    def plus(self, other: Equations, weight: float = 1.0, factor: float = 1.0) -> Equations:
        """Return the equations of the samples of both.

        Args:
            other: equations of as many terms.
            weight: of the other samples.
            factor: of their results. Their relative errors count as much as without it.
        """
        total = Equations(self.size)
        own, share = 1 / self._gain, weight / factor**2 / other._gain
        total._matrix = [
            [own * a + share * b for a, b in zip(*rows, strict=True)]
            for rows in zip(self._matrix, other._matrix, strict=True)
        ]
        share *= factor
        pairs = zip(self._vector, other._vector, strict=True)
        total._vector = [own * a + share * b for a, b in pairs]
        return total

    def factor_of(self, coefficients: Sequence[float]) -> float:
        """Return the factor of all coefficients with which they explain the samples best."""
        explained = [_product(row, coefficients) for row in self._matrix]
        total = _product(explained, coefficients)
        return _product(self._vector, coefficients) / total if total > 0 else 1.0

    def has(self, index: int) -> bool:
        """Whether some sample had this term."""
        return self._matrix[index][index] > 0

    def solve(self, ridges: Sequence[float], last: Sequence[float]) -> list[float]:
        """Return the coefficients that explain the samples best, none below 0.

        As long as a coefficient is negative, the most negative one is set to 0 and the rest is
        solved again. A term that no sample had keeps its coefficient.

        Args:
            ridges: how strongly each coefficient is held to its last value, relative to the weight
                of the samples. The first term must be 1 in all of them.
            last: the coefficients so far.
        """
        matrix, vector = self._matrix, self._vector
        held = [ridge * matrix[0][0] for ridge in ridges]
        used = [index for index in range(self.size) if self.has(index)]
        unknowns = list(last)
        while used:
            solution = _eliminate(
                [[matrix[i][j] + (held[i] if i == j else 0.0) for j in used] for i in used],
                [vector[i] + held[i] * last[i] for i in used],
            )
            lowest = min(range(len(used)), key=solution.__getitem__)
            if solution[lowest] >= 0:
                for index, value in zip(used, solution, strict=True):
                    unknowns[index] = value
                break
            unknowns[used[lowest]] = 0.0
            del used[lowest]
        return unknowns


def _product(left: Sequence[float], right: Sequence[float]) -> float:
    return sum([a * b for a, b in zip(left, right, strict=True)])


def _eliminate(matrix: list[list[float]], vector: list[float]) -> list[float]:
    """Solve a positive definite system of equations by Gaussian elimination."""
    size = len(vector)
    for pivot in range(size):
        pivot_row = matrix[pivot]
        for row in range(pivot + 1, size):
            if factor := matrix[row][pivot] / pivot_row[pivot]:
                changed = matrix[row]
                for column in range(pivot, size):
                    changed[column] -= factor * pivot_row[column]
                vector[row] -= factor * vector[pivot]
    solution = [0.0] * size
    for row in reversed(range(size)):
        known = sum([matrix[row][column] * solution[column] for column in range(row + 1, size)])
        solution[row] = (vector[row] - known) / matrix[row][row]
    return solution
