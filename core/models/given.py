"""The settings of a config by name. A missing or implausible setting is an error."""

from __future__ import annotations

import math
from typing import Any

from opgraft.errors import ModelError, close_matches

LARGEST_SIZE = 2**23
"""The largest size, several times that of any model: a table with so many rows has gigabytes."""


class GivenSettings:
    """The settings of a config.

    Args:
        config: has the settings as attributes.
        **others: settings that replace those of the same name.
    """

    def __init__(self, config: Any, **others: Any) -> None:
        self.name = type(config).__name__
        self._values = {**vars(config), **others}

    def __call__(self, name: str, *default: Any) -> Any:
        """Return a setting, or the default if the setting is missing or ``None``.

        Raises:
            ModelError: the setting is missing, and no default is given.
        """
        value = self._values.get(name)
        if value is not None:
            return value
        # None is a default, too, so the number of arguments tells.
        if not default:
            raise ModelError(f"{self.name} has no {name}: {close_matches(name, self._values)}")
        return default[0]

    def size(self, name: str, *default: Any) -> int:
        """Return a size: an integer from 1 to ``LARGEST_SIZE``.

        Raises:
            ModelError: the setting is no such integer.
        """
        value = self(name, *default)
        # Not isinstance: true in JSON is an integer in Python.
        if type(value) is not int or not 1 <= value <= LARGEST_SIZE:
            raise ModelError(
                f"{self.name}: {name} is {value!r:.40}, expected an integer from 1 to "
                f"{LARGEST_SIZE}"
            )
        return value

    def count(self, name: str) -> int:
        """Return a number of things: 0 if the setting is missing, else an integer.

        Raises:
            ModelError: the setting is neither 0 nor a size.
        """
        if self(name, None) in (None, 0):
            return 0
        return self.size(name)

    def epsilon(self, name: str) -> float:
        """Return the number that a norm adds to a variance: finite and not negative.

        Raises:
            ModelError: the setting is missing or no such number.
        """
        value = self(name)
        if type(value) not in (int, float) or not 0 <= value < math.inf:
            raise ModelError(
                f"{self.name}: {name} is {value!r:.40}, expected a number from 0, like 1e-5"
            )
        return float(value)

    def first_size(self, *names: str) -> int:
        """Return the size by the first of the names that the config has.

        Raises:
            ModelError: the setting is no size, or all are missing.
        """
        for name in names:
            if self(name, None) is not None:
                return self.size(name)
        # The error names the last.
        return self.size(names[-1])
