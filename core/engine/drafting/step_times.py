"""``StepTimes``: the time of a step by its number of rows."""

from __future__ import annotations

_KEPT = 1 - 1 / 64
"""The share of their weight that earlier steps keep at each new step."""

_ASSUMED = 0.1
"""The time of one more row over the constant time of a step, before steps are measured."""

_LEAST = 0.01
"""The least such ratio: noise may hide the cost of a row."""

_SPREAD = 0.25
"""The least variance of numbers of rows to fit a line."""

_WARMING = 8
"""The first steps, which do not count: files are read, and memory is taken."""

_LONGEST = 4.0
"""The longest time to count, over the average. Other programs may have taken the machine."""


class StepTimes:
    """A line through the times of recent steps: a constant, and the time of each row.

    ``ratio`` is the second over the first.
    """

    def __init__(self) -> None:
        self.ratio = _ASSUMED
        self._left_out = 0
        # Weighted sums over steps: of weights, rows, seconds, and their products.
        self._weight = 0.0
        self._rows = 0.0
        self._seconds = 0.0
        self._rows_squared = 0.0
        self._rows_seconds = 0.0

    def add(self, rows: int, seconds: float) -> None:
        """Add a measured step."""
        if self._left_out < _WARMING:
            self._left_out += 1
            return
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
        # The slope of the line, and its value for no rows.
        of_row = covariance / variance
        constant = mean_seconds - of_row * mean_rows
        if constant > 0:
            self.ratio = max(of_row / constant, _LEAST)

    def share_of_row(self, rows: int) -> float:
        """Return the cost of one more row in a step with ``rows`` rows, in tokens."""
        # If a row makes a step with 4 rows longer by a tenth, the rows give 0.4 tokens meanwhile.
        return rows * self.ratio / (1 + rows * self.ratio)
