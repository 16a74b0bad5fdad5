"""Rotations of keys that depend on the length of the context."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ContextFit:
    """A rope that rotates in another way beyond the context that the model was first trained for.

    Attributes:
        trained: positions of that context.
        gradual: the rotation changes with each further position. Otherwise there is one way more,
            for the whole of a sequence that is longer.
    """

    trained: int
    gradual: bool

    def way(self, context: int) -> int:
        """Return a number for the way in which keys are rotated that were computed for a context of that length."""
        if context <= self.trained:
            return 0
        return context if self.gradual else 1

    def outgrown(self, context: int, num_tokens: int) -> bool:
        """Tell whether a sequence that was rotated for ``context`` has come to where it must be computed anew."""
        return not self.gradual and context <= self.trained < num_tokens
