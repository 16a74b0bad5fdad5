"""The settings of a config by their names, of which a missing or an implausible one is an error that names it."""

from __future__ import annotations

import math
from typing import Any

from opgraft.errors import ModelError, close_matches

LARGEST_SIZE = 2**23
"""The most that a size may be, several times that of any model: a table of as many rows has gigabytes."""


class GivenSettings:
    """The settings of a config.

    Args:
        config: has them as attributes.
        **others: in the place of those of the same name.
    """

    def __init__(self, config: Any, **others: Any) -> None:
        self.name = type(config).__name__
        self._values = {**vars(config), **others}

    def __call__(self, name: str, *default: Any) -> Any:
        """Return a setting, or the default where it is missing or ``None``.

        Raises:
            ModelError: it is missing, and no default is given.
        """
        value = self._values.get(name)
        if value is None and not default:
            raise ModelError(f"{self.name} has no {name}: {close_matches(name, self._values)}")
        return default[0] if value is None else value

    def size(self, name: str, *default: Any) -> int:
        """Return a size, which is a positive integer of a plausible magnitude.

        Raises:
            ModelError: it is none.
        """
        value = self(name, *default)
        if type(value) is not int or not 1 <= value <= LARGEST_SIZE:
            raise ModelError(
                f"{self.name}: {name} is {value!r:.40}, expected an integer from 1 to {LARGEST_SIZE}"
            )
        return value

    def count(self, name: str) -> int:
        """Return how many there are, none where the setting is missing or 0.

        Raises:
            ModelError: it is no size otherwise.
        """
        return 0 if self(name, None) in (None, 0) else self.size(name)

    def epsilon(self, name: str) -> float:
        """Return what is added to a variance, a finite number that is not negative.

        Raises:
            ModelError: it is missing or none.
        """
        value = self(name)
        if type(value) not in (int, float) or not 0 <= value < math.inf:
            raise ModelError(
                f"{self.name}: {name} is {value!r:.40}, expected a number from 0, like 1e-5"
            )
        return float(value)

    def first_size(self, *names: str) -> int:
        """Return the size that the first of some settings has that is there.

        Raises:
            ModelError: it is none, or all are missing.
        """
        return self.size(next((name for name in names if self(name, None) is not None), names[-1]))
