"""Rotations of keys that depend on the length of the context."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ContextFit:
    """A rope with another rotation beyond the context of the model's first training.

    Attributes:
        trained: positions of this context.
        gradual: True if the rotation changes with each further position. Otherwise, one other
            rotation serves all tokens of every longer sequence.
    """

    trained: int
    gradual: bool

    def way(self, context: int) -> int:
        """Return a number for the rotation of keys in a context of this length; 0 for the first.

        Keys with the same number have the same rotation.
        """
        if context <= self.trained:
            return 0
        return context if self.gradual else 1

    def outgrown(self, context: int, num_tokens: int) -> bool:
        """Return True if a sequence of this length, rotated for ``context``, must start anew."""
        return not self.gradual and context <= self.trained < num_tokens
