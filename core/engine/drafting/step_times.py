"""``StepTimes``: the time of a step by its number of rows."""

from __future__ import annotations

_KEPT = 1 - 1 / 64
"""The share of its weight that each step keeps when another one comes."""

_ASSUMED = 0.1
"""The time of one more row, over that of a step without rows, before steps were measured."""

_LEAST = 0.01
"""The same at least: for few rows, noise may hide what they cost."""

_SPREAD = 0.25
"""The least variance of numbers of rows that a line is fitted to."""

_LONGEST = 4.0
"""The longest time that counts, over the average. The machine may have been busy otherwise."""


class StepTimes:
    """A line through the times of recent steps: a constant, and the time of each row.

    Only the ratio of the two is kept. It stays while all steps have the same number of rows.
    """

    def __init__(self) -> None:
        self.ratio = _ASSUMED
        # Weighted sums over steps: of weights, rows, seconds, and their products.
        self._weight = 0.0
        self._rows = 0.0
        self._seconds = 0.0
        self._rows_squared = 0.0
        self._rows_seconds = 0.0

    def add(self, rows: int, seconds: float) -> None:
        """Add a measured step."""
        if self._weight:
            seconds = min(seconds, _LONGEST * self._seconds / self._weight)
        self._weight = self._weight * _KEPT + 1
        self._rows = self._rows * _KEPT + rows
        self._seconds = self._seconds * _KEPT + seconds
        self._rows_squared = self._rows_squared * _KEPT + rows * rows
        self._rows_seconds = self._rows_seconds * _KEPT + rows * seconds
        self._fit()

    def _fit(self) -> None:
        """Fit the line by least squares."""
        mean_rows = self._rows / self._weight
        mean_seconds = self._seconds / self._weight
        variance = self._rows_squared / self._weight - mean_rows**2
        if variance < _SPREAD:
            return
        covariance = self._rows_seconds / self._weight - mean_rows * mean_seconds
        of_row = covariance / variance
        constant = mean_seconds - of_row * mean_rows
        if constant > 0:
            self.ratio = max(of_row / constant, _LEAST)

    def share_of_row(self, rows: int) -> float:
        """Return what one more row costs, in tokens that a step with these rows gives meanwhile.

        For example, if the row makes a step with 4 rows longer by a tenth, this is 0.4.
        """
        return rows * self.ratio / (1 + rows * self.ratio)
